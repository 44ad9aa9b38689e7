# SPDX-License-Identifier: Apache-2.0
"""LTX-2, 2.3 and 2.5: short sequences stay dense by default, and say so; the modular pipeline, whose guidance makes up
to four calls of a step; pictures that a condition appends behind the video. test_models.py compares the minis with
masked attention."""
import copy
import types
import warnings

import diffusers
import esa
import model_minis
import pytest
import torch
from esa.diffusers.families import Geometry
from model_minis import HEADS, DIM, words

GRID = (2, 10, 12)                      # 240 tokens
# 121 frames of 544 x 960, and the second stage at 1088 x 1920
FIRST, SECOND = Geometry((16, 17, 30)), Geometry((16, 34, 60))


def tiny(grid=GRID, **settings):
    return model_minis.ltx2(grid=grid, batch=1, num_layers=1, **settings)


def test_the_default_stays_dense_at_the_first_stage():
    """8,160 tokens: dense, with one warning and a line in the report; output as without esa."""
    model = tiny(FIRST.grid)
    with esa.apply(model.model, steps=2) as handle:
        with pytest.warns(UserWarning, match="LTX-2 stays dense at 8160 tokens, .*min_tokens=0. makes it sparse"):
            got = model.at(900)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.at(500)
            stats = handle.stats()
        assert stats.calls == stats.dense_calls == 2 and "stays dense at 8160 tokens" in handle.report()
    assert (got - model.at(900)).abs().max() < 2e-5     # float32 sums in another order
    assert SECOND.tokens == 32640 and not handle._run.is_short(SECOND) and handle._run.is_short(FIRST)


@pytest.mark.parametrize("config", [esa.EsaConfig(min_tokens=0, block=32), esa.EsaConfig(work=0.9, block=32),
                                    esa.EsaConfig(budget=0.5, block=32, warmup_frac=0.0, dense_first_layer=False)],
                         ids=["min_tokens", "work", "budget"])
def test_who_asks_gets_sparse(config):
    model = tiny()
    with esa.apply(model.model, config, steps=8) as handle, warnings.catch_warnings():
        warnings.simplefilter("error")
        model()
        assert handle.stats().sparse_calls == handle.stats().calls == 1
        assert not handle._run.dense


def test_other_models_are_sparse_at_any_length():
    model = model_minis.make("cosmos")
    with esa.apply(model.model, esa.EsaConfig(block=32), steps=8) as handle:
        model()
        assert handle.stats().sparse_calls == model.layers


# ---------------------------------------------------------------- the modular pipeline


def denoise(pipe, model, steps, guided, sizes=GRID, **more):
    """The blocks' loop over the steps, with text and latents given."""
    t, h, w = sizes
    pipe.scheduler.set_timesteps(steps)
    embeds = {f"{sign}connector_{kind}prompt_embeds": words() for sign in ("", "negative_") for kind in ("", "audio_")}
    masks = {f"{sign}connector_attention_mask": torch.ones(1, 12) for sign in ("", "negative_")}
    return pipe(latents=model.inputs["hidden_states"], audio_latents=model.inputs["audio_hidden_states"],
                audio_scheduler=copy.deepcopy(pipe.scheduler), timesteps=pipe.scheduler.timesteps,
                num_inference_steps=steps, height=32 * h, width=32 * w, num_frames=8 * t - 7, dtype=torch.float32,
                denoiser_input_fields={"audio_num_frames": 9}, use_cross_timestep=False, **embeds, **masks, **more)


