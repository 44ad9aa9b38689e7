# SPDX-License-Identifier: Apache-2.0
"""`esa generate --lora`: the engine merges what diffusers' load_lora_weights and fuse_lora merge, for the three naming
schemes. diffusers' merged transformer is written to a file, and both make the same latents within rounding."""
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_single_files import TINY, WEIGHTS, esa, latents, original

RANK = 3
MODULES = ["attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", "attn2.to_q", "attn2.to_k", "attn2.to_v",
           "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2"]
# Latents of two steps, of their largest number. Both sides add in f32, in another order.
CLOSE = 2.5e-5


def matrices(seed, modules=None):
    """down and up of every linear layer in the blocks, under the names of diffusers."""
    shapes = {name: value.shape for name, value in load_file(WEIGHTS).items()}
    random = torch.Generator().manual_seed(seed)
    found = {}
    for module in modules or [f"blocks.{i}.{part}" for i in range(8) for part in MODULES]:
        out, into = shapes[module + ".weight"]
        found[module] = (torch.randn(RANK, into, generator=random) * 0.1,
                         torch.randn(out, RANK, generator=random) * 0.1)
    return found


def diffusers_names(seed):
    return {f"transformer.{name}.lora_{side}.weight": value for name, pair in matrices(seed).items()
            for side, value in zip("AB", pair)}


def kohya_names(seed):
    named = {}
    for name, (down, up) in matrices(seed).items():
        base = "lora_unet_" + original(name + ".").removesuffix(".").replace(".", "_")
        named |= {base + ".lora_down.weight": down, base + ".lora_up.weight": up, base + ".alpha": torch.tensor(1.5)}
    return named


def comfy_names(seed):
    """With an alpha for some layers, biases, and layers outside the blocks."""
    named = {}
    modules = matrices(seed) | matrices(seed, ["condition_embedder.time_proj",
                                               "condition_embedder.text_embedder.linear_1",
                                               "condition_embedder.text_embedder.linear_2"])
    for name, (down, up) in modules.items():
        base = "diffusion_model." + original(name + ".").removesuffix(".")
        named |= {base + ".lora_down.weight": down.half(), base + ".lora_up.weight": up.half()}
        if ".attn2.to_k" in name:
            named[base + ".alpha"] = torch.tensor(6.0)
        named[base + ".diff_b"] = torch.full((up.shape[0],), 0.01)     # diffusers wants all of them or none
    return named


SCHEMES = {"diffusers": diffusers_names, "kohya": kohya_names, "comfyui": comfy_names}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("lora")


def fused(folder, files):
    """wan-tiny's transformer with LoRAs (file, scale) merged by diffusers, in a file."""
    diffusers = pytest.importorskip("diffusers")
    transformer = diffusers.WanTransformer3DModel.from_pretrained(TINY, subfolder="transformer",
                                                                  torch_dtype=torch.float32)
    pipe = diffusers.WanPipeline(tokenizer=None, text_encoder=None, vae=None, transformer=transformer,
                                 scheduler=diffusers.FlowMatchEulerDiscreteScheduler())
    names = [f"a{i}" for i in range(len(files))]
    for name, (file, _) in zip(names, files):
        pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name=name)
    pipe.set_adapters(names, [scale for _, scale in files])
    pipe.fuse_lora(components=["transformer"], adapter_names=names)
    pipe.unload_lora_weights()
    path = folder / "fused.safetensors"
    save_file({name: value.contiguous() for name, value in pipe.transformer.state_dict().items()}, path)
    return path


def agree(a, b):
    assert (a - b).abs().max() <= CLOSE * b.abs().max(), ((a - b).abs().max(), b.abs().max())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_diffusers_merges_the_same(folder, scheme):
    file = folder / f"{scheme}.safetensors"
    save_file(SCHEMES[scheme](5), file)
    theirs = latents(folder / "theirs.safetensors", "--transformer", fused(folder, [(file, 0.7)]))
    ours = latents(folder / "ours.safetensors", "--lora", f"{file}:0.7")
    plain = latents(folder / "plain.safetensors")
    agree(ours, theirs)
    assert (plain - theirs).abs().max() > 100 * CLOSE * theirs.abs().max()


