# SPDX-License-Identifier: Apache-2.0
"""The native engine and diffusers make the same videos with CogVideoX: 2B-like (added positions, DPM, dynamic guidance)
and 5B-like (rotations, DDIM) minis; masks go both ways; sparse equals SDPA under the expanded mask; `--check` knows the
true names and shapes."""
import json
import pathlib
import shutil
import struct
import subprocess

import numpy
import pipelines
import pytest
import torch
from esa.core.mask import MaskFile
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


def _make(folder, rotary):
    """A mini as pipelines.make_cogvideox has it, with the tokenizer's own file, and 2B's ways if not rotary."""
    pipelines.make_cogvideox(folder)
    shutil.copy(pathlib.Path(pipelines.TINY) / "tokenizer" / "spiece.model", pathlib.Path(folder) / "tokenizer")
    if rotary:
        return folder
    from diffusers import CogVideoXDPMScheduler, CogVideoXTransformer3DModel
    torch.manual_seed(9)
    transformer = CogVideoXTransformer3DModel(num_attention_heads=2, attention_head_dim=32, in_channels=4,
                                              out_channels=4, time_embed_dim=8, text_embed_dim=32, num_layers=2,
                                              sample_width=24, sample_height=16, sample_frames=5,
                                              spatial_interpolation_scale=1.875)
    pipelines._spread(transformer, 2.0)
    transformer.save_pretrained(pathlib.Path(folder) / "transformer")
    scheduler = CogVideoXDPMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction",
                                      timestep_spacing="trailing", snr_shift_scale=1.0)
    scheduler.save_pretrained(pathlib.Path(folder) / "scheduler")
    index = pathlib.Path(folder) / "model_index.json"
    index.write_text(index.read_text().replace("CogVideoXDDIMScheduler", "CogVideoXDPMScheduler"))
    return folder


@pytest.fixture(scope="module")
def minis(tmp_path_factory):
    """name: folder, pipeline, whether guidance is dynamic."""
    from diffusers import CogVideoXPipeline
    root, found = tmp_path_factory.mktemp("cog"), {}
    for name, rotary in (("two", False), ("five", True)):
        folder = _make(str(root / name), rotary)
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


# ---------------------------------------------------------------- sparse

BLOCKS = ["--block", "64x64"]


