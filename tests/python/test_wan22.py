# SPDX-License-Identifier: Apache-2.0
"""Wan 2.2 A14B in the engine: two transformers, switched at the boundary. A mini of it (wan-tiny twice, the second
with other weights) gives the latents of diffusers' WanPipeline, and files of true names and shapes pass --check."""
import functools
import json
import shutil
import struct

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
A14B = dict(num_attention_heads=40, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096,
            freq_dim=256, ffn_dim=13824, num_layers=40, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
            eps=1e-6, patch_size=(1, 2, 2), rope_max_seq_len=1024)


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


def shards(folder, tensors, count, stem="diffusion_pytorch_model", single=False):
    """The tensors as sparse files with an index, in `count` shards as the hub has them; single: as one file."""
    names, index = list(tensors), {}
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        part, header, at = names[n * len(names) // count:(n + 1) * len(names) // count], {}, 0
        file = f"{stem}.safetensors" if single else f"{stem}-{n + 1:05d}-of-{count:05d}.safetensors"
        for name in part:
            size = 4 * tensors[name].numel()
            header[name] = {"dtype": "F32", "shape": list(tensors[name].shape), "data_offsets": [at, at + size]}
            at += size
            index[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + at)
    if not single:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@functools.cache
def true_tensors():
    with torch.device("meta"):
        return diffusers.WanTransformer3DModel(**A14B).state_dict()


@pytest.mark.parametrize("change", ("none", "missing", "renamed", "reshaped"))
def test_true_shapes(mini, change):
    folder = mini.parent / "true"
    if not folder.exists():
        shutil.copytree(mini, folder)
    for part in ("transformer", "transformer_2"):
        tensors = dict(true_tensors())
        if part == "transformer_2" and change == "missing":
            tensors.pop("blocks.39.ffn.net.2.bias")
        if part == "transformer_2" and change == "renamed":
            tensors["blocks.39.ffn.net.2.bios"] = tensors.pop("blocks.39.ffn.net.2.bias")
        if part == "transformer_2" and change == "reshaped":
            tensors["proj_out.bias"] = torch.empty(63, device="meta")
        shutil.rmtree(folder / part)
        shards(folder / part, tensors, 12)
        config = {"_class_name": "WanTransformer3DModel", "added_kv_proj_dim": None, "image_dim": None, **A14B}
        (folder / part / "config.json").write_text(json.dumps(config))
    said = esa("--model", folder, "--check", "--prompt-embeds", "none")
    if change == "none":
        assert said.returncode == 0, said.stderr
        for part in ("transformer", "transformer_2"):
            assert f"{part}: 1095 tensors, 14288491584 parameters, 57.15 GB in 12 files" in said.stdout
    else:
        says = {"missing": "1 missing (blocks.39.ffn.net.2.bias)", "renamed": "not expected (blocks.39.ffn.net.2.bios)",
                "reshaped": "proj_out.bias [63] instead of [64]"}
        assert said.returncode == 1 and "transformer_2: " in said.stderr and says[change] in said.stderr, said.stderr
