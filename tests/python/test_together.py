# SPDX-License-Identifier: Apache-2.0
"""esa.apply together with others (docs/models.md): the caches of diffusers, cache-dit, and quantised linear layers.

Two effects compose if a call that the other leaves out is not counted, and a call that is computed uses the mask of its
true step and layer. Masks come from a file that has others for every step and layer, so a wrong one shows."""
import pathlib
import re

import cache_dit
import diffusers
import esa
import minis
import pipelines
import pytest
import torch
from esa.diffusers.step_cache import Gate
from esa.models import load_pipeline
from loops import STEPS, WARMUP, Reference, Video, note_calls, write_masks

# Of the largest value: nine steps in float32. Steps without a cache are 2e-6 from the reference; a block that is chosen
# otherwise would be seen at 1e-2. TaylorSeer keeps bfloat16 and may round another way.
EXACT = 1e-4


def difference(a, b):
    return (a - b).abs().max().item() / b.abs().max().item()


# ---------------------------------------------------------------- caches


# With these, random models leave out some steps.
THRESHOLD = {"wan": 0.15, "cogvideox": 0.2, "hunyuan": 0.4}


def first_block(video):
    video.mini.model.enable_cache(diffusers.FirstBlockCacheConfig(threshold=THRESHOLD[video.mini.name]))


def taylor_seer(video, **settings):
    video.mini.model.enable_cache(
        diffusers.TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=3,
                                        taylor_factors_dtype=torch.float32, **settings))


def taylor_seer_attention(video):
    # its own patterns fit the names of HunyuanVideo's attention, not of Wan's
    taylor_seer(video, cache_identifiers=[r".*blocks\.\d+\.attn1?"])


def taylor_seer_lite(video):
    taylor_seer(video, use_lite_mode=True)


def mag_cache(video):
    video.mini.model.enable_cache(
        diffusers.MagCacheConfig(num_inference_steps=STEPS, mag_ratios=torch.full((STEPS,), 0.98), retention_ratio=0.3))


def broadcast(video):
    video.mini.model.enable_cache(
        diffusers.PyramidAttentionBroadcastConfig(spatial_attention_block_skip_range=3,
                                                  current_timestep_callback=lambda: video.timestep))


def faster_cache(video):
    kind = "BCFHW" if video.mini.name == "wan" else "BFCHW"
    video.mini.model.enable_cache(
        diffusers.FasterCacheConfig(spatial_attention_block_skip_range=2,
                                    spatial_attention_timestep_skip_range=(-1, 681),
                                    unconditional_batch_skip_range=3,
                                    unconditional_batch_timestep_skip_range=(-1, 641),
                                    attention_weight_callback=lambda _: 0.3, tensor_format=kind,
                                    is_guidance_distilled=video.mini.name == "wan",
                                    current_timestep_callback=lambda: video.timestep))


def sea_cache(video):
    video.told = True                   # it reads step and noise level from the cache context
    video.mini.model.enable_cache(diffusers.SeaCacheConfig(threshold=0.5))


def cache_dit_blocks(video):
    cache_dit.enable_cache(
        video.mini.model, cache_config=cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=3, num_inference_steps=STEPS,
            residual_diff_threshold=THRESHOLD[video.mini.name], enable_separate_cfg=len(video.names) == 2))


ON = {"FirstBlockCache": first_block, "TaylorSeer": taylor_seer_attention, "TaylorSeer lite": taylor_seer_lite,
      "MagCache": mag_cache, "PAB": broadcast, "FasterCache": faster_cache, "SeaCache": sea_cache,
      "cache-dit": cache_dit_blocks}
NEEDS = {"TaylorSeer": "TaylorSeerCacheConfig", "TaylorSeer lite": "TaylorSeerCacheConfig",
         "MagCache": "MagCacheConfig", "SeaCache": "SeaCacheConfig"}
# What this diffusers has: 0.36 lacks two.
KNOWN = [name for name in ON if hasattr(diffusers, NEEDS.get(name, "DiffusionPipeline"))]
NAMES = {"wan": ("cond", "uncond"), "cogvideox": ("cond_uncond",), "hunyuan": ("cond",)}
SIZES = {"hunyuan": {"layers": 2, "single_layers": 2}}
CASES = [("wan", name) for name in KNOWN]
CASES += [("cogvideox", name) for name in KNOWN if name in ("FirstBlockCache", "PAB", "FasterCache", "cache-dit")]
CASES += [("hunyuan", name) for name in KNOWN if name in ("FirstBlockCache", "TaylorSeer", "MagCache", "cache-dit")]


