# SPDX-License-Identifier: Apache-2.0
"""bench/quality with carried differences: what is kept and added, when, and that every dense call is counted."""
import pathlib
import sys
from dataclasses import replace

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "quality"))
import attend  # noqa: E402
import plans  # noqa: E402
import scores  # noqa: E402
from carry import LARGEST, Carry, stored  # noqa: E402
from hub import Hub  # noqa: E402
from schedule import Schedule, by_drift, staggered  # noqa: E402
from spec import Spec  # noqa: E402

STEPS, LAYERS, H, D = 6, 2, 2, 16
GRID = (8, 8, 8)
N = GRID[0] * GRID[1] * GRID[2]
RULE = "sel=errq8m4 bud=layer lev=64/8 warm=0 l0=0 refresh=anchor oref=anchor share=1 work=0.9"
KINDS = ["carry=0/.5 order=ad", "carry=0/.5 cown=1 share=0", "carry=0/.5 csel=err64", "carry=0/.5 cstag=2 order=ad",
         "carry=0/.34/.67 skip=.34/.5", "carry=0 plan=shape shape=9/1/0", "carry=qk2", "carry=0/.5 cbits=16 lev=64"]
DRIFT = [[[float(t - s) * (1 + layer) for t in range(STEPS)] for s in range(STEPS)] for layer in range(LAYERS)]


def swap(words):
    kept = [w for w in RULE.split() if w.split("=")[0] not in [x.split("=")[0] for x in words.split()]]
    return Spec.parse(" ".join([*kept, words])).resolved(STEPS)


@pytest.fixture(scope="module", params=[1, 2], ids=["one branch", "two branches"])
def branches(request):
    return request.param