class Masked:
    """SDPA under the expanded mask of the step, in place of a layer's processor."""

    def __init__(self, file, layer, step):
        self.file, self.layer, self.step = file, layer, step

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, image_rotary_emb=None):
        from diffusers.models.embeddings import apply_rotary_emb
        text = encoder_hidden_states.size(1)
        hidden = torch.cat([encoder_hidden_states, hidden_states], dim=1)
        q, k, v = (f(hidden).unflatten(2, (attn.heads, -1)).transpose(1, 2) for f in (attn.to_q, attn.to_k, attn.to_v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        for x in (q, k):
            x[:, :, text:] = apply_rotary_emb(x[:, :, text:].clone(), image_rotary_emb)
        mask = None
        if self.layer > 0 and self.step[0] > 0:     # the first layer and the first step are dense by default
            kept = torch.cat([torch.from_numpy(self.file.mask(self.layer, self.step[0], budget=0.5, branch=b).blocks())
                              for b in (1, 0)])     # the negative prompt comes first
            n = hidden.shape[1]
            mask = kept.repeat_interleave(64, 2).repeat_interleave(64, 3)[:, :, :n, :n]
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        out = attn.to_out[0](out.transpose(1, 2).flatten(2))
        return out[:, text:], out[:, :text]


def under_mask(pipe, file):
    """The latents of diffusers with SDPA under the masks of a file."""
    step, before = [0], dict(pipe.transformer.attn_processors)
    for i, block in enumerate(pipe.transformer.transformer_blocks):
        block.attn1.processor = Masked(file, i, step)

    def count(pipe, i, t, arguments):
        step[0] = i + 1
        return arguments

    out = theirs(pipe, False, callback_on_step_end=count)
    pipe.transformer.set_attn_processor(before)
    return out


def test_sparse(minis, tmp_path):
    import esa as package
    folder, pipe, dynamic = minis["five"]
    size = ours(folder, dynamic)[5:13]
    recorded = ["--num-prompts", 1, "--budgets", "0.5", *BLOCKS, "--output"]
    engine, python = tmp_path / "engine", tmp_path / "python"
    works("calibrate", "--model", folder, *recorded, engine, *size, "--order", "raster", "--threads", 1, "--device",
          "cpu")
    from esa.programs import calibrate, program
    assert program.run("calibrate", calibrate.main, ["--model", folder, *map(str, [*recorded, python, *size])]) == 0

    def latents(*more):
        works(*ours(folder, dynamic, *more, "--save-latents", tmp_path / "l", "--out", tmp_path / "v.npy"))
        return load_file(tmp_path / "l")["latents"]

    dense = latents("--method", "dense")
    assert off(latents("--method", "entropy", "--budget", 1, *BLOCKS), dense) < CLOSE
    for masks in (engine, python):
        file = MaskFile(masks)
        assert (file.info.layout.text_front_q, file.info.layout.text_back_q) == (226, 0)
        cached = ["--method", "cached", "--masks", masks, "--budget", "0.5", "--tail"]
        sparse = latents(*cached, "none")
        assert off(sparse, dense) > 100 * CLOSE
        if file.info.layout.order == 0:                         # raster
            assert off(sparse, under_mask(pipe, file)) < CLOSE
        handle = package.apply(pipe, package.EsaConfig(masks=str(masks), budget=0.5, tail="pooled"))
        assert off(latents(*cached, "pooled"), theirs(pipe, dynamic)) < CLOSE
        handle.remove()


def test_selectors(minis, tmp_path):
    """The engine chooses the blocks that the package chooses in diffusers, whose sparse calls test_apply_math.py holds
    against SDPA under the expanded mask. In diffusers both branches are one batch, whose entries have masks of their
    own; here they are two calls, which must not share masks either."""
    import esa as package
    folder, pipe, dynamic = minis["two"]
    dense = theirs(pipe, dynamic)
    for selector, order in (("entropy", "hilbert"), ("rf_v2", "tile"), ("ada_bsa", "raster"), ("error", "raster")):
        config = package.EsaConfig(selector=selector, block=(64, 64), order=order, tail="none", budget=0.4,
                                   share_branches=False)
        with package.apply(pipe, config):
            want = theirs(pipe, dynamic)
        works(*ours(folder, dynamic, "--method", selector, "--budget", 0.4, *BLOCKS, "--order", order, "--tail", "none",
                    "--share-branches", 0, "--save-latents", tmp_path / "l", "--out", tmp_path / "v.npy"))
        assert off(load_file(tmp_path / "l")["latents"], want) < CLOSE, selector
        assert off(want, dense) > 100 * CLOSE, "the masks must matter, or this test shows nothing"


# ---------------------------------------------------------------- true names and shapes

TRUE = {
    "cogvideox-2b": dict(num_attention_heads=30, num_layers=30),
    "cogvideox-5b": dict(num_attention_heads=48, num_layers=42, use_rotary_positional_embeddings=True),
}


def write_header(path, shapes):
    """A safetensors file of the right length without data: a hole."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(numpy.prod(shape))
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)


def write_part(folder, model, stem, shards):
    """The config, and shards with an index, as the hub has them."""
    folder.mkdir(parents=True)
    model.save_config(folder) if hasattr(model, "save_config") else model.config.save_pretrained(folder)
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items() if "embed_tokens" not in name}
    names, files = list(shapes), {}
    for i in range(shards):
        file = f"{stem}-{i + 1:05}-of-{shards:05}.safetensors" if shards > 1 else f"{stem}.safetensors"
        part = names[i * len(names) // shards: (i + 1) * len(names) // shards]
        write_header(folder / file, {name: shapes[name] for name in part})
        files |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return shapes


@pytest.mark.parametrize("name", list(TRUE))
def test_true_names_and_shapes(minis, tmp_path, name):
    from diffusers import AutoencoderKLCogVideoX, CogVideoXTransformer3DModel
    from transformers import T5Config, T5EncoderModel
    root = tmp_path / name
    shutil.copytree(minis["five"][0], root, ignore=shutil.ignore_patterns("transformer", "vae", "text_encoder"))
    with torch.device("meta"):
        transformer = CogVideoXTransformer3DModel(**TRUE[name])
        vae = AutoencoderKLCogVideoX(down_block_types=("CogVideoXDownBlock3D", ) * 4,
                                     up_block_types=("CogVideoXUpBlock3D", ) * 4)
        text = T5EncoderModel(T5Config(vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24,
                                       num_heads=64, feed_forward_proj="gated-gelu"))
    shapes = write_part(root / "transformer", transformer, "diffusion_pytorch_model", 2)
    write_part(root / "vae", vae, "diffusion_pytorch_model", 1)
    write_part(root / "text_encoder", text, "model", 2)
    said = works("generate", "--check", "--model", root)
    assert name in said, said
    file = root / "transformer" / "diffusion_pytorch_model.safetensors"
    (root / "transformer" / "diffusion_pytorch_model.safetensors.index.json").unlink()
    write_header(file, shapes)
    said = works("generate", "--check", file)               # the file alone
    assert f"CogVideoX, {name}: " in said, said
    victim = "transformer_blocks.7.attn1.norm_q.weight"
    other = {**shapes, victim: (32, )}
    renamed = {n.replace("7.attn1.norm_q", "7.attn1.q_norm"): s for n, s in shapes.items()}
    for wrong, words in (({n: s for n, s in shapes.items() if n != victim}, victim), (renamed, "q_norm"),
                         (other, "[32]")):
        write_header(file, wrong)
        refused = esa("generate", "--check", "--model", root)
        assert refused.returncode == 1 and words in refused.stderr + refused.stdout, refused.stderr
        refused = esa("generate", "--check", file)
        assert refused.returncode == 1 and words in refused.stderr + refused.stdout, refused.stderr
