# SPDX-License-Identifier: Apache-2.0
"""EsaConfig(step_cache=...): which forwards are left out, that masks follow the scheduler's step numbers, and that the
gate lives beside accelerate's hooks and torch.compile. test_together.py has it beside other caches."""
import contextlib
import ctypes

import esa
import minis
import model_minis
import pipelines
import pytest
import torch
from esa.core import structs as T
from esa.diffusers.backend import register_backend
from esa.diffusers.step_cache import Gate
from esa.models import load_pipeline
from torch._dynamo.testing import CompileCounter

STEPS = 12
SPARSE = esa.EsaConfig(block=32, budget=0.5, warmup_frac=0.2, tail="none")
# No predicted change reaches it: after the warm-up everything but the last step is left out.
ALL = SPARSE.replace(step_cache=1e9)
WARMUP = 3                              # ceil(0.2 * 12)


def count_forwards(model, ran, handle):
    """Notes the step of every forward that reaches the blocks. A hook that notes would be compiled at every step."""
    if handle is None:
        return contextlib.nullcontext()
    block = next(m for n, m in model.named_modules() if n.endswith("blocks.0"))
    return block.register_forward_hook(lambda *_: ran.append(handle.step))


def video(mini, handle, steps=STEPS, names=("cond", "uncond"), pace=0.05, model=None):
    """A loop like a pipeline's; returns the latents and the steps at which blocks ran, once for each branch."""
    ran, model = [], mini.model if model is None else model
    x = mini.inputs["hidden_states"].clone()
    text = mini.inputs["encoder_hidden_states"]
    texts = [text, text.flip(-1)]
    with count_forwards(mini.model, ran, handle), torch.no_grad():
        for i in range(steps):
            v = []
            for name, words in zip(names, texts):
                with mini.model.cache_context(name):
                    given = {**mini.inputs, "hidden_states": x, "encoder_hidden_states": words,
                             "timestep": torch.full_like(mini.inputs["timestep"], 1000 - 80 * i)}
                    v.append(model(**given, return_dict=False)[0])
            x = x - (v[-1] + 3 * (v[0] - v[-1])) * pace
    return x, ran


def twice(steps):
    return [step for step in steps for _ in range(2)]


# ---------------------------------------------------------------- the rule


def test_session_follows_the_rule():
    """The pattern of tests/model/test_step_cache.c: a change of 0.02 a step under a threshold of 0.05."""
    assert ctypes.sizeof(T.StepChange) == 56
    session = esa.Session(esa.EsaConfig(selector="dense"), layers=1, steps=12)
    with pytest.raises(esa.EsaError, match="before esa_session_begin"):
        session.cache_begin(0.05)
    session.begin()
    with pytest.raises(esa.EsaError, match="before esa_session_cache_begin"):
        session.cache_next(0, True, 1.0, (10, 5), (0, 0))
    for wrong in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(esa.EsaValueError, match="expected a finite number above 0"):
            session.cache_begin(wrong)
    session.cache_begin(0.05)
    got, skip, since = "", False, 0
    for i in range(12):
        got += "." if skip else "C"
        change = (0.2 * since, 0.05 * since)
        since = since + 1 if skip else 1
        skip = session.cache_next(i, got[-1] == "C", 1.0, (10.0, 5.0), change)
    assert got == "CC..C..C..CC"
    with pytest.raises(esa.EsaValueError, match="step is 12"):
        session.cache_next(12, True, 1.0, (10, 5), (0, 0))


# ---------------------------------------------------------------- forwards that are left out


@pytest.mark.parametrize("family", list(minis.MAKERS))
def test_which_steps_are_left_out(family):
    mini = minis.MAKERS[family]()
    with esa.apply(mini.model, ALL, steps=STEPS) as handle:
        for _ in range(2):              # a second video begins anew
            _, ran = video(mini, handle)
            assert ran == twice([*range(WARMUP), STEPS - 1])
            stats = handle.stats()
            assert (stats.computed_steps, stats.skipped_steps) == (WARMUP + 1, STEPS - WARMUP - 1)
            assert stats.calls == 2 * mini.layers * (WARMUP + 1)
            assert (handle.stats(step=2).computed_steps, handle.stats(step=2).skipped_steps) == (1, 0)
            assert (handle.stats(step=5).computed_steps, handle.stats(step=5).skipped_steps) == (0, 1)
        assert "step cache: 4 steps computed, 8 left out" in handle.report()
    assert "forward" not in vars(mini.model)


def other_video(name, config):
    """Eight steps of another model. Returns its last output and the handle."""
    model = model_minis.make(name)
    context = getattr(model.model, "cache_context", lambda _: contextlib.nullcontext())
    with esa.apply(model.model, config, steps=8) as handle, torch.no_grad():
        for i in range(8):
            given = {**model.inputs, "hidden_states": model.inputs["hidden_states"] * (1 - 0.02 * i),
                     "timestep": model.inputs["timestep"] * (1 - 0.1 * i)}
            with context("cond"):
                out = model.model(**given)
    return out, handle


