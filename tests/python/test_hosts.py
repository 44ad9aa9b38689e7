# SPDX-License-Identifier: Apache-2.0
"""esa.hosts.run, which all hosts share: options, steps, branches, videos, sizes."""
import importlib.util
import pathlib
import re

import esa
import numpy as np
import pytest
import torch
from esa.hosts.run import Dense, HostRun, config_of, needs_steps, order_of, rain_fusion

GRID = (3, 8, 16)
TOKENS = 3 * 8 * 16


def qkv(seed, heads=2):
    return torch.randn(3, 1, TOKENS, heads, 16, generator=torch.Generator().manual_seed(seed)).unbind()


def test_options():
    config = config_of({"selector": "entropy", "budget": 0.5, "dense_layers": [1, 2], "block": [64, 32]}, "json")
    assert config.strict is False and config.dense_layers == (1, 2) and config.blocks == (64, 32)
    assert config_of({"strict": True}, "json").strict is True
    for options, message in (
            ({"budgets": 0.5}, "json has no setting 'budgets'; it takes selector, budget, sparsity,"),
            ({"step_cache": 0.05}, "json has no setting 'step_cache'"), ({"kernel": "fa4"}, "no setting 'kernel'"),
            ("balanced", "json must hold settings by name, such as .*, not 'balanced'"),
            ({"budget": "0.3"}, "json: budget must lie between 0 and 1, not '0.3'"),
            ({"selector": "full"}, "json: selector 'full' keeps every block; selector 'dense' does the same"),
            ({"masks": "none.safetensors"}, "json: masks names 'none.safetensors', which is not a file"),
            ({"work": 0.4, "plan": "none.json"}, "json: plan names 'none.json', which is not a file")):
        with pytest.raises(ValueError, match=message):
            config_of(options, "json")
    assert needs_steps(config) and not needs_steps(config.replace(warmup_frac=0.0))
    assert needs_steps(config_of({}, "json")) and not needs_steps(config_of({"selector": "dense"}, "json"))


def test_orders():
    grid, clips = esa.Layout(grid=GRID), esa.Layout(spans=((0, GRID),))
    assert order_of(config_of({}, ""), grid).order == "adaptive"
    assert order_of(config_of({}, ""), clips).order == "hilbert"
    assert order_of(config_of({"selector": "rf_v2"}, ""), grid).order == "tile"
    assert order_of(config_of({"order": "raster"}, ""), grid).order is None     # the session takes the config's


def test_steps_branches_and_videos(seed):
    config = esa.EsaConfig(selector="entropy", budget=0.5, block=32, warmup_frac=0.5, dense_first_layer=False,
                           order="hilbert", refresh_every=0)
    run = HostRun(config, layers=2)
    session = esa.Session(config, layers=2, steps=4, branches=4, layout=esa.Layout(grid=GRID), device="cpu")
    for video in range(2):
        session.begin()
        for step in range(4):
            for branch in range(2):
                for layer in range(2):
                    tensors = qkv(seed + 100 * video + 10 * step + 2 * layer + branch)
                    out = run.attention(layer, *tensors, layout=esa.Layout(grid=GRID), step=step, steps=4,
                                        branch="cond uncond".split()[branch] if video else None)
                    session.step(step, branch)
                    want = session.attention(layer, *tensors, input_layout="BSND")
                    assert torch.equal(out, want)       # masks are kept by branch: refresh_every 0
        assert run.videos == video + 1 and run.stats().calls == 16 and run.stats().sparse_calls == 8
        assert run.stats().masks_made == 4
    old = run.session
    run.attention(0, *qkv(seed), layout=esa.Layout(grid=GRID), step=0, steps=8)
    assert run.session is not old and run.steps == 8    # another number of steps is another session


def video(run, seed, steps=8, known=True, layers=2):
    """A video of two branches; the outputs and what the session counted."""
    out = []
    for step in range(steps):
        for branch in range(2):
            for layer in range(layers):
                q, k, v = (a + 0.1 * step * b for a, b in zip(qkv(seed + layer), qkv(seed + 10 + branch)))
                out.append(run.attention(layer, q, k, v, layout=esa.Layout(grid=GRID), step=step,
                                         steps=steps if known else None))
    return out, run.stats()


def test_carry(seed):
    """The words of EsaConfig, from JSON; the default is EsaConfig's."""
    for words, anchors in (({}, len(esa.EsaConfig().anchors(8))), ({"carry": "off"}, 0), ({"carry": 2}, 2),
                           ({"carry": [0, 3, 5], "carry_format": "bf16", "carry_memory": "1G"}, 3),
                           ({"carry": "0,4"}, 2), ({"refresh_every": 2}, 0),
                           ({"selector": "entropy", "budget": 0.5}, 0)):
        config = config_of({"block": 32, "warmup_frac": 0.0, "dense_first_layer": False, **words}, "json")
        _, stats = video(HostRun(config, layers=2), seed)
        assert (stats.anchor_calls, stats.sparse_calls) == (2 * anchors, 2 * 8 * 2), words
        assert stats.carried_calls == (stats.sparse_calls - stats.anchor_calls if anchors else 0)
    with pytest.raises(ValueError, match="json: carry must be 'auto', 'off', a number of anchors, or their steps"):
        config_of({"carry": "often"}, "json")
    assert needs_steps(config_of({"selector": "error", "budget": 0.5, "carry": 2}, "json"))
    assert rain_fusion(0.8).carry == "off"


