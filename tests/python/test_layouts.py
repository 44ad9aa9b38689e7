# SPDX-License-Identifier: Apache-2.0
"""Transformers of HunyuanVideo and CogVideoX in the layouts of their authors and of ComfyUI, as safetensors, GGUF and
scaled fp8: the engine makes the same latents from them, bit for bit, as from the tensors of diffusers."""
import importlib.util
import types

import layouts
import pytest
import torch
from engine_minis import make_cogvideox, make_hunyuan
from safetensors.torch import load_file, save_file
from test_single_files import ROOT, esa

SIZE = ("--frames", 5, "--height", 32, "--width", 32, "--steps", 2)
LAYOUTS = {"hunyuan": {"original": layouts.hunyuan, "comfy": layouts.hunyuan_comfy, "diffusers": dict},
           "cog": {"original": layouts.cog, "comfy": layouts.cog_comfy, "diffusers": dict}}
SAYS = {"hunyuan": {"original": "the original HunyuanVideo", "comfy": "ComfyUI's HunyuanVideo"},
        "cog": {"original": "the original CogVideoX", "comfy": "ComfyUI's CogVideoX"}}
CASES = (("original", ""), ("original", "model.diffusion_model."), ("comfy", ""), ("comfy", "diffusion_model."),
         ("diffusers", "model.diffusion_model."))


@pytest.fixture(scope="module", params=("hunyuan", "cog"))
def family(request, tmp_path_factory):
    """name, folder of a mini, its transformer's tensors, its own latents."""
    folder = tmp_path_factory.mktemp(request.param) / "mini"
    if request.param == "hunyuan":
        make_hunyuan(folder)
    else:
        make_cogvideox(folder, rotary=True)
    weights = load_file(folder / "transformer/diffusion_pytorch_model.safetensors")
    found = types.SimpleNamespace(name=request.param, folder=folder, weights=weights)
    found.own = latents(found, "--save-embeds", folder.parent / "embeds", prompt="a red ball")
    return found


def latents(family, *words, prompt=None):
    out = family.folder.parent / "latents"
    given = ("--prompt", prompt) if prompt else ("--prompt-embeds", family.folder.parent / "embeds")
    said = esa("--model", family.folder, *given, *SIZE, "--method", "dense", "--threads", 1, "--device",
               "cpu", "--save-latents", out, "--out", family.folder.parent / "v.npy", *words)
    assert said.returncode == 0, said.stderr
    return load_file(out)["latents"]


def save(path, tensors, prefix=""):
    save_file({prefix + name: value.contiguous() for name, value in tensors.items()}, path)
    return path


@pytest.mark.parametrize("layout, prefix", CASES)
def test_the_same_bits(family, tmp_path, layout, prefix):
    tensors = LAYOUTS[family.name][layout](family.weights)
    file = save(tmp_path / "one.safetensors", tensors, prefix)
    assert torch.equal(latents(family, "--transformer", file), family.own)
    said = esa("--check", "--model", family.folder, "--transformer", file, "--prompt-embeds", "none")
    names = SAYS[family.name].get(layout, "diffusers") + (f" behind {prefix}" if prefix else "")
    assert said.returncode == 0 and f"names of {names}\n" in said.stdout, said.stdout + said.stderr
    assert f"transformer: {len(tensors)} tensors" in said.stdout


def test_other_tensors_of_the_authors_file(tmp_path, family):
    """Files of CogVideoX's authors also hold tables of positions, the text encoder and the VAE."""
    prefix, more = "model.diffusion_model.", {}
    if family.name == "cog":
        more = {prefix + "mixins.pos_embed.freqs_sin": torch.zeros(4, 8),
                prefix + "mixins.pos_embed.freqs_cos": torch.zeros(4, 8)}
    more |= {"conditioner.embedders.0.transformer.shared.weight": torch.zeros(2, 2),
             "first_stage_model.decoder.conv_in.conv.weight": torch.zeros(2)}
    tensors = {prefix + name: value for name, value in LAYOUTS[family.name]["original"](family.weights).items()}
    file = save(tmp_path / "one.safetensors", tensors | more)
    assert torch.equal(latents(family, "--transformer", file), family.own)
    file = save(tmp_path / "two.safetensors", tensors | more | {prefix + "mixins.other": torch.zeros(2)})
    said = esa("--check", "--model", family.folder, "--transformer", file, "--prompt-embeds", "none")
    assert said.returncode == 1 and f"1 not expected ({prefix}mixins.other)" in said.stderr


