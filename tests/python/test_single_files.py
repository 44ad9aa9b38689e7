# SPDX-License-Identifier: Apache-2.0
"""Single weight files as people have them: `esa generate --check FILE` says what they are, files of true names and
shapes pass and changed ones do not, and scaled fp8 in the names of Wan's authors gives the numbers that it stands for.
"""
import json
import os
import pathlib
import struct
import subprocess

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


def sparse_file(path, shapes, dtype="BF16"):
    """A safetensors file with these shapes whose numbers are a hole in the file."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2
        for side in shape:
            size *= side
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        os.truncate(path, 8 + len(text) + at)
    return path


def wan_shapes(layers, d, ffn, channels=16):
    """The tensors of Wan 2.1 text to video, as published by its authors."""
    shapes = {"patch_embedding.weight": (d, channels, 1, 2, 2), "patch_embedding.bias": (d,),
              "head.head.weight": (64, d), "head.head.bias": (64,), "head.modulation": (1, 2, d)}
    linear = {"text_embedding.0": (d, 4096), "text_embedding.2": (d, d), "time_embedding.0": (d, 256),
              "time_embedding.2": (d, d), "time_projection.1": (6 * d, d)}
    for i in range(layers):
        block = f"blocks.{i}."
        shapes |= {block + "modulation": (1, 6, d), block + "norm3.weight": (d,), block + "norm3.bias": (d,)}
        linear |= {block + "ffn.0": (ffn, d), block + "ffn.2": (d, ffn)}
        for part in ("self_attn.", "cross_attn."):
            linear |= {block + part + side: (d, d) for side in "qkvo"}
            shapes |= {block + part + "norm_q.weight": (d,), block + part + "norm_k.weight": (d,)}
    for name, (out, into) in linear.items():
        shapes |= {name + ".weight": (out, into), name + ".bias": (out,)}
    return shapes


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("single")


@pytest.mark.parametrize("prefix", ("", "model.diffusion_model."))
@pytest.mark.parametrize("name, size, tensors", (("wan-t2v-1.3b", (30, 1536, 8960), 825),
                                                 ("wan-t2v-14b or one half of wan2.2-t2v-a14b", (40, 5120, 13824),
                                                  1095)))
def test_true_shapes(folder, name, size, tensors, prefix):
    shapes = {prefix + key: shape for key, shape in wan_shapes(*size).items()}
    said = esa("--check", sparse_file(folder / "true.safetensors", shapes))
    assert said.returncode == 0, said.stderr
    assert f"family: Wan, {name}: {size[0]} layers of width {size[1]}" in said.stdout
    assert f"safetensors: {tensors} BF16; names of the original Wan" in said.stdout
    assert f"transformer: {tensors} tensors" in said.stdout


@pytest.mark.parametrize("change, says", (("missing", "1 missing (blocks.7.ffn.0.bias)"),
                                          ("renamed", "not expected (blocks.7.ffn.0.bios)"),
                                          ("reshaped", "patch_embedding.weight [1536,17,1,2,2] instead of "
                                                       "[1536,16,1,2,2]")))
def test_changed_files_are_refused(folder, change, says):
    shapes = wan_shapes(30, 1536, 8960)
    if change == "reshaped":
        shapes["patch_embedding.weight"] = (1536, 17, 1, 2, 2)
    else:
        shape = shapes.pop("blocks.7.ffn.0.bias")
        if change == "renamed":
            shapes["blocks.7.ffn.0.bios"] = shape
    said = esa("--check", sparse_file(folder / "changed.safetensors", shapes))
    assert said.returncode == 1 and says in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr


def test_other_files(folder):
    said = esa("--check", TINY / "vae/diffusion_pytorch_model.safetensors")
    assert said.returncode == 1 and "is a VAE, expected" in said.stderr
    said = esa("--check", TINY / "text_encoder/model.safetensors")
    assert said.returncode == 1 and "is a T5 text encoder" in said.stderr
    said = esa("--check", sparse_file(folder / "odd.safetensors", {"a": (2, 3)}))
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