def test_a_new_video_carries_nothing_over(seed):
    """The second video of a run is that of a new run: also after one that broke off."""
    config = config_of({"block": 32, "preset": "balanced", "carry": 3}, "")
    run = HostRun(config, layers=2)
    video(run, seed)
    got, _ = video(run, seed + 50)
    want, stats = video(HostRun(config, layers=2), seed + 50)
    assert run.videos == 2 and stats.anchor_calls == 6 and all(torch.equal(a, b) for a, b in zip(got, want))


def test_carry_without_steps(seed):
    """Where the host does not know their number, anchors cannot be placed by themselves."""
    plain = {"selector": "error", "budget": 0.5, "block": 32}
    for carry, anchors in (("auto", 0), ([0, 3], 2)):
        config = config_of({**plain, "carry": carry}, "")
        assert video(HostRun(config, layers=2), seed, known=False)[1].anchor_calls == 2 * anchors
    with pytest.raises(Dense, match="the number of steps is not known here"):
        video(HostRun(config_of({**plain, "carry": 2}, ""), layers=2), seed, known=False)


def test_what_stays_dense(seed):
    run = HostRun(config_of({"preset": "fast"}, ""), layers=1)
    with pytest.raises(Dense, match="the number of steps is not known here"):
        run.attention(0, *qkv(seed), layout=esa.Layout(grid=GRID), step=0)
    run = HostRun(config_of({"budget": 0.5, "warmup_frac": 0.0}, ""), layers=1)
    for _ in range(4):
        run.attention(0, *qkv(seed), layout=esa.Layout(grid=GRID), step=0)
    with pytest.raises(Dense, match="called 5 times in step 0; at most 4 guidance passes"):
        run.attention(0, *qkv(seed), layout=esa.Layout(grid=GRID), step=0)
    with pytest.raises(ValueError, match="dense_layers names layer 7, the model has layers 0 to 3"):
        HostRun(config_of({"dense_layers": [7]}, ""), layers=4)
    with pytest.raises(esa.EsaError, match="nothing ran yet"):
        HostRun(config_of({}, ""), layers=1).stats()


def test_what_cannot_be_sparse_is_said(seed):
    """Never run dense in silence: the host gets the reason, without the layer and the step, and logs it once."""
    config = config_of({"budget": 0.5, "warmup_frac": 0.0, "dense_first_layer": False}, "")
    for tensors, reason in (([x[:, :100] for x in qkv(seed)], "^grid_q 3x8x16 with text 0 front, 0 back does not make"),
                            ([x.double() for x in qkv(seed)], "^q has dtype float64"),
                            ([torch.zeros(1, TOKENS, 1, 300)] * 3, "^q has head dim 300")):
        with pytest.raises(Dense, match=reason) as error:
            HostRun(config, layers=1).attention(0, *tensors, layout=esa.Layout(grid=GRID), step=0)
        assert not error.value.by_policy


def test_a_step_that_fails_leaves_no_half_made_session(seed):
    run = HostRun(config_of({"budget": 0.5, "warmup_frac": 0.0, "dense_first_layer": False}, ""), layers=1)
    with pytest.raises(Dense, match="text_front must be"):
        run.attention(0, *qkv(seed), layout=esa.Layout(grid=GRID, text_front=-1), step=0)
    with pytest.raises(Dense, match="^grid_q 9x9x9 .* does not make Nq = 384 tokens"):
        run.attention(0, *qkv(seed), layout=esa.Layout(grid=(9, 9, 9)), step=0)
    with pytest.raises(Dense, match="at most 8 are possible"):
        run.attention(0, *qkv(seed), layout=esa.Layout(spans=((0, (1, 1, 1)),) * 9), step=0)
    q, k, v = qkv(seed)
    with pytest.raises(Dense, match="q has dtype float32 and k float16"):
        run.attention(0, q, k.half(), v, layout=esa.Layout(grid=GRID), step=0)
    out = run.attention(0, *qkv(seed), layout=esa.Layout(grid=GRID), step=0)
    assert np.isfinite(out.numpy()).all()


def test_entry_points_name_what_exists():
    """Hosts import these names; the hosts themselves are not needed to see that the functions are there."""
    text = (pathlib.Path(__file__).resolve().parents[2] / "pyproject.toml").read_text()
    found = re.findall(r'^\[project\.entry-points\."(.+)"\]\nesa = "(.+):(.+)"$', text, re.M)
    assert [group for group, *_ in found] == ["vllm_omni.general_plugins", "sglang.multimodal_gen.plugins"]
    for _, module, function in found:
        assert f"\ndef {function}(" in pathlib.Path(importlib.util.find_spec(module).origin).read_text()