def fp8(tensors, scales):
    """E4M3 with scales, and the numbers that they stand for. scales: "one", "row", or "none"."""
    stored, plain = {}, {}
    for name, value in tensors.items():
        if value.ndim != 2 or "blocks." not in name and "layers." not in name:
            stored[name] = plain[name] = value
            continue
        scale = value.abs().amax(1, keepdim=scales == "row") if scales == "row" else value.abs().max()
        scale = torch.ones(()) if scales == "none" else scale / 448
        code = (value / scale).to(torch.float8_e4m3fn)
        stored[name], plain[name] = code, code.float() * scale
        if scales != "none":
            stored[name.removesuffix("weight") + ("scale_weight" if scales == "one" else "weight_scale")] = scale
    return stored, plain


@pytest.mark.parametrize("scales", ("one", "row", "none"))
def test_scaled_fp8(family, tmp_path, scales):
    """The scale of a tensor that is split follows its rows."""
    stored, plain = fp8(LAYOUTS[family.name]["original"](family.weights), scales)
    assert any(value.dtype == torch.float8_e4m3fn for value in stored.values())
    a = latents(family, "--transformer", save(tmp_path / "a.safetensors", stored), "--hold", "f32")
    b = latents(family, "--transformer", save(tmp_path / "b.safetensors", plain), "--hold", "f32")
    assert torch.equal(a, b) and not torch.equal(a, family.own)
    if scales != "row":
        return
    name = next(name for name in stored if name.endswith(".weight_scale"))
    stored[name] = stored[name][1:].clone()
    said = esa("--check", "--model", family.folder, "--transformer", save(tmp_path / "c.safetensors", stored),
               "--prompt-embeds", "none")
    assert said.returncode == 1 and "expected one number, or one for each row" in said.stderr, said.stderr


@pytest.fixture(scope="module")
def converter():
    spec = importlib.util.spec_from_file_location("convert_gguf", ROOT / "tools/convert_gguf.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("layout", ("original", "diffusers"))
def test_gguf(family, tmp_path, converter, layout):
    """Q8_0 in rows: the same numbers in f32 give the same latents, held as blocks or expanded."""
    tensors = {name: value.numpy() for name, value in LAYOUTS[family.name][layout](family.weights).items()}
    file = tmp_path / "one.gguf"
    converter.write(file, tensors, "Q8_0", "F32", {"hunyuan": "hyvid", "cog": "cogvideox"}[family.name])
    plain = {}
    for name, value in tensors.items():
        value = torch.from_numpy(value)
        if converter.type_for(name, value, "Q8_0", "F32") == "Q8_0":
            raw = torch.from_numpy(converter.q8_0(value.numpy()).copy())
            scale = raw[:, :2].contiguous().view(torch.float16).float()
            value = (raw[:, 2:].contiguous().view(torch.int8).float() * scale).reshape(value.shape)
        plain[name] = value
    want = latents(family, "--transformer", save(tmp_path / "plain.safetensors", plain))
    for hold in ("f32", "file"):
        assert torch.equal(latents(family, "--transformer", file, "--hold", hold), want)
    said = esa("--check", "--model", family.folder, "--transformer", file, "--prompt-embeds", "none")
    assert said.returncode == 0 and " Q8_0" in said.stdout, said.stderr


def test_diffusers_reads_the_same_layout(family):
    """Its converter of HunyuanVideo's files gives back the tensors of diffusers. It knows only the width 3072, which a
    copy of its code has replaced by the mini's. For CogVideoX diffusers has no such function."""
    if family.name != "hunyuan":
        return
    from diffusers.loaders import single_file_utils as utils

    def with_width(code, width):
        return code.replace(co_consts=tuple(
            width if value == 3072 else with_width(value, width) if isinstance(value, types.CodeType) else value
            for value in code.co_consts))

    theirs = utils.convert_hunyuan_video_transformer_to_diffusers
    width = family.weights["proj_out.weight"].shape[1]
    convert = types.FunctionType(with_width(theirs.__code__, width), vars(utils))
    back = convert(layouts.hunyuan(family.weights))
    assert back.keys() == family.weights.keys()
    assert all(torch.equal(back[name], value) for name, value in family.weights.items())


def test_files_that_do_not_fit(family, tmp_path):
    good = LAYOUTS[family.name]["original"](family.weights)
    fused = next(name for name in good if "qkv.weight" in name or "query_key_value.weight" in name)
    short = good | {fused: good[fused][1:]}
    lost = {name: value for name, value in good.items() if name != fused.replace("weight", "bias")}
    renamed = lost | {"other": good[fused.replace("weight", "bias")]}
    rows, cols = good[fused].shape
    for tensors, says in ((short, f"1 with the wrong shape ({fused} [{rows - 1},{cols}] instead of [{rows},{cols}])"),
                          (lost, f"1 missing ({fused.replace('weight', 'bias')})"),
                          (renamed, "1 not expected (other)")):
        file = save(tmp_path / "bad.safetensors", tensors)
        said = esa("--check", "--model", family.folder, "--transformer", file, "--prompt-embeds", "none")
        assert said.returncode == 1 and says in said.stderr and len(said.stderr.splitlines()) == 1, said.stderr
