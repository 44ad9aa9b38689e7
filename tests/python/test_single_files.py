# SPDX-License-Identifier: Apache-2.0
"""Single weight files as people have them: `esa generate --check FILE` says what they are (test_published.py has the
published models), and scaled fp8 in the names of Wan's authors gives the numbers that it stands for."""
import json
import pathlib
import subprocess

import headers
import pytest
import torch
from esa.programs.native import find_command
from safetensors.torch import load_file, save_file

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = ROOT / "models" / "wan-tiny"
WEIGHTS = TINY / "transformer/diffusion_pytorch_model.safetensors"
SMALL = ("--frames", 1, "--height", 32, "--width", 32, "--steps", 2, "--method", "dense", "--threads", 1)
RENAMED = (("condition_embedder.time_embedder.linear_1", "time_embedding.0"),
           ("condition_embedder.time_embedder.linear_2", "time_embedding.2"),
           ("condition_embedder.time_proj", "time_projection.1"),
           ("condition_embedder.text_embedder.linear_1", "text_embedding.0"),
           ("condition_embedder.text_embedder.linear_2", "text_embedding.2"),
           ("attn1", "self_attn"), ("attn2", "cross_attn"), (".to_q.", ".q."), (".to_k.", ".k."), (".to_v.", ".v."),
           (".to_out.0.", ".o."), (".norm2.", ".norm3."), ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2"),
           ("proj_out", "head.head"))


def original(name):
    """The name that Wan's authors have for a tensor of diffusers."""
    for ours, theirs in RENAMED:
        name = name.replace(ours, theirs)
    if name == "scale_shift_table":
        return "head.modulation"
    return name.replace("scale_shift_table", "modulation")


def esa(*words):
    return subprocess.run([str(find_command()), "generate", *map(str, words)], capture_output=True, text=True)


def latents(path, *words):
    made = esa(*SMALL, "--save-latents", path, "--out", path.with_suffix(".y4m"), *words)
    assert made.returncode == 0, made.stderr
    return load_file(path)["latents"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("single")


def test_other_files(folder):
    said = esa("--check", TINY / "vae/diffusion_pytorch_model.safetensors")
    assert said.returncode == 1 and "is a VAE, expected" in said.stderr
    said = esa("--check", TINY / "text_encoder/model.safetensors")
    assert said.returncode == 1 and "is a T5 text encoder" in said.stderr
    said = esa("--check", headers.write(folder / "odd.safetensors", {"a": (2, 3)}))
    assert said.returncode == 1 and "no model that the engine knows" in said.stderr
    said = esa("--check", folder / "none.safetensors")
    assert said.returncode == 1 and "none.safetensors" in said.stderr
    said = esa("--check", TINY)
    assert said.returncode == 0 and "every name and shape" in said.stdout
    for words in (("--check", "a", "b"), ("a",), ("--check", "a", "--model", TINY)):
        assert esa(*words).returncode == 2


def test_scaled_fp8(folder):
    """E4M3 with one scale for each matrix, as ComfyUI writes it, in both of its ways. The numbers that the engine uses
    are the stored ones times the scale, so another file with those numbers in f32 gives the same latents."""
    scaled, plain = {}, {}
    prefix = "model.diffusion_model."
    for i, (name, value) in enumerate(load_file(WEIGHTS).items()):
        value, theirs = value.float(), original(name)
        if value.ndim == 2 and name.startswith("blocks."):
            scale = value.abs().max() / 448
            stored = (value / scale).to(torch.float8_e4m3fn)
            base = prefix + theirs.removesuffix("weight")
            scaled[prefix + theirs] = stored
            scaled[base + ("scale_weight" if i % 2 else "weight_scale")] = scale.reshape(()).clone()
            if not i % 2:
                text = json.dumps({"format": "float8_e4m3fn"}).encode()
                scaled[base + "comfy_quant"] = torch.tensor(list(text), dtype=torch.uint8)
            value = stored.float() * scale
        else:
            scaled[prefix + theirs] = value
        plain[name] = value
    scaled[prefix + "scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    save_file(scaled, folder / "scaled.safetensors")
    save_file(plain, folder / "plain.safetensors")
    said = esa("--check", folder / "scaled.safetensors")
    assert said.returncode == 0 and "F8_E4M3" in said.stdout, said.stderr
    assert "names of the original Wan behind model.diffusion_model." in said.stdout
    a = latents(folder / "a.safetensors", "--transformer", folder / "scaled.safetensors", "--json", folder / "a.json")
    b = latents(folder / "b.safetensors", "--transformer", folder / "plain.safetensors")
    assert torch.equal(a, b)
    assert json.loads((folder / "a.json").read_text())["transformer"] == str(folder / "scaled.safetensors")
    base = prefix + "blocks.0.self_attn.q."
    scaled[base + "comfy_quant"] = torch.tensor(list(b'{"format": "nvfp4"}'), dtype=torch.uint8)
    save_file(scaled, folder / "other.safetensors")
    said = esa("--check", folder / "other.safetensors")
    assert said.returncode == 1 and "blocks.0.self_attn.q.comfy_quant" in said.stderr
