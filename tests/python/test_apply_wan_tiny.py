# SPDX-License-Identifier: Apache-2.0
"""wan-tiny, a trained model, through WanPipeline: text encoder, tokenizer, scheduler and guidance included."""
import pytest
import torch
from minis import ReferenceMode, make_mask, masked_attention

import esa
from esa.models import load_pipeline

PROMPT = "a red ball rolls to the right over a blue floor"
SIZE = {"num_frames": 9, "height": 96, "width": 64, "num_inference_steps": 2, "guidance_scale": 4.0, "output_type": "latent"}


@pytest.fixture(scope="module")
def pipe():
    pipe = load_pipeline("wan-tiny", device="cpu", torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def latents(pipe, **settings):
    with torch.no_grad():
        return pipe(PROMPT, generator=torch.Generator().manual_seed(0), **{**SIZE, **settings}).frames


@pytest.fixture(scope="module")
def dense(pipe):
    return latents(pipe)


# 1e-5 of the values without guidance. With it uncond + 4 (cond - uncond) carries the rounding of the two branches 3 + 4 times as large.
@pytest.mark.parametrize("guidance,allowed", [(1.0, 1e-5), (4.0, 7e-5)])
def test_density_one_changes_nothing(pipe, guidance, allowed):
    want = latents(pipe, guidance_scale=guidance)
    with esa.apply(pipe, esa.EsaConfig(budget=1.0, warmup_frac=0.0, dense_first_layer=False, block=64)) as handle:
        got = latents(pipe, guidance_scale=guidance)
        assert handle.stats().sparse_calls == 2 * (2 if guidance > 1 else 1) * handle.layers
    assert (got - want).abs().max().item() <= allowed * want.abs().max().item()


@pytest.mark.parametrize("selector,tail,order", [("entropy", "none", None), ("rf_v2", "pooled", None), ("ada_bsa", "centroid", "hilbert")])
def test_sparse_equals_masked_attention(pipe, dense, selector, tail, order):
    config = esa.EsaConfig(selector=selector, budget=0.5, tail=tail, order=order, warmup_frac=0.0, dense_first_layer=False, block=32)
    with esa.apply(pipe, config) as handle:
        got = latents(pipe)
        grid, tokens, layers = handle._run.geometry.grid, handle._run.geometry.tokens, handle.layers
        assert handle.stats().sparse_calls == 2 * 2 * layers

    class Mini:
        layout = esa.Layout(grid=grid)
    assert Mini.layout.tokens == tokens
    Mini.layers = layers

    def attention(layer, q, k, v):
        return masked_attention(q, k, v, make_mask(q, k, config, Mini.layout), tail)
    with ReferenceMode(Mini, attention) as mode:
        want = latents(pipe)
    assert mode.calls == 2 * 2 * layers
    scale = dense.abs().max().item()
    # 1e-4 of the values, as in test_apply_math; guidance 4 makes differences of the two branches up to four times as large.
    assert (got - want).abs().max().item() <= 4e-4 * scale
    assert (got - dense).abs().max().item() > 1e-3 * scale


def test_a_video_stays_close_to_its_dense_self(pipe):
    """Whole frames at budget 0.7 with the pooled tail: the same picture."""
    def frames(**settings):
        return latents(pipe, output_type="pt", **settings)[0]
    want = frames()
    with esa.apply(pipe, esa.EsaConfig(budget=0.7, block=32)):
        got = frames()
    psnr = -10 * torch.log10(((got - want) ** 2).mean()).item()
    assert psnr > 25, f"{psnr:.1f} dB"      # an unrelated video of this model is at 8 to 12 dB
