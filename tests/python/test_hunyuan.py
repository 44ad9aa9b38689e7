# SPDX-License-Identifier: Apache-2.0
"""HunyuanVideo in the engine beside diffusers: from prompt to pixels, saved embeddings, and a folder with the
names, shapes and shards of the published model. test_engine_masks.py has sparse attention and mask files."""
import json
import os
import struct
import subprocess

import numpy
import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo, HunyuanVideoTransformer3DModel
from engine_minis import make_hunyuan
from esa.programs.native import find_command
from safetensors.torch import load_file
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

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


# ---------------------------------------------------------------- the published model

def published():
    """The parts of the published model without weights, by folder; and the stem of their files."""
    with torch.device("meta"):
        parts = {
            "transformer": HunyuanVideoTransformer3DModel(), "vae": AutoencoderKLHunyuanVideo(),
            "text_encoder": LlamaModel(
                LlamaConfig(vocab_size=128320, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                            num_attention_heads=32, num_key_value_heads=8, rope_theta=500000.0, rms_norm_eps=1e-5)),
            "text_encoder_2": CLIPTextModel(
                CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12,
                               num_attention_heads=12, max_position_embeddings=77, eos_token_id=2)),
        }
    shapes = {part: {name: tuple(value.shape) for name, value in module.state_dict().items()}
              for part, module in parts.items()}
    if not any(name.startswith("text_model.") for name in shapes["text_encoder_2"]):    # as the hub has them
        shapes["text_encoder_2"] = {"text_model." + name: shape for name, shape in shapes["text_encoder_2"].items()}
    return parts, shapes


def write_part(folder, stem, shapes, shards):
    """Safetensors files of the right names, shapes and length, whose numbers are holes."""
    names = sorted(shapes)
    places = {}
    for number in range(shards):
        mine = names[number * len(names) // shards:(number + 1) * len(names) // shards]
        file = f"{stem}.safetensors" if shards == 1 else f"{stem}-{number + 1:05d}-of-{shards:05d}.safetensors"
        header, at = {}, 0
        for name in mine:
            size = 2 * int(numpy.prod(shapes[name]))
            header[name] = {"dtype": "BF16", "shape": list(shapes[name]), "data_offsets": [at, at + size]}
            at += size
            places[name] = file
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
        os.truncate(folder / file, 8 + len(text) + at)
    if shards > 1:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


STEMS = {"transformer": ("diffusion_pytorch_model", 6), "vae": ("diffusion_pytorch_model", 1),
         "text_encoder": ("model", 4), "text_encoder_2": ("model", 1)}


@pytest.fixture(scope="module")
def hub(model, tmp_path_factory):
    """A folder like the hub's, with holes for weights."""
    folder = tmp_path_factory.mktemp("hub") / "HunyuanVideo"
    parts, shapes = published()
    for part, (stem, shards) in STEMS.items():
        (folder / part).mkdir(parents=True)
        if hasattr(parts[part], "save_config"):
            parts[part].save_config(folder / part)
        else:
            parts[part].config.save_pretrained(folder / part)
        write_part(folder / part, stem, shapes[part], shards)
    for name in ("scheduler", "tokenizer", "tokenizer_2", "model_index.json"):
        (folder / name).symlink_to(model[1] / name)
    return folder, shapes


def test_published_names_and_shapes(hub):
    folder, shapes = hub
    out = works("generate", "--check", "--model", folder)
    assert f"transformer: {len(shapes['transformer'])} tensors, 12821012544 parameters" in out
    assert "every name and shape" in out


@pytest.mark.parametrize("part, name", (
    ("transformer", "single_transformer_blocks.39.proj_mlp.weight"),
    ("vae", "decoder.up_blocks.2.upsamplers.0.conv.conv.bias"),
    ("text_encoder", "layers.31.mlp.up_proj.weight"), ("text_encoder_2", "text_model.encoder.layers.3.mlp.fc1.bias")))
def test_changed_folders_are_refused(hub, part, name):
    folder, shapes = hub
    stem, shards = STEMS[part]
    right = shapes[part]
    assert name in right
    without = {key: shape for key, shape in right.items() if key != name}
    larger = (right[name][0] + 1, *right[name][1:])
    renamed = without | {name + "s": right[name]}
    for wrong, says in ((without, name), (renamed, name + "s"), (right | {name: larger}, name)):
        write_part(folder / part, stem, wrong, shards)
        status, out, error = esa("generate", "--check", "--model", folder)
        assert status == 1 and says in out + error
    write_part(folder / part, stem, right, shards)
