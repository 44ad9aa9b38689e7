# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo in the engine beside diffusers: from prompt to pixels, saved embeddings. test_engine_masks.py has sparse
attention and mask files, test_published.py the published model."""
import subprocess

import numpy
import pytest
import torch
from engine_minis import make_hunyuan
from esa.programs.native import find_command
from safetensors.torch import load_file

PROMPT = "a red ball rolls over green grass, \"slowly\""
SIZE = dict(num_frames=21, height=64, width=96, num_inference_steps=3)
NATIVE = ("--prompt", PROMPT, "--frames", "21", "--height", "64", "--width", "96", "--steps", "3", "--seed", "5",
          "--threads", "2")
# Of the scale, f32 against f32 with another order of sums; 6e-6 is seen. Guidance 6000 as an angle has 5e-4 as its last
# bit.
TOLERANCE = 2.5e-5


def esa(*words):
    done = subprocess.run([str(find_command()), *map(str, words)], capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def works(*words):
    status, out, error = esa(*words)
    assert status == 0, error
    return out


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A mini pipeline with every part, and its folder."""
    folder = tmp_path_factory.mktemp("hunyuan") / "mini"
    return make_hunyuan(folder), folder


def run(pipe, **more):
    with torch.no_grad():
        return pipe(PROMPT, generator=torch.Generator("cpu").manual_seed(5), output_type="latent", **SIZE,
                    **more).frames[0]


def off(got, want):
    return float((got - want).abs().max() / want.abs().max())


@pytest.fixture(scope="module")
def dense(model):
    return run(model[0])


def test_prompt_to_pixels(model, dense, tmp_path):
    pipe, folder = model
    out = works("generate", "--check", "--model", folder)
    assert "every name and shape" in out
    saved, embeds = tmp_path / "l.safetensors", tmp_path / "e.safetensors"
    works("generate", "--model", folder, *NATIVE, "--method", "dense", "--save-latents", saved, "--save-embeds", embeds,
          "--out", tmp_path / "v.npy")
    with torch.no_grad():
        states, pooled, mask = pipe.encode_prompt(PROMPT)
    valid = int(mask.sum())
    text = load_file(embeds)
    assert text["prompt_embeds"].shape == (valid, 48)
    assert off(text["prompt_embeds"], states[0, :valid]) < TOLERANCE
    assert off(text["pooled_prompt_embeds"].flatten(), pooled[0]) < TOLERANCE
    assert off(load_file(saved)["latents"], dense) < TOLERANCE
    with torch.no_grad():
        video = pipe.vae.decode(dense[None] / pipe.vae.config.scaling_factor, return_dict=False)[0]
    frames = pipe.video_processor.postprocess_video(video, output_type="np")[0]
    ours = numpy.load(tmp_path / "v.npy").astype(int)
    assert ours.shape == frames.shape == (21, 64, 96, 3)
    assert abs(ours - (frames * 255).round()).max() <= 1 and frames.std() > 0.01
    # the same from the saved embeddings, tiles of the decoder, and a video
    works("generate", "--model", folder, *NATIVE[2:], "--prompt-embeds", embeds, "--method", "dense", "--save-latents",
          tmp_path / "again.safetensors", "--vae-tile", "32", "--out", tmp_path / "v.mp4")
    assert torch.equal(load_file(tmp_path / "again.safetensors")["latents"], load_file(saved)["latents"])
    assert (tmp_path / "v.mp4").stat().st_size > 1000
