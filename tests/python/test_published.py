# SPDX-License-Identifier: Apache-2.0
"""Every published model by its names, shapes and shards (headers.py makes them from the configs): `esa generate
--check` passes on the folder and on the transformer alone, in every layout, and refuses each part with one tensor
missing, renamed or reshaped."""
import json
import shutil

import headers
import layouts
import pytest
import torch
from test_single_files import ROOT, TINY, esa, original

WORDS = ROOT / "tests/golden/bpe"
# class of the pipeline, class of the scheduler and its settings
PIPELINES = {
    "wan": ("WanPipeline", "UniPCMultistepScheduler", dict(prediction_type="flow_prediction", use_flow_sigmas=True,
                                                           flow_shift=3.0)),
    "cog": ("CogVideoXPipeline", "CogVideoXDDIMScheduler", dict(prediction_type="v_prediction",
                                                                rescale_betas_zero_snr=True,
                                                                timestep_spacing="trailing")),
    "hunyuan": ("HunyuanVideoPipeline", "FlowMatchEulerDiscreteScheduler", dict(shift=7.0)),
}
PARAMETERS = {"wan-t2v-1.3b": 1418996800, "wan-t2v-14b": 14288491584, "wan2.2-t2v-a14b": 14288491584,
              "hunyuan-video": 12821012544}
# A tensor of each module whose loss is looked at.
VICTIMS = {"wan-t2v-1.3b": "blocks.29.ffn.net.2.bias", "wan-t2v-14b": "blocks.39.attn2.norm_k.weight",
           "wan-i2v-14b": "blocks.39.attn2.add_k_proj.bias", "wan vae": "decoder.up_blocks.1.resnets.0.conv1.weight",
           "umt5": "encoder.block.23.layer.0.SelfAttention.relative_attention_bias.weight",
           "clip vision": "vision_model.encoder.layers.30.mlp.fc1.weight",
           "cogvideox-2b": "transformer_blocks.29.norm2.linear.bias", "cogvideox-5b": "norm_out.linear.weight",
           "cog vae": "decoder.up_blocks.2.resnets.0.norm1.conv_y.conv.weight",
           "t5": "encoder.block.7.layer.1.DenseReluDense.wi_1.weight",
           "hunyuan-video": "single_transformer_blocks.39.proj_mlp.weight",
           "hunyuan vae": "decoder.up_blocks.2.upsamplers.0.conv.conv.bias", "llama": "layers.31.mlp.up_proj.weight",
           "clip text": "text_model.encoder.layers.3.mlp.fc1.bias"}


def family(model):
    return {"wan": "wan", "cog": "cog", "hun": "hunyuan"}[model[:3]]


def make_folder(folder, model):
    import diffusers
    kind = family(model)
    name, scheduler, settings = PIPELINES[kind]
    index = {"_class_name": "WanImageToVideoPipeline" if "i2v" in model else name,
             "scheduler": ["diffusers", scheduler]}
    getattr(diffusers, scheduler)(**settings).save_pretrained(folder / "scheduler")
    if kind == "hunyuan":
        for number, words in (("", "llama"), ("_2", "clip")):
            shutil.copytree(WORDS / words, folder / f"tokenizer{number}")
    else:
        shutil.copytree(TINY / "tokenizer", folder / "tokenizer")
    for part, module, *_ in headers.PARTS[model]:
        headers.write_config(folder / part, module)
        library = type(headers.module(module)).__module__.split(".")[0]
        index[part] = [library, type(headers.module(module)).__name__]
    for part in ("tokenizer", "tokenizer_2"):
        if (folder / part).exists():
            index[part] = ["transformers", "AutoTokenizer"]
    if "i2v" in model:
        index["image_processor"] = ["transformers", "CLIPImageProcessor"]
        (folder / "image_processor").mkdir()
        (folder / "image_processor/preprocessor_config.json").write_text(json.dumps(
            {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 224},
             "crop_size": {"height": 224, "width": 224}}))
    if "a14b" in model:
        index["boundary_ratio"] = 0.875
    (folder / "model_index.json").write_text(json.dumps(index))