@pytest.mark.parametrize("name", ["framepack", "ltx", "flux", "sd3"])
def test_other_models(name):
    out, handle = other_video(name, ALL)
    assert (handle.stats().computed_steps, handle.stats().skipped_steps, handle.step) == (3, 5, 7)
    assert isinstance(out.sample, torch.Tensor)


def test_models_with_several_outputs_are_refused():
    for name in {"ltx2"} - model_minis.MISSING:             # video and sound
        with pytest.raises(esa.EsaError, match="keeps the one tensor that a transformer returns"):
            other_video(name, ALL)


def test_off_changes_nothing():
    mini = minis.wan()
    with esa.apply(mini.model, SPARSE, steps=STEPS) as handle:
        want, ran = video(mini, handle)
        assert "forward" not in vars(mini.model) and ran == twice(range(STEPS))
        assert (handle.stats().computed_steps, handle.stats().skipped_steps) == (STEPS, 0)
    with esa.apply(mini.model, SPARSE.replace(step_cache=1e-30), steps=STEPS) as handle:
        got, ran = video(mini, handle)
        assert torch.equal(got, want) and ran == twice(range(STEPS))
        assert handle.stats().skipped_steps == 0


def test_a_larger_threshold_leaves_out_more():
    mini, left = minis.wan(), []
    for threshold in (0.01, 0.1, 1.0):
        with esa.apply(mini.model, SPARSE.replace(step_cache=threshold), steps=STEPS) as handle:
            video(mini, handle)
            left.append(handle.stats().skipped_steps)
    assert left == sorted(left) and left[0] < left[-1], left


def test_kept_output_is_returned_and_safe():
    """A step that is left out returns what the last computed one returned, as a copy: pipelines may change it."""
    mini = minis.wan()
    outputs = []
    with esa.apply(mini.model, ALL, steps=6), torch.no_grad():
        for i in range(5):
            x = mini.inputs["hidden_states"] * (1 - 0.1 * i)
            with mini.model.cache_context("cond"):
                given = {**mini.inputs, "hidden_states": x, "timestep": torch.tensor([900 - 100 * i])}
                out = mini.model(**given, return_dict=i != 3)
            value = out.sample if i != 3 else out[0]
            assert isinstance(out, tuple) == (i == 3)
            outputs.append(value.clone())
            value.zero_()
    assert torch.equal(outputs[2], outputs[1]) and torch.equal(outputs[3], outputs[1])
    assert torch.equal(outputs[4], outputs[1]) and not torch.equal(outputs[1], outputs[0])


# ---------------------------------------------------------------- step numbers


@pytest.mark.parametrize("config", [SPARSE, esa.EsaConfig(block=32), SPARSE.replace(refresh_every=3)],
                         ids=["entropy", "error", "kept masks"])
def test_masks_after_a_step_left_out(config):
    """They equal those of a session that is told the same step numbers and inputs, and no others."""
    mini = minis.wan()
    inputs, outputs = [], []
    with esa.apply(mini.model, config.replace(step_cache=1e9), steps=STEPS) as handle:
        attention = handle._run.attention

        def listening(layer, q, k, v, *mask):
            out = attention(layer, q, k, v, *mask)
            inputs.append((handle._run.moment, layer, q.clone(), k.clone(), v.clone()))
            outputs.append(out.clone())
            return out
        handle._run.attention = listening
        video(mini, handle)
        told = handle.stats()
        kept = [m.step for m, layer, *_ in inputs if layer == 0 and m.branch == 0]
        assert kept[-1] == STEPS - 1 and len(kept) < STEPS
    with esa.apply(mini.model, config, steps=STEPS) as other:
        run = other._run
        mini.at(1000)                   # makes the session
        session = run.session
        session.begin()
        for (moment, layer, q, k, v), want in zip(inputs, outputs):
            session.step(moment.step, moment.branch)
            got = torch.empty_like(want)
            session.attention(layer, q, k, v, input_layout="BSND", out=got)
            assert torch.equal(got, want), (moment, layer)
        found = session.stats()
        assert (found.calls, found.masks_made, found.density) == (told.calls, told.masks_made, told.density)


# ---------------------------------------------------------------- pipelines