def test_several_files_and_settings(folder):
    """Two files at once, one of them with the settings of PEFT that diffusers stores in a file."""
    first, second = folder / "first.safetensors", folder / "second.safetensors"
    save_file(diffusers_names(1), first,
              metadata={"format": "pt", "lora_adapter_metadata": json.dumps(
                  {"transformer.r": RANK, "transformer.lora_alpha": 6, "transformer.rank_pattern": {},
                   "transformer.target_modules": MODULES,
                   "transformer.alpha_pattern": {"attn2.to_q": 12}})})
    save_file(kohya_names(2), second)
    theirs = latents(folder / "theirs.safetensors", "--transformer", fused(folder, [(first, 1.0), (second, 0.5)]))
    said = esa("--check", "--lora", first, "--lora", f"{second}:0.5")
    assert said.returncode == 0 and "second.safetensors changes 80 tensors, rank 3, scale 0.5" in said.stdout
    ours = latents(folder / "ours.safetensors", "--lora", first, "--lora", f"{second}:0.5", "--json",
                   folder / "said.json")
    agree(ours, theirs)
    assert json.loads((folder / "said.json").read_text())["lora"] == [str(first), f"{second}:0.5"]


@pytest.mark.parametrize("hold, most", (("file", 2e-2), ("bf16", 2e-2)))
def test_types_that_are_held(folder, hold, most):
    """Merged weights are held as asked: f16 as in the file (and blocks of GGUF as Q8_0), or bf16."""
    file = folder / "kohya.safetensors"
    save_file(kohya_names(5), file)
    exact = latents(folder / "exact.safetensors", "--lora", file, "--hold", "f32")
    held = latents(folder / "held.safetensors", "--lora", file, "--hold", hold)
    assert 0 < (held - exact).abs().max() <= most * exact.abs().max()


def test_blocks(folder):
    """Blocks are expanded, merged, and held as Q8_0: a LoRA of zeros changes Q8_0 by nothing but that."""
    path = folder / "q8.gguf"
    subprocess.run([sys.executable, TINY.parents[1] / "tools/convert_gguf.py", "--model", TINY, "--type", "Q8_0",
                    "--out", path], check=True, capture_output=True)
    save_file({name: value * 0 for name, value in kohya_names(1).items() if "alpha" not in name},
              folder / "zero.safetensors")
    plain = latents(folder / "plain.safetensors", "--transformer", path)
    same = latents(folder / "same.safetensors", "--transformer", path, "--lora", folder / "zero.safetensors", "--hold",
                   "file")
    assert (plain - same).abs().max() <= CLOSE * plain.abs().max()


def test_refusals(folder):
    def refused(change, *says):
        named = kohya_names(1)
        change(named)
        save_file(named, folder / "bad.safetensors")
        said = esa("--check", "--lora", folder / "bad.safetensors")
        assert said.returncode == 1 and all(text in said.stderr for text in ("bad.safetensors", *says)), said.stderr

    key = "lora_unet_blocks_3_ffn_0"
    refused(lambda n: n.update({"lora_unet_blocks_9_ffn_0.lora_up.weight": torch.zeros(2, 2)}),
            "1 of tensors that the model does not have (lora_unet_blocks_9_ffn_0.lora_up.weight)")
    refused(lambda n: n.update({key + ".lora_up.weight": torch.zeros(512, 4)}), "1 with the wrong shape",
            key + ".lora_down.weight")
    refused(lambda n: n.pop(key + ".lora_up.weight"), "1 without their other half")
    refused(lambda n: n.update({key + ".dora_scale": torch.zeros(512)}), "dora_scale")
    refused(lambda n: n.clear() or n.update(a=torch.zeros(1)), "does not have (a)")
    said = esa("--check", "--lora", folder / "none.safetensors:2")
    assert said.returncode == 1 and "none.safetensors" in said.stderr
    assert esa("--check", "--lora", ":2").returncode == 2
