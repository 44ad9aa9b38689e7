# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2 A14B in the engine: two transformers, switched at the boundary. A mini of it (wan-tiny twice, the second
with other weights) gives the latents of diffusers' WanPipeline."""
import functools
import shutil

import pipelines
import pytest
import torch
from engine_minis import change_index, far
from safetensors.torch import load_file, save_file
from test_single_files import TINY, esa

diffusers = pytest.importorskip("diffusers")
STEPS, BOUNDARY = 4, 0.9                            # with the shift of wan-tiny, steps 2 and 3 are the second's
GUIDANCE = (2.5, 1.75)
SIZE = ("--frames", 5, "--height", 64, "--width", 64, "--steps", STEPS, "--threads", 1)
# Of the largest number: four steps in float32, guidance included.
CLOSE = 2.5e-5


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wan22") / "mini"
    shutil.copytree(TINY, folder)
    shutil.copytree(TINY / "transformer", folder / "transformer_2")
    path = folder / "transformer_2/diffusion_pytorch_model.safetensors"
    random = torch.Generator().manual_seed(1)
    save_file({name: (value.float() * (1 + 0.05 * torch.randn(value.shape, generator=random))).half()
               for name, value in load_file(path).items()}, path)
    change_index(folder, transformer_2=["diffusers", "WanTransformer3DModel"], boundary_ratio=BOUNDARY)
    return folder


def made(mini, name, *words, method="dense"):
    out = mini.parent / f"{name}.safetensors"
    said = esa("--model", mini, *SIZE, "--method", method, "--guidance", GUIDANCE[0], "--guidance-2", GUIDANCE[1],
               "--save-latents", out, "--save-embeds", mini.parent / "embeds.safetensors", "--json",
               mini.parent / "said.json", "--out", mini.parent / f"{name}.mp4", *pipelines.sigmas_of_version(), *words)
    assert said.returncode == 0, said.stderr
    return load_file(out)["latents"]


@functools.cache
def pipe_of(mini):
    parts = {name: None for name in ("tokenizer", "text_encoder")}
    pipe = diffusers.WanPipeline.from_pretrained(mini, torch_dtype=torch.float32, **parts)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def theirs(mini, **settings):
    embeds = {name: value[None] for name, value in load_file(mini.parent / "embeds.safetensors").items()}
    with torch.no_grad():
        return pipe_of(mini)(**embeds, num_frames=5, height=64, width=64, num_inference_steps=STEPS,
                             guidance_scale=GUIDANCE[0], guidance_scale_2=GUIDANCE[1], output_type="latent",
                             generator=torch.Generator().manual_seed(0), **settings).frames[0]


def test_diffusers_makes_the_same(mini):
    ours = made(mini, "dense")
    assert (mini.parent / "dense.mp4").stat().st_size > 1000
    scheduler = pipe_of(mini).scheduler
    scheduler.set_timesteps(STEPS)
    assert [t < BOUNDARY * 1000 for t in scheduler.timesteps.tolist()] == [False, False, True, True]
    want = theirs(mini)
    assert far(ours, want) <= CLOSE, far(ours, want)
    one = made(mini, "one", "--transformer-2", mini / "transformer/diffusion_pytorch_model.safetensors")
    assert far(one, want) > 100 * CLOSE


def test_settings(mini):
    said = esa("--model", mini, "--check")
    assert said.returncode == 0 and "transformer_2: 231 tensors" in said.stdout
    said = esa("--guidance-2", 2)
    assert said.returncode == 1 and "one transformer" in said.stderr
    said = esa("--transformer-2", mini / "transformer/diffusion_pytorch_model.safetensors", "--check")
    assert said.returncode == 1 and "this model has one" in said.stderr
    online = made(mini, "online", "--budget", 0.5, "--block", "16x16", "--refresh", 0, method="entropy")
    assert torch.isfinite(online).all()
