# SPDX-License-Identifier: Apache-2.0
"""esa.apply with carry: anchors of a video, guidance in two calls or in one batch, and everything that must drop a
difference."""
import math
import types

import esa
import minis
import pipelines
import pytest
import torch
from esa.models import load_pipeline

STEPS = 8
TIMES = tuple(900 - 100 * i for i in range(STEPS))
CARRY = esa.EsaConfig(block=minis.BLOCK, carry=[0, 3])
DENSE = esa.EsaConfig(selector="dense", order="raster")     # sums in the order of the dense calls at anchors
NAMES = ("cond", "uncond")


def inputs(mini, step, branch=0, seed=0):
    """Latents that change a little from step to step, and the text of a branch."""
    random = torch.Generator().manual_seed(seed)
    x, text = mini.inputs["hidden_states"], mini.inputs["encoder_hidden_states"]
    noise = torch.randn(x.shape, generator=random)
    return {**mini.inputs, "hidden_states": x + 0.02 * step * noise + seed * noise,
            "encoder_hidden_states": text.flip(-1) if branch else text,
            "timestep": torch.full_like(mini.inputs["timestep"], TIMES[step])}


def video(mini, steps=range(STEPS), names=NAMES, seed=0):
    """Outputs by (step, name) of a loop that calls once for each branch."""
    out = {}
    for step in steps:
        for branch, name in enumerate(names):
            with torch.no_grad(), mini.model.cache_context(name):
                out[step, name] = mini.model(**inputs(mini, step, branch, seed), return_dict=False)[0]
    return out


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def fresh(mini, config, **more):
    with esa.apply(mini.model, config, steps=STEPS) as handle:
        return video(mini, **more), handle.stats()


# ---------------------------------------------------------------- two calls

@pytest.mark.parametrize("family", ["wan", "hunyuan"])
def test_anchors(family):
    """The guided branch is dense at anchors, bit by bit; the other one carries its difference, if both have the same
    valid text."""
    mini = minis.MAKERS[family]()
    dense, _ = fresh(mini, DENSE)
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        out = video(mini)
        assert [torch.equal(out[step, "cond"], dense[step, "cond"]) for step in range(STEPS)] == [
            step in (0, 3) for step in range(STEPS)]
        total = handle.stats()
        assert total.anchor_calls == total.masks_made == 2 * mini.layers
        assert total.carried_calls == total.sparse_calls - total.anchor_calls == (2 * STEPS - 2) * mini.layers
        assert total.fallback_calls == total.dense_calls == 0 and 0 < total.carry_age < STEPS
        assert handle.stats(step=3).anchor_calls == mini.layers and handle.stats(step=4).anchor_calls == 0
        tokens = math.prod(mini.layout.grid) + mini.layout.text_back
        batch = mini.inputs["hidden_states"].shape[0]
        assert total.carry_bytes >= batch * tokens * 2 * (32 + 4) * mini.layers and total.carry_host_bytes == 0
        report = handle.report()
        assert f"carry: {2 * mini.layers} calls at anchors" in report and report.count(", anchor") == 2
    if family == "hunyuan":                 # many of its few blocks hold text: the works below are out of reach
        return
    off, stats = fresh(mini, CARRY.replace(carry="off", work=CARRY.work_for(STEPS)))
    far = {name: sum((made[key] - dense[key]).square().sum() for key in made) for name, made in (("on", out),
                                                                                                 ("off", off))}
    assert stats.anchor_calls == 0 and far["on"] < far["off"] / 2


def test_the_default_carries():
    mini = minis.wan()
    config = esa.EsaConfig(block=minis.BLOCK)
    _, stats = fresh(mini, config)
    assert stats.anchor_calls == len(config.anchors(STEPS)) * mini.layers > 0
    assert stats.work_asked == config.work_for(STEPS)
    out, stats = fresh(mini, config.replace(carry="off"))
    want, former = fresh(mini, esa.EsaConfig(block=minis.BLOCK, work=0.44, exact_rows=2, refresh_every="early",
                                             order_every="early"))
    assert same(out, want) and stats.anchor_calls == 0 and stats.work_asked == former.work_asked == 0.44


def test_unknown_steps():
    """Without a number of steps nothing can be placed by itself; a list of steps needs no number."""
    mini = minis.wan()
    config = CARRY.replace(budget=0.5)
    for carry, anchors in (("auto", 0), ([0, 2], 2)):
        with esa.apply(mini.model, config.replace(carry=carry)) as handle:
            video(mini, names=("cond",))
            assert handle.stats().anchor_calls == anchors * mini.layers
    with esa.apply(mini.model, config.replace(carry=3)), pytest.raises(esa.EsaError, match="number of steps is not"):
        mini()