def make(family):
    mini = minis.MAKERS[family](**SIZES.get(family, {"layers": 3}), grid=(2, 7, 7))
    return Video(mini, NAMES[family])


@pytest.fixture(scope="module")
def masks(tmp_path_factory):
    """By family: a configuration that reads a mask file, and the masks."""
    folder, made = tmp_path_factory.mktemp("masks"), {}

    def of(family):
        if family not in made:
            path = folder / family
            blocks = write_masks(path, make(family).mini)
            made[family] = esa.EsaConfig(masks=path, budget=0.5, warmup_frac=WARMUP / STEPS, tail="none"), blocks
        return made[family]
    return of


def check_counts(handle, calls):
    """Statistics count what was computed, at the step it belongs to."""
    for step in range(STEPS):
        for layer in range(handle.layers):
            want = sum(call[0] == step and call[2] == layer for call in calls)
            sparse = want if step >= WARMUP and layer > 0 else 0
            cell = handle.stats(layer, step)
            assert (cell.calls, cell.sparse_calls) == (want, sparse), (layer, step)


@pytest.mark.parametrize(("family", "cache"), CASES, ids=[" ".join(case) for case in CASES])
def test_composition(family, cache, masks):
    config, blocks = masks(family)
    video = make(family)
    ON[cache](video)
    with Reference(video, blocks).listening() as reference:
        want = video.run()
    everything = STEPS * len(video.names) * video.mini.layers
    assert everything / 4 < len(reference.calls) < everything
    # which of the two comes first makes no difference; most run in one order to save time
    for esa_first in (False, True) if cache in ("FirstBlockCache", "cache-dit") else (family == "wan",):
        video = make(family)
        if not esa_first:
            ON[cache](video)
        with esa.apply(video.mini.model, config, steps=STEPS) as handle:
            if esa_first:
                ON[cache](video)
            calls = note_calls(handle)
            got = video.run()
            assert calls == reference.calls
            check_counts(handle, calls)
        assert difference(got, want) <= EXACT


def test_the_reference_tells_masks_apart(masks):
    """Masks of the neighbouring step give another video: the tolerance above would show it."""
    _, blocks = masks("wan")
    videos = []
    for moved in (blocks, blocks.roll(1, dims=1), None):
        video = make("wan")
        first_block(video)
        with Reference(video, moved).listening():
            videos.append(video.run())
    assert min(difference(videos[1], videos[0]), difference(videos[2], videos[0])) > 100 * EXACT


# ---------------------------------------------------------------- and esa's own step cache


@pytest.mark.parametrize("cache", [name for name in KNOWN if name in ("FirstBlockCache", "MagCache", "cache-dit")])
@pytest.mark.parametrize("esa_first", [False, True], ids=["cache first", "esa first"])
def test_with_step_cache(cache, esa_first, masks):
    """Three effects: steps that the step cache leaves out do not reach the other cache, which sees the others."""
    config, blocks = masks("wan")
    video = make("wan")
    if not esa_first:
        ON[cache](video)
    with esa.apply(video.mini.model, config.replace(step_cache=0.2), steps=STEPS) as handle:
        if esa_first:
            ON[cache](video)
        calls = note_calls(handle)
        got = video.run()
        left_out = sorted(handle._run.skipped)
        assert 1 < len(left_out) < STEPS - 3 and handle.step == STEPS - 1
        assert handle.stats().skipped_steps == len(left_out)
        check_counts(handle, calls)
    video = make("wan")
    ON[cache](video)
    with Reference(video, blocks).listening() as reference:
        want = video.run(left_out)
    assert calls == reference.calls and len(calls) < (STEPS - len(left_out)) * 2 * video.mini.layers
    assert difference(got, want) <= EXACT


# ---------------------------------------------------------------- coming and going


