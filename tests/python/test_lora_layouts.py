# SPDX-License-Identifier: Apache-2.0
"""`esa generate --lora` for HunyuanVideo and CogVideoX in diffusers', kohya's and ComfyUI's names: the engine merges
what diffusers' load_lora_weights and fuse_lora merge. A module of the authors that holds several of diffusers is split.
"""
import types

import diffusers
import layouts
import pytest
import torch
from engine_minis import make_cogvideox, make_hunyuan
from safetensors.torch import load_file, save_file
from test_layouts import latents
from test_single_files import esa

RANK, ALPHA, SCALE = 3, 1.5, 0.7
# Latents of two steps, of their largest number. Both sides add in f32, in another order.
CLOSE = 2.5e-5


@pytest.fixture(scope="module", params=("hunyuan", "cog"))
def family(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "mini"
    make_hunyuan(folder) if request.param == "hunyuan" else make_cogvideox(folder, rotary=True)
    file = folder / "transformer/diffusion_pytorch_model.safetensors"
    found = types.SimpleNamespace(name=request.param, folder=folder, weights=load_file(file), file=file)
    found.own = latents(found, "--save-embeds", folder.parent / "embeds", prompt="a red ball")
    return found


def changes(shapes, seed=5):
    """down and up of every matrix, by module."""
    random = torch.Generator().manual_seed(seed)
    return {name.removesuffix(".weight"): (torch.randn(RANK, shape[1], generator=random) * 0.1,
                                           torch.randn(shape[0], RANK, generator=random) * 0.1)
            for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")}


def shapes_of(tensors):
    return {name: tuple(value.shape) for name, value in tensors.items()}


def own_matrices(family, layout, found):
    """The products of a LoRA in another layout as whole changes in the names of diffusers. Every change is put where
    its tensor is, and each tensor of diffusers knows its rows there: the layout is made of numbered elements."""
    numbers, at = {}, 0
    for name, value in family.weights.items():
        numbers[name] = torch.arange(at, at + value.numel(), dtype=torch.float64).reshape(value.shape)
        at += value.numel()
    flat = torch.zeros(at)
    for name, places in layout(numbers).items():
        down, up = found.get(name.removesuffix(".weight"), (None, None))
        if down is not None and name.endswith(".weight"):
            flat[places.long().flatten()] = (up @ down).flatten()
    return {name: flat[places.long()] for name, places in numbers.items()}


def fused_by_diffusers(family, path, file, width=None, monkeypatch=None):
    """The mini's transformer with a LoRA merged by diffusers, in a file. width: of the mini, which its converter for
    the authors' names does not know."""
    kind = diffusers.HunyuanVideoPipeline if family.name == "hunyuan" else diffusers.CogVideoXPipeline
    parts = {name: None for name in ("tokenizer", "text_encoder", "tokenizer_2", "text_encoder_2", "vae")
             if family.name == "hunyuan" or not name.endswith("_2")}
    pipe = kind.from_pretrained(family.folder, **parts)
    if width:
        from diffusers.loaders import lora_conversion_utils as utils
        from diffusers.loaders import lora_pipeline

        def with_width(code):
            return code.replace(co_consts=tuple(
                width if value == 3072 else with_width(value) if isinstance(value, types.CodeType) else value
                for value in code.co_consts))

        theirs = utils._convert_hunyuan_video_lora_to_diffusers
        monkeypatch.setattr(lora_pipeline, theirs.__name__,
                            types.FunctionType(with_width(theirs.__code__), vars(utils)))
    pipe.load_lora_weights(str(file.parent), weight_name=file.name, adapter_name="a")
    pipe.set_adapters(["a"], [SCALE])
    pipe.fuse_lora(components=["transformer"], adapter_names=["a"])
    pipe.unload_lora_weights()
    save_file({name: value.contiguous() for name, value in pipe.transformer.state_dict().items()}, path)
    return path


def agree(family, ours, theirs):
    assert (ours - theirs).abs().max() <= CLOSE * theirs.abs().max(), (ours - theirs).abs().max()
    assert (family.own - theirs).abs().max() > 100 * CLOSE * theirs.abs().max()


def test_names_of_diffusers(family, tmp_path):
    found = {name: pair for name, pair in changes(shapes_of(family.weights)).items() if "blocks." in name}
    file = tmp_path / "lora.safetensors"
    save_file({f"transformer.{name}.lora_{side}.weight": value for name, pair in found.items()
               for side, value in zip("AB", pair)}, file)
    theirs = latents(family, "--transformer", fused_by_diffusers(family, tmp_path / "fused.safetensors", file))
    agree(family, latents(family, "--lora", f"{file}:{SCALE}"), theirs)


def test_diffusers_splits_the_authors_names(family, tmp_path, monkeypatch):
    """HunyuanVideo's double and single blocks as diffusion-pipe and ComfyUI write them. (diffusers also cuts `down` of
    the refiner and of the last modulation, which is not what such a file means.)"""
    if family.name != "hunyuan":
        return
    found = {name: pair for name, pair in changes(shapes_of(layouts.hunyuan(family.weights))).items()
             if name.startswith(("double_blocks.", "single_blocks."))}
    assert any("qkv" in name for name in found) and any("linear1" in name for name in found)
    file = tmp_path / "lora.safetensors"
    save_file({f"diffusion_model.{name}.lora_{side}.weight": value for name, pair in found.items()
               for side, value in zip("AB", pair)}, file)
    width = family.weights["proj_out.weight"].shape[1]
    fused = fused_by_diffusers(family, tmp_path / "fused.safetensors", file, width, monkeypatch)
    theirs = latents(family, "--transformer", fused)
    agree(family, latents(family, "--lora", f"{file}:{SCALE}"), theirs)
    said = esa("--check", "--model", family.folder, "--prompt-embeds", "none", "--lora", file)
    assert said.returncode == 0 and f"rank {RANK}, scale 1" in said.stdout, said.stderr


LAYOUTS = {"hunyuan": {"kohya": layouts.hunyuan, "comfyui": layouts.hunyuan_comfy},
           "cog": {"kohya": layouts.cog, "comfyui": layouts.cog_comfy}}


@pytest.mark.parametrize("scheme", ("kohya", "comfyui"))
def test_every_module(family, tmp_path, scheme):
    """All modules, also outside the blocks, in kohya's names (with alpha) and ComfyUI's, merged into the tensors of
    diffusers and into those of the authors: what the products are in the tensors of diffusers."""
    layout = LAYOUTS[family.name][scheme]
    found = changes(shapes_of(layout(family.weights)))
    named = {}
    for name, (down, up) in found.items():
        base = "lora_unet_" + name.replace(".", "_") if scheme == "kohya" else "diffusion_model." + name
        named |= {base + ".lora_down.weight": down, base + ".lora_up.weight": up}
        if scheme == "kohya":
            named[base + ".alpha"] = torch.tensor(ALPHA)
    file = tmp_path / "lora.safetensors"
    save_file(named, file)
    factor = SCALE * (ALPHA / RANK if scheme == "kohya" else 1)
    change = own_matrices(family, layout, found)
    save_file({name: value + factor * change[name] for name, value in family.weights.items()},
              tmp_path / "merged.safetensors")
    theirs = latents(family, "--transformer", tmp_path / "merged.safetensors")
    agree(family, latents(family, "--lora", f"{file}:{SCALE}"), theirs)
    save_file({name: value.contiguous() for name, value in layout(family.weights).items()},
              tmp_path / "layout.safetensors")
    agree(family, latents(family, "--transformer", tmp_path / "layout.safetensors", "--lora", f"{file}:{SCALE}"),
          theirs)


def test_refusals(family, tmp_path):
    layout = LAYOUTS[family.name]["kohya"]
    found = changes(shapes_of(layout(family.weights)))
    fused = next(name for name in found if "qkv" in name or "query_key_value" in name)
    down, up = found[fused]
    base = "lora_unet_" + fused.replace(".", "_")
    for named, says in (
            ({base + ".lora_down.weight": down, base + ".lora_up.weight": up[1:].clone()},
             f"1 with the wrong shape or type ({base}.lora_down.weight)"),
            ({base + ".lora_down.weight": down}, f"1 without their other half ({base}.lora_down.weight)"),
            ({base + "s.lora_down.weight": down}, f"1 of tensors that the model does not have ({base}s.lora_down.weight"
                                                  ")")):
        save_file(named, tmp_path / "bad.safetensors")
        said = esa("--check", "--model", family.folder, "--prompt-embeds", "none", "--lora",
                   tmp_path / "bad.safetensors")
        assert said.returncode == 1 and says in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