# ---------------------------------------------------------------- both branches in one batch

def pipe_of(mini, **more):
    """As much of a pipeline as esa.apply asks for."""
    return types.SimpleNamespace(transformer=mini.model, **more)


def batched(mini, steps=range(STEPS), names=("cond_uncond",)):
    return video(mini, steps, names)


@pytest.mark.parametrize("guides", [{"do_classifier_free_guidance": True}, {"guidance_scale": 6.0}])
def test_one_batch_is_two_branches(guides):
    """The guided half, which comes last, runs first and serves the other: the same bits as two calls."""
    mini = minis.cogvideox()
    dense, _ = fresh(mini, DENSE, names=("cond_uncond",))
    with esa.apply(pipe_of(mini, **guides), CARRY, steps=STEPS) as handle:
        out, stats = batched(mini), handle.stats()
    assert (stats.calls, stats.anchor_calls, stats.masks_made) == tuple(n * mini.layers for n in (2 * STEPS, 2, 2))
    assert stats.carried_calls == stats.calls - stats.anchor_calls
    for step in (0, 3):
        got, want = out[step, "cond_uncond"], dense[step, "cond_uncond"]
        assert torch.equal(got[1], want[1]) and not torch.equal(got[0], want[0])
    # the same, one entry at a time, with branches that are told
    halves = {}
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        for step in range(STEPS):
            given = inputs(mini, step)
            for branch, entry in ((0, slice(1, 2)), (1, slice(0, 1))):
                handle.pin(step, branch)
                one = {k: v[entry] if torch.is_tensor(v) else v for k, v in given.items()}
                with torch.no_grad():
                    halves[step, branch] = mini.model(**one, return_dict=False)[0]
        assert handle.stats().anchor_calls == stats.anchor_calls
    for step in range(STEPS):
        # matrix products of two entries may be summed in another order than those of one
        for branch, entry in ((0, 1), (1, 0)):
            torch.testing.assert_close(out[step, "cond_uncond"][entry], halves[step, branch][0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("guides", "config"), [
    ({"do_classifier_free_guidance": False}, CARRY), ({"guidance_scale": 1.0}, CARRY), ({}, CARRY),
    ({"do_classifier_free_guidance": True}, CARRY.replace(share_branches=False)),
    ({"do_classifier_free_guidance": True}, CARRY.replace(carry="off")),
    ({"do_classifier_free_guidance": True}, DENSE)], ids=str)
def test_batches_that_stay_whole(guides, config):
    mini = minis.cogvideox()
    with esa.apply(pipe_of(mini, **guides), config, steps=STEPS) as handle:
        batched(mini, range(2))
        assert handle.stats().calls == 2 * mini.layers
        assert handle.stats().anchor_calls == (mini.layers if config.carry != "off" else 0)


def test_a_half_batch_is_the_guided_branch():
    """FasterCache leaves the other half out at some steps; several clips at once are halves of several entries."""
    mini = minis.cogvideox(batch=4)
    with esa.apply(pipe_of(mini, do_classifier_free_guidance=True), CARRY, steps=STEPS) as handle:
        for step in range(STEPS):
            given = inputs(mini, step)
            if step in (2, 4):
                given = {k: v[2:] if torch.is_tensor(v) else v for k, v in given.items()}
            with torch.no_grad(), mini.model.cache_context("cond_uncond"):
                mini.model(**given, return_dict=False)
        assert [handle.stats(step=i).calls for i in range(STEPS)] == [
            mini.layers * (1 if i in (2, 4) else 2) for i in range(STEPS)]
        assert handle.stats().anchor_calls == 2 * mini.layers
        assert handle.stats().carried_calls == handle.stats().calls - 2 * mini.layers


def test_masks_of_a_file(tmp_path):
    """Recorded masks, which both branches share, with carry: one branch's difference serves the batch."""
    mini = minis.cogvideox()
    with esa.apply(mini.model, esa.EsaConfig(selector="error", block=minis.BLOCK), steps=STEPS, record=True) as handle:
        batched(mini)
        handle.save_recording(str(tmp_path / "r"))
    esa.build_mask_file(tmp_path / "m", [tmp_path / "r"], works=(0.85, 0.7))
    config = esa.EsaConfig(masks=tmp_path / "m", work=0.85)
    for carry, calls, anchors in (("off", STEPS, 0), ([0, 3], 2 * STEPS, 2)):
        pipe = pipe_of(mini, do_classifier_free_guidance=True)
        with esa.apply(pipe, config.replace(carry=carry), steps=STEPS) as handle:
            assert all(torch.isfinite(x).all() for x in batched(mini).values())
            stats = handle.stats()
            assert (stats.calls, stats.anchor_calls, stats.masks_made) == tuple(
                n * mini.layers for n in (calls, anchors, 0))


# ---------------------------------------------------------------- pipelines of diffusers

def generate(pipe, size, **settings):
    with torch.no_grad():
        return pipe("a cat", generator=torch.Generator().manual_seed(0), num_inference_steps=STEPS,
                    output_type="latent", **size, **settings).frames


@pytest.mark.parametrize(("guidance", "calls"), [(6.0, 2), (1.0, 1)])
def test_cogvideox(tmp_path, guidance, calls):
    """The pipeline says that it guides by its guidance scale alone."""
    pipe = load_pipeline(pipelines.make_cogvideox(str(tmp_path / "m")), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    # so short a video would run dense for the least work
    with esa.apply(pipe, CARRY.replace(block=16, budget=0.6)) as handle:
        for video in (1, 2):
            out = generate(pipe, pipelines.COGVIDEOX_SIZE, guidance_scale=guidance)
            stats = handle.stats()
            assert (stats.calls, stats.anchor_calls) == (calls * STEPS * handle.layers, 2 * handle.layers)
            assert stats.carried_calls == stats.calls - stats.anchor_calls and handle.videos == video
    assert torch.isfinite(out).all()


def test_wan22(tmp_path):
    """Two calls a step; the second transformer begins with an anchor of its own."""
    pipe = load_pipeline(pipelines.make_wan22(str(tmp_path / "m")), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    with esa.apply(pipe, CARRY.replace(block=16)) as handle:
        generate(pipe, {"num_frames": 41, "height": 480, "width": 640})
        boundary = pipe.config.boundary_ratio * pipe.scheduler.config.num_train_timesteps
        switch = [t < boundary for t in pipe.scheduler.timesteps.tolist()].index(True)
        anchors = [handle.stats(step=i).anchor_calls for i in range(STEPS)]
        assert anchors == [handle.layers * (i in {0, 3, switch}) for i in range(STEPS)]
        assert handle.stats().carried_calls == 2 * STEPS * handle.layers - sum(anchors)


@pytest.mark.parametrize("boundary", [0.9, 0.7])
def test_wan22_spends_what_was_asked_for(tmp_path, boundary):
    """The anchor of the second transformer costs a dense call in each layer, which is taken from the other steps. It is
    one more than the library places, or one of those."""
    pipe = load_pipeline(pipelines.make_wan22(str(tmp_path / "m"), boundary=boundary), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    with esa.apply(pipe, esa.EsaConfig(block=16, work=0.75)) as handle:
        generate(pipe, {"num_frames": 81, "height": 720, "width": 1280})
        anchors = [i for i in range(STEPS) if handle.stats(step=i).anchor_calls]
        switch = handle._run._switch(STEPS)
        assert 0 < switch < STEPS and anchors == sorted({*handle.config.anchors(STEPS), switch})
        # blocks are whole; without the anchor in the plan it was 0.845 at the boundary 0.7
        assert abs(handle.stats().work - 0.75) < 0.01


# ---------------------------------------------------------------- what drops a difference

def change_weights(mini):
    with torch.no_grad():
        for name, value in mini.model.named_parameters():
            if "to_q" in name or "to_v" in name:
                value.mul_(1.3)


def use_lora(mini):
    random = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, value in mini.model.named_parameters():
            if name.endswith("attn1.to_out.0.weight"):
                value.add_(0.3 * torch.randn(value.shape, generator=random))


CHANGES = {"nothing": lambda mini: None, "LoRA": use_lora, "model": change_weights}


@pytest.mark.parametrize("seed", [0, 1], ids=["same inputs", "other inputs"])
@pytest.mark.parametrize("name", list(CHANGES))
def test_a_new_video_begins_without(name, seed):
    """The second video of a handle is that of a new handle, whatever became of the weights; with a difference of the
    first one left, its outputs would be others. Masks are made at anchors, so the first step is one again."""
    mini = minis.wan()
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        first = video(mini)
        CHANGES[name](mini)
        second = video(mini, seed=seed)
        assert handle.videos == 2 and handle.stats().anchor_calls == 2 * mini.layers
    want, _ = fresh(mini, CARRY, seed=seed)
    assert same(second, want)
    assert same(first, second) == (name == "nothing" and seed == 0)


def test_a_video_that_was_broken_off():
    """Its differences are gone, too, and the next video may begin at a step that is no anchor."""
    mini = minis.wan()
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        video(mini, range(2))
        handle.begin()
        for step in (4, 5):
            handle.pin(step)
            got = mini(**{k: v for k, v in inputs(mini, step, seed=1).items()})
        assert handle.stats(step=4).anchor_calls == mini.layers
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        for step in (4, 5):
            handle.pin(step)
            want = mini(**{k: v for k, v in inputs(mini, step, seed=1).items()})
    assert torch.equal(got, want)


def test_a_removed_handle_holds_no_differences():
    """Also of a video that was broken off; the statistics stay."""
    mini = minis.wan()
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        video(mini, range(3))
        before = handle.stats()
        session = handle._run.session
        assert session._raw_stats().carry_bytes == before.carry_bytes > 0
    assert session._raw_stats().carry_bytes == 0
    assert repr(handle.stats()) == repr(before)


def test_another_size_between():
    mini, other = minis.wan(), minis.wan(grid=(2, 8, 9))
    other.model = mini.model
    with esa.apply(mini.model, CARRY, steps=STEPS) as handle:
        first = video(mini)
        large = handle.stats().carry_bytes
        small = video(other)
        assert 0 < handle.stats().carry_bytes < large
        again = video(mini)
    assert same(first, again) and same(small, fresh(other, CARRY)[0])


def test_two_transformers():
    """The second transformer makes differences of its own at its first step; those of the first one are freed."""
    minis_ = [minis.wan(seed=i) for i in range(2)]
    pipe = types.SimpleNamespace(transformer=minis_[0].model, transformer_2=minis_[1].model)

    def run(switch, first=0):
        out = {}
        with esa.apply(pipe, CARRY, steps=STEPS) as handle:
            for step in range(first, STEPS):
                for branch in range(2):
                    handle.pin(step, branch)
                    mini = minis_[step >= switch]
                    out[step, branch] = mini(**inputs(mini, step, branch))
            return out, [handle.stats(step=i) for i in range(STEPS)], handle.stats().carry_bytes

    both, stats, held = run(switch=5)
    layers = minis_[0].layers
    assert [s.anchor_calls for s in stats] == [layers * (i in (0, 3, 5)) for i in range(STEPS)]
    late, _, alone = run(switch=5, first=5)
    assert same({key: both[key] for key in late}, late) and held == alone


def test_step_cache():
    """Steps that are left out are no anchors: an anchor among them moves to the next step that runs."""
    mini = minis.wan()
    config = CARRY.replace(carry=[0, 3, 4], step_cache=1e9, warmup_frac=0.0)    # everything but first and last is left
    with esa.apply(mini.model, config, steps=STEPS) as handle:
        video(mini)
        ran = [i for i in range(STEPS) if handle.stats(step=i).calls]
        anchors = [i for i in range(STEPS) if handle.stats(step=i).anchor_calls]
        assert ran[0] == 0 and ran[-1] == STEPS - 1 and len(ran) < STEPS and 3 not in ran
        due = next(i for i in ran if i >= 3)
        assert anchors == [0, due] if due >= 4 else [0, due, next(i for i in ran if i > due)]
        assert handle.stats().skipped_steps == STEPS - len(ran)


def test_image_to_video():
    """A given first frame changes nothing for the error selector; other selectors protect it and carry if asked."""
    mini = minis.wan()

    class WanImageToVideoPipeline:
        transformer = mini.model
    outs = []
    for target in (WanImageToVideoPipeline(), mini.model):
        with esa.apply(target, CARRY, steps=STEPS) as handle:
            outs.append(video(mini))
            assert handle.stats().anchor_calls == 2 * mini.layers
    assert same(*outs)
    config = esa.EsaConfig(selector="entropy", budget=0.5, block=minis.BLOCK, warmup_frac=0, dense_first_layer=False)
    for carry, anchors in (("off", 0), ([0], 2)):           # without share_branches each branch has its own
        with esa.apply(WanImageToVideoPipeline(), config.replace(carry=carry), steps=STEPS) as handle:
            video(mini)
            assert handle.stats().anchor_calls == anchors * mini.layers


def test_where_nothing_is_carried():
    mini = minis.wan()
    with esa.apply(mini.model, CARRY, steps=STEPS, record=True) as handle:
        video(mini, range(2))
        assert handle.stats().anchor_calls == 0
    from esa.diffusers.autoregressive import autoregressive_mode
    for carry in ("auto", "off"):
        with autoregressive_mode(mini.model, CARRY.replace(carry=carry, budget=0.5), steps=4) as state:
            assert state.config.carry == "off"
    with pytest.raises(ValueError, match="carry is for whole videos: .* must be 'auto' or 'off' .*, not 6"):
        with autoregressive_mode(mini.model, CARRY.replace(carry=6), steps=8):
            pass
    with pytest.raises(ValueError, match="carry, steps16_first"):
        esa.register_backend(esa.EsaConfig(selector="entropy", carry=2))
    with pytest.raises(ValueError, match="kernel='fa4' does not carry: say carry='off' .it is 2."):
        esa.apply(mini.model, esa.EsaConfig(kernel="fa4", tail="none", carry=2))