def test_cache_dit_comes_and_goes_with_the_step_cache():
    """cache-dit exchanges forward, and binds the one that it puts back."""
    video = make("wan")
    want = video.run()
    for cache_leaves_first in (True, False):
        handle = esa.apply(video.mini.model, esa.EsaConfig(block=16, selector="dense", step_cache=0.1), steps=STEPS)
        cache_dit_blocks(video)
        video.run()
        leave = [lambda: cache_dit.disable_cache(video.mini.model), handle.remove]
        for each in leave if cache_leaves_first else leave[::-1]:
            each()
            video.run()
        assert torch.equal(video.run(), want)
        assert not isinstance(video.mini.model.forward, Gate)


# FasterCache has a hook at the transformer, too
@pytest.mark.parametrize("cache", ["FirstBlockCache", "FasterCache"])
def test_caches_of_diffusers_come_and_go(cache):
    video = make("wan")
    want = video.run()
    with esa.apply(video.mini.model, esa.EsaConfig(block=16, budget=0.5, warmup_frac=0.0), steps=STEPS):
        sparse = video.run()
        ON[cache](video)
        assert not torch.equal(video.run(), sparse)
        video.mini.model.disable_cache()
        assert torch.equal(video.run(), sparse)
    assert torch.equal(video.run(), want)


# ---------------------------------------------------------------- pipelines


@pytest.fixture(scope="module")
def pipe(tmp_path_factory):
    pipe = load_pipeline(pipelines.make_wan22(str(tmp_path_factory.mktemp("models") / "wan22")), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe):
    with torch.no_grad():
        return pipe("a cat", generator=torch.Generator().manual_seed(0), num_inference_steps=STEPS, num_frames=41,
                    height=240, width=320, output_type="latent").frames


def pipeline_first_block(pipe):
    for transformer in (pipe.transformer, pipe.transformer_2):
        transformer.enable_cache(diffusers.FirstBlockCacheConfig(threshold=1.0))


def pipeline_cache_dit(pipe):
    cache_dit.enable_cache(
        pipe, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=1,
                                                   residual_diff_threshold=1.0))


@pytest.mark.parametrize("cache", ["FirstBlockCache", "cache-dit"])
def test_pipeline_with_two_transformers(pipe, cache):
    """Steps come from the scheduler, in both transformers of Wan 2.2 and in the next video."""
    config = esa.EsaConfig(block=16, budget=0.5, warmup_frac=WARMUP / STEPS)
    {"FirstBlockCache": pipeline_first_block, "cache-dit": pipeline_cache_dit}[cache](pipe)
    try:
        with esa.apply(pipe, config) as handle:
            calls = note_calls(handle)
            first = generate(pipe)
            assert handle.steps == STEPS and handle.step == STEPS - 1
            # the first block always runs, the others at some steps
            assert [c for c in calls if c[2] == 0] == [(i, b, 0) for i in range(STEPS) for b in (0, 1)]
            assert 0 < sum(c[2] > 0 for c in calls) < 2 * STEPS * (handle.layers - 1)
            check_counts(handle, calls)
            seen = list(calls)
            calls.clear()
            assert torch.equal(generate(pipe), first) and calls == seen and handle.videos == 2
    finally:
        if cache == "cache-dit":
            cache_dit.disable_cache(pipe)
        else:
            pipe.transformer.disable_cache()
            pipe.transformer_2.disable_cache()


def test_the_page(tmp_path, capsys):
    """What docs/models.md tells a reader to type, in fewer steps. cache-dit computes eight blocks unless told
    otherwise, so the model has nine."""
    pipe = load_pipeline(pipelines.make_wan(str(tmp_path / "wan")), device="cpu")
    pipe.transformer = diffusers.WanTransformer3DModel.from_config({**pipe.transformer.config, "num_layers": 9}).eval()
    pipe.set_progress_bar_config(disable=True)
    text = (pathlib.Path(__file__).resolve().parents[2] / "docs" / "models.md").read_text()
    text = text.split("\n## Together with caches and quantised layers\n")[1]
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 2
    names = {"pipe": pipe}
    for block in blocks:
        block = block.replace("num_inference_steps=50", "num_inference_steps=3")
        exec(compile(block, "docs/models.md", "exec"), names)
        assert len(names["frames"]) == 1
    assert "Wan, 9 layers" in capsys.readouterr().out
    names["handle"].remove()