@pytest.mark.parametrize("guided", [True, False], ids=["four passes", "distilled"])
def test_the_modular_pipeline(guided):
    """Steps are the scheduler's, and every pass of the guiders is a branch; the first one makes the masks of all."""
    from diffusers.guiders import LTX2Guidance
    from diffusers.modular_pipelines.ltx2.denoise import LTX2DenoiseStep
    torch.manual_seed(0)
    model = tiny()
    pipe = LTX2DenoiseStep().init_pipeline()
    scale = {"guidance_scale": 3.0, "stg_scale": 1.0, "modality_scale": 3.0} if guided else {
        "guidance_scale": 1.0, "stg_scale": 0.0, "modality_scale": 1.0}
    guider = {"spatio_temporal_guidance_blocks": [5], **scale}          # a block that there is not: none is left out
    pipe.update_components(
        transformer=model.model.eval(), scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        guider=LTX2Guidance(**guider), audio_guider=LTX2Guidance(**guider))
    passes = 4 if guided else 1
    config = esa.EsaConfig(block=32, carry=[0, 3], work=0.9)
    with esa.apply(pipe, config) as handle:
        for number in (1, 2):
            denoise(pipe, model, 8, guided)
            assert (handle.videos, handle.step, handle.steps) == (number, 7, 8)
            steps = [handle.stats(step=i) for i in range(8)]
            assert [s.calls for s in steps] == [passes] * 8
            assert [s.anchor_calls for s in steps] == [int(i in (0, 3)) for i in range(8)]
        assert handle._run._passes() == passes == handle._run._step_branches()
        assert handle._run._branch == passes - 1


# ---------------------------------------------------------------- pictures for later frames


def test_appended_pictures_are_kept_whole():
    """LTX2ConditionPipeline appends the tokens of a picture for a later frame, with positions of their own."""
    from diffusers.pipelines.ltx2.pipeline_ltx2_condition import LTX2VideoCondition
    from PIL import Image

    class Vae:
        spatial_compression_ratio, temporal_compression_ratio, dtype = 32, 8, torch.float32
        latents_mean, latents_std = torch.zeros(4), torch.ones(4)
        config = types.SimpleNamespace(scaling_factor=1.0)

        def encode(self, video, **more):
            latents = torch.randn(1, 4, 1, *GRID[1:])
            return types.SimpleNamespace(latent_dist=types.SimpleNamespace(sample=lambda g=None: latents,
                                                                           mode=lambda: latents))

    class AudioVae:
        mel_compression_ratio, temporal_compression_ratio, dtype = 4, 4, torch.float32
        latents_mean, latents_std = torch.zeros(128), torch.ones(128)
        config = types.SimpleNamespace(sample_rate=16000, mel_hop_length=160, mel_bins=64, latent_channels=8)

    class Connectors:
        def __call__(self, embeds, mask, **more):
            return embeds, embeds, mask
    import test_model_pipelines as pipelines
    pipe = pipelines.build(diffusers.LTX2ConditionPipeline, "ltx2", None, {"audio": 128}, vae=Vae(),
                           audio_vae=AudioVae(), connectors=Connectors())
    masks = {"prompt_attention_mask": torch.ones(1, 12), "negative_prompt_attention_mask": torch.ones(1, 12)}
    picture = Image.new("RGB", (384, 320), (90, 140, 60))
    with esa.apply(pipe, esa.EsaConfig(block=32, budget=0.5, selector="entropy", warmup_frac=0.0)) as handle:
        pipe(num_frames=9, height=320, width=384, num_inference_steps=2, output_type="latent", return_dict=False,
             **pipelines.prompts(), **masks, conditions=[LTX2VideoCondition(frames=picture, index=1, crf=0)])
        assert handle._run.geometry == Geometry((2, 10, 12), text_back=120)
        assert handle.steps == 2 and handle.stats().sparse_calls > 0


def test_minis_have_every_switch():
    """Each switch of the config that changes the model is set in one of the minis."""
    plain = model_minis.make("ltx2").model.config
    changed = set()
    for name in ("ltx23", "ltx25"):
        config = model_minis.make(name).model.config
        changed |= {key for key in plain if config[key] != plain[key]}
    switches = {key for key, value in plain.items() if isinstance(value, bool) and key not in (
        "attention_bias", "attention_out_bias", "norm_elementwise_affine", "rope_double_precision", "audio_ff_bias")}
    assert switches <= changed and "rope_type" in changed and HEADS * DIM == 64
