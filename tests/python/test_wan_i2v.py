# SPDX-License-Identifier: Apache-2.0
"""Image to video in the engine. A mini of Wan 2.1 I2V (CLIP image encoder, 36 input channels, the VAE's encoder, image
cross-attention) gives the latents of diffusers' WanImageToVideoPipeline."""
import shutil

import pipelines
import pytest
import torch
from engine_minis import change_index, far, make_wan_i2v, random_transformer
from safetensors.torch import load_file, save_file
from test_single_files import esa

diffusers = pytest.importorskip("diffusers")
transformers = pytest.importorskip("transformers")
Image = pytest.importorskip("PIL.Image")
STEPS = 3
SIZE = ("--frames", 9, "--steps", STEPS, "--threads", 1, "--guidance", 2.5, "--method", "dense")
# Of the largest number: three steps in float32, guidance included.
CLOSE = 2.5e-5


@pytest.fixture(scope="module")
def mini(tmp_path_factory):
    folder = tmp_path_factory.mktemp("i2v") / "mini"
    make_wan_i2v(folder)
    return folder


def made(mini, name, *words, picture="picture.png"):
    out = mini.parent / f"{name}.safetensors"
    said = esa("--model", mini, *SIZE, "--image", mini.parent / picture, "--save-latents", out, "--save-embeds",
               mini.parent / "embeds.safetensors", "--json", mini.parent / "said.json", "--out",
               mini.parent / f"{name}.mp4", *pipelines.sigmas_of_version(), *words)
    assert said.returncode == 0, said.stderr
    return load_file(out)["latents"]


def theirs(mini, height, width):
    embeds = {name: value[None] for name, value in load_file(mini.parent / "embeds.safetensors").items()}
    pipe = diffusers.WanImageToVideoPipeline.from_pretrained(mini, torch_dtype=torch.float32, tokenizer=None,
                                                             text_encoder=None)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad():
        return pipe(Image.open(mini.parent / "picture.png").convert("RGB"), **embeds, num_frames=9, height=height,
                    width=width, num_inference_steps=STEPS, guidance_scale=2.5, output_type="latent",
                    generator=torch.Generator().manual_seed(0)).frames[0]


def test_diffusers_makes_the_same(mini):
    ours = made(mini, "ours", "--height", 96, "--width", 64)
    assert (mini.parent / "ours.mp4").stat().st_size > 500
    want = theirs(mini, 96, 64)
    assert ours.shape == want.shape
    print("distance", far(ours, want))
    assert far(ours, want) <= CLOSE, far(ours, want)
    Image.open(mini.parent / "picture.png").transpose(Image.Transpose.ROTATE_180).save(mini.parent / "turned.png")
    turned = made(mini, "turned", "--height", 96, "--width", 64, picture="turned.png")
    assert far(turned, want) > 1000 * CLOSE


def test_two_transformers(mini, tmp_path):
    """As Wan 2.2 I2V A14B: no image encoder, the image is in the input channels alone."""
    folder = tmp_path / "mini"
    shutil.copytree(mini, folder)
    shutil.copy(mini.parent / "picture.png", tmp_path)
    for seed, part in enumerate(("transformer", "transformer_2")):
        shutil.rmtree(folder / part, ignore_errors=True)
        random_transformer(seed, num_attention_heads=2, attention_head_dim=24, in_channels=36, out_channels=16,
                           text_dim=192, freq_dim=32, ffn_dim=64, num_layers=1,
                           cross_attn_norm=True).save_pretrained(folder / part)
    shutil.rmtree(folder / "image_encoder")
    change_index(folder, image_encoder=[None, None], image_processor=[None, None], boundary_ratio=0.95,
                 transformer_2=["diffusers", "WanTransformer3DModel"])
    ours = made(folder, "ours", "--height", 48, "--width", 32)
    assert far(ours, theirs(folder, 48, 32)) <= CLOSE


def test_size_from_the_picture(mini):
    """As in diffusers' example, with the area of the model's default (that of wan-t2v-1.3b for an unknown one)."""
    out = esa("--model", mini, *SIZE, "--image", mini.parent / "picture.png", "--height", 32, "--width", 32, "--out",
              mini.parent / "a.y4m")
    assert out.returncode == 0, out.stderr
    # a list of files is no picture, although the file it names is one
    leak = mini.parent / "leak.png"
    leak.write_text("ffconcat version 1.0\nfile picture.png\n")
    for words, says in ((("--image", "none.png"), "none.png"), (("--image", leak), "leak.png"), ((), "give one")):
        said = esa("--model", mini, *SIZE, *words)
        assert said.returncode == 1 and says in said.stderr, said.stderr
    said = esa("--image", mini.parent / "picture.png")
    assert said.returncode == 1 and "takes no image" in said.stderr


def test_check(mini):
    said = esa("--model", mini, "--check")
    assert said.returncode == 0 and "image_encoder: " in said.stdout, said.stderr
    path = mini / "image_encoder/model.safetensors"
    kept = path.read_bytes()
    weights = load_file(path)
    name = next(key for key in weights if key.endswith("layers.2.mlp.fc1.bias"))
    weights[name] = weights[name][:-1].clone()
    save_file(weights, path)
    said = esa("--model", mini, "--check")
    path.write_bytes(kept)
    assert said.returncode == 1 and "layers.2.mlp.fc1.bias [95] instead of [96]" in said.stderr