def changes(right, name):
    """(shapes, what must be said) of a part with one tensor missing, renamed, reshaped."""
    without = {key: shape for key, shape in right.items() if key != name}
    larger = (right[name][0] + 1, *right[name][1:])
    sides = ",".join(map(str, larger))
    assert name in right
    yield without, f"1 missing ({name})"
    yield without | {name + "s": right[name]}, f"not expected ({name}s)"
    yield right | {name: larger}, f"1 with the wrong shape ({name} [{sides}] instead of"


@pytest.mark.parametrize("model", headers.PARTS)
def test_folders(tmp_path, model):
    folder = tmp_path / model
    make_folder(folder, model)
    for part, module, stem, dtype, most, shards in headers.PARTS[model]:
        assert headers.write_part(folder / part, stem, headers.shapes(module), dtype, most) == shards
    said = esa("--check", "--model", folder)
    assert said.returncode == 0 and "every name and shape" in said.stdout, said.stdout + said.stderr
    assert model in said.stdout
    lines = {line.split(":")[0].replace("text ", "text_"): line for line in said.stdout.splitlines()}
    for part, module, _, _, _, shards in headers.PARTS[model]:
        assert lines[part].endswith(f" in {shards} file" + "s" * (shards > 1)), said.stdout
        if part.startswith("transformer"):
            parameters = PARAMETERS.get(model, sum(torch.Size(s).numel() for s in headers.shapes(module).values()))
            assert f"{part}: {len(headers.shapes(module))} tensors, {parameters} parameters" in said.stdout
    for part, module, stem, dtype, most, _ in headers.PARTS[model]:
        right = headers.shapes(module)
        for wrong, says in changes(right, VICTIMS[module]):
            headers.write_part(folder / part, stem, wrong, dtype, most)
            said = esa("--check", "--model", folder)
            assert said.returncode == 1 and says in said.stderr, said.stderr
            assert f"generate: {part}: " in said.stderr.replace("text ", "text_")
            assert len(said.stderr.splitlines()) == 1
        headers.write_part(folder / part, stem, right, dtype, most)
    assert esa("--check", "--model", folder).returncode == 0


# ---------------------------------------------------------------- the transformer alone

NAMES = {"cogvideox-2b": "CogVideoX, cogvideox-2b: 30 layers of width 1920, 16 channels",
         "cogvideox-5b": "CogVideoX, cogvideox-5b: 42 layers of width 3072, 16 channels",
         "hunyuan-video": "HunyuanVideo, hunyuan-video: 20 double and 40 single blocks of width 3072, feed-forward "
                          "12288, 16 channels",
         "wan-t2v-1.3b": "Wan, wan-t2v-1.3b: 30 layers of width 1536, feed-forward 8960, 16 channels",
         "wan-t2v-14b": "Wan, wan-t2v-14b or one half of wan2.2-t2v-a14b: 40 layers of width 5120, feed-forward 13824, "
                        "16 channels",
         "wan-i2v-14b": "Wan, wan-i2v-14b: 40 layers of width 5120, feed-forward 13824, 36 channels"}


def wan_original(state):
    """As in test_single_files.py, and the names of the image."""
    found = {}
    for name, value in state.items():
        name = original(name)
        for ours, theirs in (("cross_attn.add_k_proj", "cross_attn.k_img"), ("cross_attn.add_v_proj",
                                                                            "cross_attn.v_img"),
                             ("cross_attn.norm_added_k", "cross_attn.norm_k_img"),
                             ("condition_embedder.image_embedder.norm1", "img_emb.proj.0"),
                             ("condition_embedder.image_embedder.ff.net.0.proj", "img_emb.proj.1"),
                             ("condition_embedder.image_embedder.ff.net.2", "img_emb.proj.3"),
                             ("condition_embedder.image_embedder.norm2", "img_emb.proj.4"),
                             ("condition_embedder.image_embedder.norm3", "img_emb.proj.4")):
            name = name.replace(ours, theirs)
        found[name] = value
    return found