@pytest.fixture(scope="module")
def calls(branches):
    """q, k, v of every cell, which change slowly from step to step."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                # the products are small
    torch.manual_seed(11)
    out = {}
    for layer in range(LAYERS):
        x = [torch.randn(2 * branches, H, N, D) for _ in range(3)]
        for s in range(STEPS):
            out[s, layer] = x
            x = [y + 0.05 * torch.randn_like(y) for y in x]
    yield out
    torch.set_num_threads(threads)


def run(spec, calls, branches):
    """(work that was counted, work that was expected, {cell: output}) of all computed steps."""
    shape = plans.Shape(STEPS, LAYERS, N, D, [1 - s / STEPS for s in range(STEPS)], branches)
    schedule = Schedule(spec, by_drift(DRIFT, 2) if spec.carry.startswith("qk") else None)
    density, expected = plans.solve(spec, shape, schedule=schedule)
    hub, out = Hub(GRID, 1, branches), {}
    hub.begin("run", spec, density=density, schedule=schedule)
    for (s, layer), (q, k, v) in sorted(calls.items()):
        hub.step = s
        if not spec.skips(s):
            out[s, layer] = hub.attend(layer, q, k, v)
    return float(sum(hub.spent.values())) / len(calls), expected, out


def error(calls, out):
    return sum(float((o - torch.nn.functional.scaled_dot_product_attention(*calls[c])).square().mean())
               for c, o in out.items()) / len(out)


@pytest.mark.parametrize("words", KINDS)
def test_every_cost_is_counted(words, calls, branches):
    spec = swap(words)
    spent, expected, _ = run(spec, calls, branches)
    assert expected == pytest.approx(0.9, abs=1e-6) or spec.skip     # fewer steps cannot cost that
    # a threshold of a layer stops less than two blocks short
    assert spent == pytest.approx(expected, abs=2 / (H * (N // 64) ** 2))


@pytest.mark.parametrize("words", ["", "order=hilbert", "bk=16 sel=mass64"])
def test_one_dense_warm_up_and_what_it_keeps(words, calls, branches):
    """carry=warm: masks and differences of each branch from its last dense step; its sparse call there is counted."""
    spec = Spec.parse(f"src=warm sel=mass64 bud=uniform tail=0 l0=0 carry=warm cown=1 cbits=16 warm=2 work=0.7 {words}")
    spent, expected, out = run(spec, calls, branches)
    # as many blocks in every row: a block a row more or less
    assert expected == pytest.approx(0.7, abs=1e-6) and spent == pytest.approx(expected, abs=1 / (N // spec.bk))
    want = torch.nn.functional.scaled_dot_product_attention(*calls[1, 0])
    assert torch.allclose(out[1, 0], want, atol=1e-5)           # f32, outputs of size 1
    assert error(calls, out) < 0.5 * error(calls, run(replace(spec, carry=""), calls, branches)[2])


def test_an_anchor_costs_the_dense_calls_of_its_branches():
    shape = plans.Shape(STEPS, LAYERS, N, D, [1.0] * STEPS, 2)
    free = Schedule(plain := swap("refresh=0 oref=0"))
    for words, dense in (("carry=0 refresh=0 oref=0", 0.5), ("carry=0 refresh=0 oref=0 cown=1", 1.0)):
        spec = swap(words)
        have, had = (sum(plans.extra_work(s, shape, 0, 0, x)) for s, x in ((spec, Schedule(spec)), (plain, free)))
        assert have - had == pytest.approx(dense)
    one = swap("carry=0 refresh=0 oref=0 csel=err64")
    score = plans.extra_work(one, shape, 0, 0, Schedule(one))[1]
    assert score == pytest.approx(0.5 * scores.beside_dense(one, "err64"))
    assert scores.beside_dense(one, "err64") == pytest.approx(1 / 64 + 0.5 / 64 + 1 / 64 + 0.5 / 8)


def test_an_anchor_is_dense_and_later_steps_are_closer(calls, branches):
    spec = swap("carry=0/.5 order=ad work=0.6")     # orders alone cost 0.2 of so few tokens
    _, _, out = run(spec, calls, branches)
    n = 2
    for step in (0, 3):
        want = torch.nn.functional.scaled_dot_product_attention(*calls[step, 1])
        assert torch.allclose(out[step, 1][:n], want[:n], atol=1e-5)        # f32, outputs of size 1
        if branches == 2:
            assert not torch.allclose(out[step, 1][n:], want[n:], atol=1e-3)
    with_d = error(calls, run(swap("carry=0/.5 work=0.7 cown=1"), calls, branches)[2])
    without = error(calls, run(swap("refresh=0/.5 oref=0/.5 work=0.7"), calls, branches)[2])
    assert with_d < 0.5 * without


def test_the_difference_is_kept_until_the_next_anchor(calls, branches):
    """Steps 1 and 2 add what step 0 kept, rounded as the library rounds it; without anchors nothing is added."""
    spec = swap("carry=0/.5 cown=1 work=0.7")
    bare = swap("refresh=0/.5 oref=0/.5 share=1 work=0.7")
    shape = plans.Shape(STEPS, LAYERS, N, D, [1.0] * STEPS, branches)
    density, _ = plans.solve(spec, shape)
    hubs = [Hub(GRID, 1, branches), Hub(GRID, 1, branches)]
    for hub, one in zip(hubs, (spec, bare)):
        hub.begin("run", one, density=density)
    d = None
    for s in range(3):
        for hub in hubs:
            hub.step = s
        q, k, v = calls[s, 0]
        o, plain = hubs[0].attend(0, q, k, v), hubs[1].attend(0, q, k, v)
        if s == 0:
            d = stored(torch.nn.functional.scaled_dot_product_attention(q, k, v) - plain, 8)
        else:
            assert torch.allclose(o, plain + d, atol=1e-4)      # a sum's last bit may move an element of d by a step


def test_one_branch_serves_the_others():
    spec, torch_o = Spec.parse("carry=0 cbits=32"), torch.zeros(4, 1, 3, 2)
    c = Carry(spec, 2)
    dense = torch.randn(2, 1, 3, 2)
    assert torch.equal(c.add(0, torch_o), torch_o)              # in front of the first anchor
    assert torch.equal(c.make(0, torch_o, dense), torch.cat([dense, dense]))
    assert torch.equal(c.add(0, torch_o), torch.cat([dense, dense]))
    assert c.dense_part(torch_o).shape[0] == 2 and torch.equal(c.add(1, torch_o), torch_o)
    own = Carry(Spec.parse("carry=0 cbits=32 cown=1"), 2)
    assert own.dense_part(torch_o).shape[0] == 4


def test_formats_of_the_difference():
    torch.manual_seed(12)
    d = torch.randn(2, 3, 50, 64) * torch.logspace(-6, 3, 50)[:, None]
    assert torch.equal(stored(d, 32), d)
    assert float(((stored(d, 16) - d).abs() / d.abs()).max()) <= 2 ** -8          # half a step of 8 bits
    largest = d.abs().amax(-1, keepdim=True)
    # half a step of 4 bits, and of the smallest step (2^-9) where the value is far below the row's largest
    assert bool(((stored(d, 8) - d).abs() <= d.abs() * 2 ** -4 + largest / LARGEST * 2 ** -10).all())
    assert torch.equal(stored(torch.zeros(1, 1, 2, 4), 8), torch.zeros(1, 1, 2, 4))


def test_schedules():
    spec = Spec.parse("carry=0/.1/.2/.35/.55/.75 warm=0 l0=0 refresh=anchor oref=anchor order=ad")
    got = {n: spec.resolved(n).carry for n in (4, 8, 25, 50)}
    assert got == {4: "0/1/2/3", 8: "0/1/2/4/6", 25: "0/2/5/8/13/18", 50: "0/5/10/17/27/37"}
    s = Schedule(spec.resolved(50))
    assert [t for t in range(50) if s.mask(t, 3)] == [0, 5, 10, 17, 27, 37] and s.order(17, 0) and not s.order(18, 0)
    assert staggered("0/8/16", 0.0) == {0, 8, 16} and staggered("0/8/16", 0.5) == {0, 4, 12}
    s = Schedule(Spec.parse("carry=0/8/16 cstag=4 warm=0 l0=0"))
    assert [[t for t in range(20) if s.anchor(t, layer)] for layer in range(5)] == [
        [0, 8, 16], [0, 6, 14], [0, 4, 12], [0, 2, 10], [0, 8, 16]]
    left_out = Spec.parse("carry=0/.25/.5 refresh=0/.5 skip=.5/.625 warm=0").resolved(8)
    assert (left_out.carry, left_out.refresh, left_out.skip) == ("0/2/6", "0/6", "4/5")
    assert [left_out.skips(t) for t in range(8)] == [t in (4, 5) for t in range(8)]


def test_anchors_follow_a_drift():
    even = by_drift(DRIFT[:1] * 2, 3)
    assert even == {0: {0, 2, 4}, 1: {0, 2, 4}}
    uneven = by_drift(DRIFT, 2.5)               # the second layer drifts twice as fast
    assert len(uneven[1]) > len(uneven[0]) and len(uneven[0]) + len(uneven[1]) <= 5
    with pytest.raises(ValueError, match="measured drifts"):
        Schedule(Spec.parse("carry=out4"))


def test_blocks_that_do_not_divide_the_tokens(branches):
    """The last part is repeated and counts for as much as it is: everything exact gives dense attention, and scores are
    those of the tokens that there are."""
    torch.manual_seed(13)
    hub = Hub((3, 8, 6), 1, branches)           # 144 tokens: two blocks of 64 and 16 tokens
    q, k, v = (torch.randn(branches, 2, 144, D) for _ in range(3))
    want = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    spec = Spec.parse("sel=errq8m4 bud=layer lev=64/16 order=ad warm=0 l0=0")
    hub.begin("run", spec, density={(0, 0): 1.0})
    assert torch.allclose(hub.attend(0, q, k, v), want, atol=1e-5)              # f32, outputs of size 1
    hub.begin("run", spec, density={(0, 0): 0.6})
    assert hub.attend(0, q, k, v).shape == q.shape and hub.last_share() == 0.25
    hub.grid = (1, 8, 11)
    with pytest.raises(ValueError, match="24 are left"):
        hub.padded(q[:, :, :88])
    hub.grid = (1, 8, 10)
    q1, k1, v1 = (hub.padded(x[:, :, :80]) for x in (q, k, v))
    _, mass = scores.estimate(Spec.parse("sel=mass64"), q1, k1, v1, end=hub.last_share())
    p = (q[:, :, :80] @ k[:, :, :80].transpose(-1, -2)).softmax(-1)
    assert torch.allclose(mass[..., 0, 1], p[:, :, :64, 64:].sum(-1).mean(-1), atol=1e-6)
    assert torch.allclose(mass[..., 1, 1], p[:, :, 64:, 64:].sum(-1).mean(-1), atol=1e-6)
    level = torch.tensor([[0, 1], [1, 0]]).expand(branches, 2, 2, 2)
    o = attend.sparse(Spec.parse("sel=errq8m4 bud=layer lev=64"), q1, k1, v1, level, hub.last_share())[:, :, :80]
    logit = q[:, :, :80] @ k[:, :, :80].transpose(-1, -2)
    e, x = logit[:, :, :64, :64].exp(), v[:, :, :64]
    t = 16 * (q[:, :, :64] @ k[:, :, 64:80].mean(2, keepdim=True).transpose(-1, -2)).exp()
    part = (e @ x + t * v[:, :, 64:80].mean(2, keepdim=True)) / (e.sum(-1, keepdim=True) + t)
    assert torch.allclose(o[:, :, :64], part, atol=1e-5)


def test_wrong_words_are_refused():
    for words in ("carry=0 resid=2", "refresh=anchor", "carry=warm", "carry=0 src=warm", "csel=err64",
                  "carry=0 cbits=4", "carry=0 order=kmeans", "carry=0 csel=err64"):
        with pytest.raises(ValueError):
            Spec.parse(words)
