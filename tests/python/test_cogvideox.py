# SPDX-License-Identifier: Apache-2.0
"""The native engine and diffusers make the same videos with CogVideoX: 2B-like (added positions, DPM, dynamic guidance)
and 5B-like (rotations, DDIM) minis. test_engine_masks.py has sparse attention and mask files, test_published.py the
published models."""
import subprocess

import numpy
import pytest
import torch
from engine_minis import make_cogvideox
from esa.programs.native import find_command
from safetensors.numpy import load_file
from safetensors.torch import save_file

PROMPT = "a red ball rolls to the right"
SIZE = {"num_frames": 9, "height": 64, "width": 80}        # not the model's shape: positions are no whole numbers
STEPS, SEED = 3, 7
# f32 against f32, of the largest number; pixels may round to the next grey level.
CLOSE = 2.5e-5


def esa(*arguments):
    return subprocess.run([str(find_command()), *map(str, arguments)], capture_output=True, text=True)


def works(*arguments):
    done = esa(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def minis(tmp_path_factory):
    """name: folder, pipeline, whether guidance is dynamic."""
    from diffusers import CogVideoXPipeline
    root, found = tmp_path_factory.mktemp("cog"), {}
    for name, rotary in (("two", False), ("five", True)):
        folder = root / name
        make_cogvideox(folder, rotary)
        pipe = CogVideoXPipeline.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        found[name] = folder, pipe, not rotary
    return found


def ours(folder, dynamic, *more, steps=STEPS):
    """Arguments of a run like theirs()."""
    return ["generate", "--model", folder, "--prompt", PROMPT, "--frames", SIZE["num_frames"], "--height",
            SIZE["height"], "--width", SIZE["width"], "--steps", steps, "--seed", SEED, "--dynamic-guidance",
            int(dynamic), "--threads", 1, "--device", "cpu", *more]


def theirs(pipe, dynamic, output="latent", **more):
    out = pipe(PROMPT, **{**SIZE, **more}, num_inference_steps=STEPS, guidance_scale=6.0, use_dynamic_cfg=dynamic,
               generator=torch.Generator().manual_seed(SEED), output_type=output).frames[0]
    return out.transpose(0, 1).numpy() if output == "latent" else out


def off(got, want):
    return numpy.abs(got - want).max() / numpy.abs(want).max()


@pytest.mark.parametrize("name", ["two", "five"])
def test_prompt_to_pixels(minis, tmp_path, name):
    folder, pipe, dynamic = minis[name]
    files = ["--method", "dense", "--save-latents", tmp_path / "l", "--save-embeds", tmp_path / "e"]
    works(*ours(folder, dynamic, *files, "--out", tmp_path / "v.npy"))
    embeds, negative = pipe.encode_prompt(PROMPT, max_sequence_length=226)
    assert off(load_file(tmp_path / "e")["prompt_embeds"], embeds[0].detach().numpy()) < CLOSE
    assert off(load_file(tmp_path / "e")["negative_prompt_embeds"], negative[0].detach().numpy()) < CLOSE
    assert off(load_file(tmp_path / "l")["latents"], theirs(pipe, dynamic)) < CLOSE
    want = numpy.rint(theirs(pipe, dynamic, "np") * 255)
    got = numpy.load(tmp_path / "v.npy").astype(float)
    assert got.shape == want.shape and numpy.abs(got - want).max() <= 1
    # An even number of latent frames has batches of two alone: 5 frames become 8, as in diffusers.
    works(*ours(folder, dynamic, "--method", "dense", "--frames", 5, "--out", tmp_path / "w.npy"))
    want = numpy.rint(theirs(pipe, dynamic, "np", num_frames=5) * 255)
    assert numpy.abs(numpy.load(tmp_path / "w.npy") - want).max() <= 1 and len(want) == 8


def test_mp4_by_default(minis, tmp_path):
    folder, _, _ = minis["five"]
    said = works(*ours(folder, 0, "--frames", 5, "--out", tmp_path / "v.mp4", steps=2))
    assert (tmp_path / "v.mp4").read_bytes()[4:8] == b"ftyp", said
    refused = esa(*ours(folder, 0, "--scheduler", "unipc", "--out", tmp_path / "x.mp4"))
    assert refused.returncode == 1 and "CogVideoX does not run with the scheduler UniPC" in refused.stderr


def test_lora(minis, tmp_path):
    folder, pipe, dynamic = minis["two"]
    random, named = torch.Generator().manual_seed(4), {}
    for name, value in pipe.transformer.named_parameters():
        if value.dim() == 2 and any(part in name for part in ("attn1.to_", "ff.net")):
            base = f"transformer.{name.removesuffix('.weight')}"
            named[f"{base}.lora_A.weight"] = torch.randn(3, value.shape[1], generator=random) * 0.1
            named[f"{base}.lora_B.weight"] = torch.randn(value.shape[0], 3, generator=random) * 0.1
    save_file(named, tmp_path / "lora.safetensors")
    pipe.load_lora_weights(str(tmp_path), weight_name="lora.safetensors", adapter_name="a")
    pipe.set_adapters(["a"], [0.5])
    works(*ours(folder, dynamic, "--method", "dense", "--lora", f"{tmp_path}/lora.safetensors:0.5", "--save-latents",
                tmp_path / "l", "--out", tmp_path / "v.npy"))
    want = theirs(pipe, dynamic)
    pipe.unload_lora_weights()
    assert off(load_file(tmp_path / "l")["latents"], want) < CLOSE
    assert off(want, theirs(pipe, dynamic)) > 100 * CLOSE
