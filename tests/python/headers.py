# SPDX-License-Identifier: Apache-2.0
"""Weight files of published models without their weights: true names, shapes, types and shards, made from the configs.
The numbers are a hole in the file, so that 57 GB take no disk space."""
import functools
import json
import math
import struct

import torch

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1}


def write(path, shapes, dtype="BF16"):
    """One safetensors file. shapes: name -> sides."""
    header, at = {}, 0
    for name, shape in shapes.items():
        size = BYTES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    return path


def shards(shapes, dtype, most):
    """The tensors in files of at most `most` bytes, as save_pretrained fills them."""
    parts, used = [{}], 0
    for name, shape in shapes.items():
        size = BYTES[dtype] * math.prod(shape)
        if parts[-1] and used + size > most:
            parts.append({})
            used = 0
        parts[-1][name] = shape
        used += size
    return parts


def write_part(folder, stem, shapes, dtype, most):
    """The files of a part as the hub has them; returns how many there are."""
    for old in folder.glob(f"{stem}*.safetensors*"):
        old.unlink()
    parts = shards(shapes, dtype, most)
    if len(parts) == 1:
        write(folder / f"{stem}.safetensors", shapes, dtype)
        return 1
    places = {}
    for i, part in enumerate(parts):
        file = f"{stem}-{i + 1:05}-of-{len(parts):05}.safetensors"
        write(folder / file, part, dtype)
        places |= dict.fromkeys(part, file)
    (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return len(parts)


# ---------------------------------------------------------------- the published models

def _transformer(name):
    import diffusers
    wan = dict(attention_head_dim=128, out_channels=16, text_dim=4096, cross_attn_norm=True,
               qk_norm="rms_norm_across_heads")
    large = dict(wan, num_attention_heads=40, num_layers=40, ffn_dim=13824)
    return {
        "wan-t2v-1.3b": lambda: diffusers.WanTransformer3DModel(num_attention_heads=12, num_layers=30, ffn_dim=8960,
                                                                **wan),
        "wan-t2v-14b": lambda: diffusers.WanTransformer3DModel(**large),
        "wan-i2v-14b": lambda: diffusers.WanTransformer3DModel(in_channels=36, image_dim=1280, added_kv_proj_dim=5120,
                                                               **large),
        "cogvideox-2b": lambda: diffusers.CogVideoXTransformer3DModel(num_attention_heads=30, num_layers=30),
        "cogvideox-5b": lambda: diffusers.CogVideoXTransformer3DModel(num_attention_heads=48, num_layers=42,
                                                                      use_rotary_positional_embeddings=True),
        "hunyuan-video": lambda: diffusers.HunyuanVideoTransformer3DModel(),
    }[name]()


def _other(name):
    import diffusers
    import transformers
    xxl = dict(d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu")
    return {
        "wan vae": lambda: diffusers.AutoencoderKLWan(),
        "umt5": lambda: transformers.UMT5EncoderModel(transformers.UMT5Config(vocab_size=256384, **xxl)),
        "clip vision": lambda: transformers.CLIPVisionModel(
            transformers.CLIPVisionConfig(hidden_size=1280, num_attention_heads=16, num_hidden_layers=32,
                                          intermediate_size=5120, image_size=224, patch_size=14, hidden_act="gelu")),
        "cog vae": lambda: diffusers.AutoencoderKLCogVideoX(down_block_types=("CogVideoXDownBlock3D", ) * 4,
                                                            up_block_types=("CogVideoXUpBlock3D", ) * 4),
        "t5": lambda: transformers.T5EncoderModel(transformers.T5Config(vocab_size=32128, **xxl)),
        "hunyuan vae": lambda: diffusers.AutoencoderKLHunyuanVideo(),
        "llama": lambda: transformers.LlamaModel(
            transformers.LlamaConfig(vocab_size=128320, hidden_size=4096, intermediate_size=14336,
                                     num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
                                     rope_theta=500000.0, rms_norm_eps=1e-5)),
        "clip text": lambda: transformers.CLIPTextModel(
            transformers.CLIPTextConfig(vocab_size=49408, hidden_size=768, intermediate_size=3072,
                                        num_hidden_layers=12, num_attention_heads=12, max_position_embeddings=77,
                                        eos_token_id=2)),
    }[name]()


@functools.cache
def module(name):
    """A part of a published model without numbers: "wan-t2v-14b" is its transformer, "t5" a text encoder."""
    with torch.device("meta"):
        return _other(name) if " " in name or name in ("umt5", "t5", "llama") else _transformer(name)


@functools.cache
def shapes(name):
    """Names and sides as the hub has them: transformers 5 drops a prefix of CLIP, and words are stored once."""
    found = {key: tuple(value.shape) for key, value in module(name).state_dict().items() if "t5" not in name or
             "embed_tokens" not in key}
    prefix = {"clip text": "text_model.", "clip vision": "vision_model."}.get(name, "")
    return {key if key.startswith(prefix) else prefix + key: shape for key, shape in found.items()}


GB = 10**9
_DIT, _LM = "diffusion_pytorch_model", "model"
_WAN_VAE, _UMT5 = ("vae", "wan vae", _DIT, "F32", 5 * GB, 1), ("text_encoder", "umt5", _LM, "BF16", 5 * GB, 3)
# model: its parts as (folder, module, stem, type, bytes of a shard, shards)
PARTS = {
    "wan-t2v-1.3b": (("transformer", "wan-t2v-1.3b", _DIT, "F32", 5 * GB, 2), _WAN_VAE,
                     ("text_encoder", "umt5", _LM, "F32", 5 * GB, 5)),
    "wan-t2v-14b": (("transformer", "wan-t2v-14b", _DIT, "F32", 5 * GB, 12), _WAN_VAE, _UMT5),
    "wan-i2v-14b": (("transformer", "wan-i2v-14b", _DIT, "F32", 5 * GB, 14), _WAN_VAE, _UMT5,
                    ("image_encoder", "clip vision", _LM, "F32", 5 * GB, 1)),
    "wan2.2-t2v-a14b": (("transformer", "wan-t2v-14b", _DIT, "F32", 5 * GB, 12),
                        ("transformer_2", "wan-t2v-14b", _DIT, "F32", 5 * GB, 12), _WAN_VAE, _UMT5),
    "cogvideox-2b": (("transformer", "cogvideox-2b", _DIT, "F16", 10 * GB, 1), ("vae", "cog vae", _DIT, "F16", 10 * GB,
                                                                               1),
                     ("text_encoder", "t5", _LM, "F16", 5 * GB, 2)),
    "cogvideox-5b": (("transformer", "cogvideox-5b", _DIT, "BF16", 10 * GB, 2), ("vae", "cog vae", _DIT, "BF16",
                                                                                10 * GB, 1),
                     ("text_encoder", "t5", _LM, "BF16", 5 * GB, 2)),
    "hunyuan-video": (("transformer", "hunyuan-video", _DIT, "BF16", 5 * GB, 6), ("vae", "hunyuan vae", _DIT, "F16",
                                                                                 5 * GB, 1),
                      ("text_encoder", "llama", _LM, "F16", 5 * GB, 4),
                      ("text_encoder_2", "clip text", _LM, "F16", 5 * GB, 1)),
}


def write_config(folder, name):
    folder.mkdir(parents=True, exist_ok=True)
    part = module(name)
    part.save_config(folder) if hasattr(part, "save_config") else part.config.save_pretrained(folder)