LAYOUTS = {"wan": {"original": wan_original, "diffusers": dict},
           "cog": {"original": layouts.cog, "comfy": layouts.cog_comfy, "diffusers": dict},
           "hunyuan": {"original": layouts.hunyuan, "comfy": layouts.hunyuan_comfy, "diffusers": dict}}


@pytest.mark.parametrize("model, layout", [(model, layout) for model in NAMES for layout in LAYOUTS[family(model)]])
def test_single_files(tmp_path, model, layout):
    state = LAYOUTS[family(model)][layout](headers.module(model).state_dict())
    right = {name: tuple(value.shape) for name, value in state.items()}
    for prefix in ("", "model.diffusion_model."):
        file = headers.write(tmp_path / "one.safetensors", {prefix + key: shape for key, shape in right.items()})
        said = esa("--check", file)
        assert said.returncode == 0, said.stderr
        assert f"family: {NAMES[model]}\n" in said.stdout, said.stdout
        assert f"transformer: {len(right)} tensors, " in said.stdout
        assert "every name and shape is right; --transformer takes this file" in said.stdout
    names = sorted(right)
    for name in (names[len(names) // 3], names[-1]):
        for wrong, says in changes(right, name):
            said = esa("--check", headers.write(tmp_path / "two.safetensors", wrong))
            assert said.returncode == 1 and says in said.stderr, said.stderr
            assert len(said.stderr.splitlines()) == 1


def test_models_that_the_engine_does_not_run(tmp_path):
    import diffusers
    with torch.device("meta"):
        known = {
            "Wan, Wan 2.2 TI2V 5B: ": diffusers.WanTransformer3DModel(
                num_attention_heads=24, attention_head_dim=128, num_layers=30, ffn_dim=14336, in_channels=48,
                out_channels=48, text_dim=4096, cross_attn_norm=True),
            "CogVideoX, version 1.5: ": diffusers.CogVideoXTransformer3DModel(
                num_attention_heads=48, num_layers=42, patch_size_t=2, patch_bias=False,
                use_rotary_positional_embeddings=True),
            "HunyuanVideo, for images: ": diffusers.HunyuanVideoTransformer3DModel(in_channels=33, out_channels=16),
        }
    for says, model in known.items():
        shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
        said = esa("--check", headers.write(tmp_path / "one.safetensors", shapes))
        assert said.returncode == 1 and "does not run this model: family: " + says in said.stderr, said.stderr
    # Flux has double blocks too.
    flux = {"double_blocks.0.img_attn.qkv.weight": (9216, 3072), "txt_in.weight": (3072, 4096)}
    said = esa("--check", headers.write(tmp_path / "two.safetensors", flux))
    assert said.returncode == 1 and "is no model that the engine knows, expected a transformer of Wan, CogVideoX or " \
                                    "HunyuanVideo" in said.stderr, said.stderr


@pytest.mark.parametrize("model", ("wan-t2v-1.3b", "cogvideox-2b", "hunyuan-video"))
def test_sides_of_zero(tmp_path, model):
    """A header may have sides of 0. Such a file is refused with the names, whatever is computed from its sides."""
    right = headers.shapes(model)
    for side in range(5):
        wrong = {name: (*shape[:side], 0, *shape[side + 1:]) if side < len(shape) else shape
                 for name, shape in right.items()}
        said = esa("--check", headers.write(tmp_path / "zero.safetensors", wrong))
        if wrong != right:
            assert said.returncode == 1 and len(said.stderr.splitlines()) == 1, said.stderr
            assert "with the wrong shape (" in said.stderr and " instead of [" in said.stderr, said.stderr