@pytest.fixture(scope="module", params=["wan", "wan22", "cogvideox", "hunyuan"])
def pipe(request, tmp_path_factory):
    make = {"wan": pipelines.make_wan, "wan22": pipelines.make_wan22, "cogvideox": pipelines.make_cogvideox,
            "hunyuan": pipelines.make_hunyuan}[request.param]
    pipe = load_pipeline(make(str(tmp_path_factory.mktemp("models") / request.param)), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


SIZES = {"WanPipeline": {"num_frames": 41, "height": 480, "width": 640}, "CogVideoXPipeline": pipelines.COGVIDEOX_SIZE,
         "HunyuanVideoPipeline": pipelines.HUNYUAN_SIZE}


def test_pipelines(pipe):
    def generate():
        with torch.no_grad():
            return pipe("a cat", generator=torch.Generator().manual_seed(0), num_inference_steps=8,
                        output_type="latent", **SIZES[type(pipe).__name__]).frames
    with esa.apply(pipe, esa.EsaConfig(block=16, budget=0.5, warmup_frac=0.25, step_cache=1e9)) as handle:
        first = generate()
        computed, skipped = sorted(handle._run.computed), sorted(handle._run.skipped)
        assert sorted(computed + skipped) == list(range(8)) and handle.step == 7
        # Wan2.2: the second transformer computes two steps of its own before it leaves one out
        switch = [int(t < pipe.config.boundary_ratio * 1000) for t in pipe.scheduler.timesteps.tolist()].index(
            1) if getattr(pipe, "transformer_2", None) is not None else 0
        want = sorted({0, 1, 7} | ({switch, switch + 1} if switch else set()))
        assert computed == want, (computed, skipped)
        assert torch.equal(generate(), first) and handle.videos == 2


def test_a_branch_that_comes_later_is_computed():
    mini = minis.wan()
    with esa.apply(mini.model, ALL, steps=6) as handle, torch.no_grad():
        ran = []
        hook = count_forwards(mini.model, ran, handle)
        for i in range(6):
            for name in ("cond", "uncond") if i >= 3 else ("cond",):
                with mini.model.cache_context(name):
                    mini.at(900 - 100 * i, hidden_states=mini.inputs["hidden_states"] * (1 - 0.1 * i))
        hook.remove()
        # Step 3 has the new branch only; then the cache begins anew, with two computed steps.
        assert ran == [0, 1, 3, 4, 4, 5, 5] and sorted(handle._run.skipped) == [2]


# ---------------------------------------------------------------- beside others


def test_forward_that_others_exchange():
    """accelerate brings its own forward back between two videos: the gate returns with the next cache context."""
    import accelerate
    mini = minis.wan()
    hook = accelerate.hooks.ModelHook
    accelerate.hooks.add_hook_to_module(mini.model, hook())
    handle = esa.apply(mini.model, ALL, steps=STEPS)
    for _ in range(3):
        _, ran = video(mini, handle)
        assert ran == twice([*range(WARMUP), STEPS - 1])
        accelerate.hooks.remove_hook_from_module(mini.model)
        accelerate.hooks.add_hook_to_module(mini.model, hook())
        assert not isinstance(mini.model.forward, Gate)
    handle.remove()
    accelerate.hooks.remove_hook_from_module(mini.model)
    assert not isinstance(mini.model.forward, Gate)


@pytest.mark.parametrize("how", ["whole", "blocks"])
def test_compiled(how):
    """The gate is a break between graphs; what it passes on is compiled, and not again at later steps."""
    torch._dynamo.reset()
    mini, want = minis.wan(), minis.wan()
    with esa.apply(want.model, ALL, steps=STEPS) as handle:
        expected, _ = video(want, handle)
    graphs = CompileCounter()
    if how == "blocks":
        mini.model.compile_repeated_blocks(fullgraph=True, backend=graphs)
    with esa.apply(mini.model, ALL, steps=STEPS) as handle:
        model = torch.compile(mini.model, backend=graphs) if how == "whole" else mini.model
        got, _ = video(mini, None, model=model)
        with torch._dynamo.config.patch(error_on_recompile=True):
            again, _ = video(mini, None, model=model)
        assert 0 < graphs.frame_count <= 2
        assert handle.stats().calls == 2 * mini.layers * (WARMUP + 1) and handle.videos == 2
    assert torch.equal(got, expected) and torch.equal(again, expected)


def test_compiled_in_one_graph_is_refused():
    torch._dynamo.reset()
    mini = minis.wan()
    with esa.apply(mini.model, ALL, steps=STEPS), pytest.raises(Exception, match="(?i)graph|compiler.disable"):
        torch.compile(mini.model, fullgraph=True, backend="eager")(**mini.inputs)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf"), "0.1", True, None])
def test_bad_values(value):
    with pytest.raises(ValueError, match="step_cache must be a finite number of at least 0"):
        esa.EsaConfig(step_cache=value)


def test_loops_that_it_cannot_follow():
    mini = minis.wan()
    config = ALL.replace(warmup_frac=0.0)
    with esa.apply(mini.model, config), pytest.raises(esa.EsaError, match="step_cache needs the number of steps"):
        mini()
    with esa.apply(mini.model, config, steps=4) as handle:
        handle.pin(0, 0)
        mini()
        with pytest.raises(esa.EsaError, match="branch 0 came twice in step 0"):
            mini()
        handle.begin()
        mini()
    with esa.apply(mini.model, config, steps=4), pytest.raises(esa.EsaError, match="at most 2 guidance passes"):
        for name in ("cond", "uncond", "third"):
            with mini.model.cache_context(name):
                mini()


def test_where_it_does_not_belong():
    mini = minis.wan()
    with pytest.raises(ValueError, match="a recording needs every step"):
        esa.apply(mini.model, ALL, steps=4, record=True)
    with pytest.raises(ValueError, match="a Session sees attention only"):
        esa.Session(ALL, layers=1, steps=2)
    with pytest.raises(ValueError, match="step_cache"):
        register_backend(esa.EsaConfig(selector="entropy", step_cache=0.1), "esa-step-cache")
