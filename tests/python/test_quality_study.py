# SPDX-License-Identifier: Apache-2.0
"""bench/quality, the simulation that settings are compared with: its scores against sums in f64, what it counts as work
against what it does, its orders, plans and schedules. No model is loaded: random attention inputs take its place."""
import math
import pathlib
import sys

import pytest
import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parents[2] / "bench" / "quality"))
import attend  # noqa: E402
import choose  # noqa: E402
import orders  # noqa: E402
import plans  # noqa: E402
import scores  # noqa: E402
from hub import Hub, Late  # noqa: E402
from settings import GROUPS  # noqa: E402
from spec import Spec, due  # noqa: E402

STEPS, LAYERS, B, H, D = 3, 2, 2, 2, 16     # B: a guided and an unguided entry
GRID = (8, 8, 8)
N = GRID[0] * GRID[1] * GRID[2]
SHAPE = plans.Shape(STEPS, LAYERS, N, D, [1.0, 0.7, 0.3])
WORK = 0.95                                 # orders of so few tokens cost a large share of dense attention


@pytest.fixture(scope="module")
def calls():
    """q, k, v of every cell: noise around a few centres, so that there is something to choose."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)                # the products are small
    torch.manual_seed(5)
    centre = 2 * torch.randn(B, H, 8, D)
    kind = torch.randint(8, (N,))
    yield {(s, layer): [torch.randn(B, H, N, D) + centre[:, :, kind] for _ in range(3)]
           for s in range(STEPS) for layer in range(LAYERS)}
    torch.set_num_threads(threads)


def settings():
    """Every kind of setting in the groups once: those that differ in numbers alone are one kind."""
    seen = {}
    for group in GROUPS.values():
        for words, _ in group:
            spec = Spec.parse(words, work=WORK, **({"shape": "9/1/-1"} if "shape=fit" in words else {}))
            kind = (spec.score()[:2], spec.src, spec.bud, spec.plan, len(spec.lev), spec.tail == 0, spec.osrc[:4],
                    spec.zsrc, spec.twice, spec.resid > 0, spec.near > 0, spec.cent > 0, spec.bq, spec.order,
                    spec.refresh, spec.oref, spec.share, spec.wt, spec.field, spec.warm, spec.l0)
            if not spec.carry and spec.warm < STEPS and spec.l0 < LAYERS:       # carry: test_quality_carry.py
                seen.setdefault(kind, spec)
    return list(seen.values())


def run(spec, calls, density, **more):
    """A hub that took all calls, and the mean squared error of their outputs."""
    hub, error = Hub(GRID, 1), 0.0
    hub.begin("run", spec, density=density, weights={c: torch.ones(H) for c in calls}, **more)
    for (s, layer), (q, k, v) in calls.items():
        hub.step = s
        o = hub.attend(layer, q, k, v)
        assert o.shape == q.shape
        error += float((o - torch.nn.functional.scaled_dot_product_attention(q, k, v)).square().mean())
    return hub, error / len(calls)


def granularity(spec):
    """Largest difference between asked and realised density: what one block more or less makes. Thresholds of a layer
    move by a block of all rows, other budgets by a block a row; levels stop before the first step that does not fit."""
    nq, nk = N // spec.bq, N // spec.bk
    if spec.order == "kmeans":              # pieces are pairs of clusters of any size; here one may hold an eighth
        return 0.15
    if spec.bud in ("layer", "joint"):
        return 2 / (H * nq * nk)
    return 1 / nk


@pytest.mark.parametrize("spec", settings(), ids=lambda s: s.label().replace(" ", ","))
def test_a_setting_costs_what_was_asked(spec, calls):
    torch.manual_seed(6)
    spec = spec.resolved(STEPS)
    curves = {c: (lambda d: (1 - d) ** 2 / d) for c in calls}
    density, expected = plans.solve(spec, SHAPE, curves)
    assert expected == pytest.approx(WORK, abs=1e-6) or max(density.values()) == 1.0
    more = {}
    if spec.src == "cached":
        hub = Hub(GRID, 1)
        hub.begin("record", spec)
        for (s, layer), (q, k, v) in calls.items():
            hub.step = s
            hub.attend(layer, q, k, v)
        more = {"recorded": hub.found}
        if spec.bud == "joint":
            found = {c: hub.found[c][0] for c in density}
            more = {"fixed": choose.joint_levels(found, spec.sizes(), sum(density.values()) / len(density))}
    hub, error = run(spec, calls, density, **more)
    work = float(sum(hub.spent.values())) / len(calls)
    assert work == pytest.approx(expected, abs=granularity(spec))
    assert math.isfinite(error)


def test_nothing_is_lost_where_everything_is_exact(calls):
    spec = Spec.parse("sel=errq8m4 bud=layer lev=64/8 order=ad warm=0 l0=0 leafq=4 leafk=4").resolved(STEPS)
    _, error = run(spec, calls, dict.fromkeys(calls, 1.0))
    assert error < 1e-10                    # f32, outputs of size 1


def test_more_work_means_less_error(calls):
    spec = Spec.parse("sel=errq8m4 bud=layer lev=64/8 warm=0 l0=0").resolved(STEPS)
    errors = [run(spec, calls, dict.fromkeys(calls, d))[1] for d in (0.15, 0.3, 0.6, 0.9)]
    assert errors == sorted(errors, reverse=True)


def test_scores_are_the_error_that_the_tail_makes(calls):
    """All queries and all keys of a block: the definition, term by term in f64."""
    q, k, v = (x[:1, :1, :192].double() for x in calls[0, 0])
    spec = Spec.parse("sel=err64 bud=layer lev=64/16")
    found, mass = scores.estimate(spec, q, k, v)
    e = (q @ k.transpose(-1, -2)).exp()
    Z = e.sum(-1, keepdim=True)
    o = e @ v / Z
    for size, got in zip(spec.sizes(), found):
        for j in range(3):
            part = slice(64 * j, 64 * j + 64)
            a, w = e[..., part] @ v[:, :, part], e[..., part].sum(-1, keepdim=True)
            km, vm = (scores.means(x[:, :, part], size) for x in (k, v))
            t = size * (q @ km.transpose(-1, -2)).exp()
            x = a - t @ vm - (w - t.sum(-1, keepdim=True)) * o
            want = (x / Z).square().sum(-1).reshape(1, 1, 3, 64).mean(-1)
            assert torch.allclose(got[..., j], want, rtol=1e-9, atol=1e-15)
            assert torch.allclose(mass[..., j], (w / Z).reshape(1, 1, 3, 64).mean(-1), rtol=1e-9)


def test_centred_scores_leave_out_the_mean_error(calls):
    """With one query a block nothing but the mean is left, so nothing stays; with more, at most what there was."""
    q, k, v = (x[:1] for x in calls[0, 0])
    one = scores.estimate(Spec.parse("sel=errq1m4 bud=layer lev=64/16 resid=4 cent=1"), q, k, v)[0]
    assert all(float(x.abs().max()) < 1e-6 for x in one)
    full = scores.estimate(Spec.parse("sel=errq8m4 bud=layer lev=64/16"), q, k, v)[0]
    less = scores.estimate(Spec.parse("sel=errq8m4 bud=layer lev=64/16 resid=4 cent=1"), q, k, v)[0]
    none = scores.estimate(Spec.parse("sel=errq8m4 bud=layer lev=64/16 resid=4 cent=1e-30"), q, k, v)[0]
    for x, y, z in zip(full, less, none):
        assert bool((y <= x * (1 + 1e-5)).all()) and torch.allclose(x, z, rtol=1e-4, atol=1e-9)


def test_exact_rows_are_exact_and_remove_a_common_error():
    torch.manual_seed(7)
    dense = torch.randn(1, 2, 4, 64, D)
    pos = scores.positions(64, 4)
    rows = dense[:, :, :, pos]
    shift = torch.randn(1, 2, 4, 1, D)
    assert torch.allclose(attend.corrected(dense + shift, rows, pos), dense, atol=1e-5)
    fixed = attend.corrected(dense + torch.randn_like(dense), rows, pos)
    assert torch.equal(fixed[:, :, :, pos], rows)
    # an error of each quarter is found by the nearest row alone
    steps = torch.randn(1, 2, 4, 4, 1, D).expand(1, 2, 4, 4, 16, D).reshape(1, 2, 4, 64, D)
    far, near = (attend.corrected(dense + steps, rows, pos, x) for x in (0.0, 0.5))
    assert float((near - dense).square().mean()) < 0.5 * float((far - dense).square().mean())


@pytest.mark.parametrize("words", ["order=ad", "order=ad amet=0", "order=adk", "order=kdm", "order=kdkm128",
                                   "order=ad bq=128 bk=128"])
@pytest.mark.parametrize("tokens", [512, 640])
def test_orders_are_permutations(words, tokens):
    """640 tokens are ten blocks: not all cuts are in the middle."""
    torch.manual_seed(8)
    q, k = torch.randn(2, 2, tokens, D), torch.randn(2, 2, tokens, D)
    spec = Spec.parse(words)
    for perm in orders.make(spec, q, k):
        if perm is None:
            assert spec.order.startswith(("adk", "kdk"))
            continue
        assert torch.equal(perm.sort(-1).values, torch.arange(tokens).expand(2, 2, tokens))
        assert torch.equal(orders.put(orders.take(q, perm), perm), q)


def test_levels_cost_at_most_what_was_asked():
    torch.manual_seed(9)
    errors = [torch.rand(2, 3, 8, 8).pow(4), torch.rand(2, 3, 8, 8).pow(4) * 0.1]
    cost = choose.level_costs([64, 8], "cpu")
    for total in (0.2, 0.4, 0.7):
        level = choose.levels(errors, [64, 8], total, "layer")
        spent = cost[level].mean((1, 2, 3))
        assert bool((spent <= total + 1e-6).all()) and bool((spent > total - 2 / (3 * 8 * 8)).all())
        assert bool(((level == 0).sum(-1) >= 1).all())          # one exact block a row at least


def test_schedules_follow_the_length_of_the_run():
    spec = Spec.parse("refresh=0/.125/.25/.5 oref=0/.5")
    assert [spec.resolved(n).warm for n in (8, 25, 50)] == [2, 5, 10]       # a fifth, rounded up
    free = Spec.parse("warm=0 refresh=0/.125/.25/.5 oref=0/.5")
    want = {4: "0/1/2", 8: "0/1/2/4", 25: "0/3/6/12", 50: "0/6/12/25"}
    assert {n: free.resolved(n).refresh for n in want} == want
    assert [i for i in range(25) if due(free.resolved(25).refresh, i)] == [0, 3, 6, 12]
    assert free.resolved(1).refresh == "0" and free.resolved(8).label() != free.label()


def test_plans_spend_the_work_and_a_shape_is_found_again():
    shape = plans.Shape(8, 6, 4352, 64, [1 - i / 8 for i in range(8)])
    spec = Spec.parse("sel=errq8m4 bud=layer lev=64/8 warm=0 l0=0 plan=shape shape=9/-2/1.5 work=0.44").resolved(8)
    density, total = plans.solve(spec, shape)
    assert total == pytest.approx(0.44, abs=1e-6)
    assert density[7, 5] > density[0, 5] > density[0, 0]        # late steps and deep layers weigh more
    text, (_, rest, _) = plans.fit_shape(density, plans.shape_curves(spec.shape, shape, density), shape)
    decay, sigma, depth = map(float, text.split("/"))
    # the curve bends to 0 at density 1 and densities lie on a grid of 7 %: a tenth
    assert decay == pytest.approx(9, rel=0.1) and sigma == pytest.approx(-2, rel=0.1)
    assert depth == pytest.approx(1.5, rel=0.1) and rest < 0.02
    even, _ = plans.solve(Spec.parse("warm=0 l0=0 plan=shape shape=9/0/0 work=0.44").resolved(8), shape)
    assert max(even.values()) == pytest.approx(min(even.values()))
    with pytest.raises(ValueError, match="too small"):
        plans.solve(Spec.parse("work=0.2").resolved(8), shape)


def test_the_clock_ends_a_run(calls):
    hub = Hub(GRID, 1)
    hub.deadline = 1.0
    with pytest.raises(Late):
        hub.attend(0, *calls[0, 0])


def test_wrong_words_are_refused():
    for words in ("lev=64/16", "sel=errq8m4 lev=64/4", "tail=48", "cent=1", "src=cached order=ad", "colour=red"):
        with pytest.raises(ValueError):
            Spec.parse(words)
