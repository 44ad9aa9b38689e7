# SPDX-License-Identifier: Apache-2.0
"""Outputs of the parts of diffusers' HunyuanVideoPipeline for the C tests: both text encoders, the transformer (whole,
and after every block), the VAE's decoder, the scheduler.

    python tools/golden/hunyuan.py --out tests/golden

Writes hunyuan.safetensors and hunyuan_shapes.txt. Weights and inputs come from fill.py; the first file holds every n-th
element of each output and the largest magnitude of all, the second the names and shapes of the weights, one line each:
case, name, dimensions. --every 1 keeps everything (the live test does). Everything is computed in f64, and how far
torch's own f32 is from it is kept as NAME.f32, relative to the scale. NAME.bf16 is how far torch's bf16 is: the root
mean square of the difference over that of the output."""
import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

import diffusers
import fill
from diffusers import AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, HunyuanVideoTransformer3DModel

# tests/model/hunyuan_cases.h has the same tables.
# name: model, latents (c, t, h, w), text rows, of them valid, timestep, guidance
DIT = {
    "dit.tiny": (dict(in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
                      num_single_layers=1, num_refiner_layers=1, patch_size=1, text_embed_dim=16,
                      pooled_projection_dim=8, rope_axes_dim=(2, 4, 4)), (4, 1, 6, 8), 12, 12, 417.25, 6.0),
    "dit.mini": (dict(num_attention_heads=2, attention_head_dim=128, num_layers=2, num_single_layers=2,
                      text_embed_dim=48, pooled_projection_dim=24), (16, 5, 16, 22), 64, 40, 999.0, 6.0),
    "dit.plain": (dict(in_channels=3, out_channels=5, num_attention_heads=3, attention_head_dim=20, num_layers=1,
                       num_single_layers=2, mlp_ratio=2.0, patch_size_t=2, guidance_embeds=False, text_embed_dim=10,
                       pooled_projection_dim=6, rope_axes_dim=(4, 8, 8), rope_theta=100.0), (3, 4, 6, 10), 9, 1, 57.5,
                  1.0),
}
# name: model, tokens that are there, tokens with padding
TEXT = {
    "llama.mini": (LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=4,
                               num_attention_heads=4, num_key_value_heads=2, rope_theta=500000.0), 9, 12),
    "llama.wide": (LlamaConfig(vocab_size=64, hidden_size=48, intermediate_size=64, num_hidden_layers=3,
                               num_attention_heads=6, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5), 150, 150),
    "clip.mini": (CLIPTextConfig(vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=3,
                                 num_attention_heads=4, max_position_embeddings=20, eos_token_id=98), 9, 20),
}
# name: model, latents (t, h, w), pixels of a tile (0: none)
VAE = dict(latent_channels=4, block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4)
THREE = dict(latent_channels=5, block_out_channels=(6, 12, 18), layers_per_block=2, norm_num_groups=3,
             spatial_compression_ratio=4, scaling_factor=0.7, mid_block_add_attention=True)
DECODE = {
    "vae.one": (VAE, (1, 3, 4), 0), "vae.short": (VAE, (3, 4, 3), 0), "vae.long": (VAE, (9, 3, 3), 0),
    "vae.tiles": (VAE, (6, 9, 7), 32), "vae.three": (THREE, (4, 5, 6), 0), "vae.late": (THREE, (7, 6, 11), 16),
}

TYPES = torch.float64, torch.float32, torch.bfloat16         # in this order: the last one rounds the weights


class Results:
    def __init__(self, every):
        self.every, self.tensors, self.shapes = every, {}, []

    def add(self, name, exact, single, half=None):
        """exact: computed in f64, single: in f32, half: in bf16."""
        flat = exact.double().reshape(-1)
        scale = flat.abs().max()
        self.tensors[name] = flat[:: self.every].float().contiguous()
        self.tensors[name + ".scale"] = scale.float().reshape(1)
        self.tensors[name + ".f32"] = ((single.double().reshape(-1) - flat).abs().max() / scale).float().reshape(1)
        if half is not None:
            far = (half.double().reshape(-1) - flat).square().mean() / flat.square().mean()
            self.tensors[name + ".bf16"] = far.sqrt().float().reshape(1)
        own = float(self.tensors[name + ".f32"])
        print(f"{name:24s} {tuple(exact.shape)}, largest {scale:.3f}, torch's f32 off by {own:.2g}")

    def fill(self, key, module, prefixes=("", )):
        """Fills the module; the shapes of its parameters that begin with one of the prefixes are noted under key."""
        fill.fill_module(module)
        for name, parameter in module.named_parameters():
            line = " ".join([key, name, *map(str, parameter.shape)])
            if name.startswith(prefixes) and line not in self.shapes:
                self.shapes.append(line)
        return module.eval()


def run_dit(model, case, dtype):
    config, latent, rows, valid, t, guidance = DIT[case]
    x = fill.tensor(case + ".latents", (1,) + latent, 2.0).to(dtype)
    text = fill.tensor(case + ".text", (1, rows, model.config.text_embed_dim)).to(dtype)
    pooled = fill.tensor(case + ".pooled", (1, model.config.pooled_projection_dim)).to(dtype)
    mask = (torch.arange(rows) < valid).to(dtype)[None]
    out = {}

    def keep(number, video, words):
        out[f"block.{number}"] = torch.cat([video[0], words[0, :valid]]).clone()

    blocks = [*model.transformer_blocks, *model.single_transformer_blocks]
    hooks = [block.register_forward_hook(lambda m, a, o, i=i: keep(i, *o)) for i, block in enumerate(blocks)]
    hooks.append(blocks[0].register_forward_pre_hook(lambda m, a: keep(-1, a[0], a[1])))
    with torch.no_grad():
        scale = torch.tensor([guidance], dtype=torch.float32) * 1000.0
        out["output"] = model.to(dtype)(x, torch.tensor([t], dtype=torch.float32), text, mask, pooled, guidance=scale,
                                        return_dict=False)[0][0]
    for hook in hooks:
        hook.remove()
    return out


def dits(results):
    for case, (config, *_) in DIT.items():
        model = results.fill(case, HunyuanVideoTransformer3DModel(**config))
        runs = [run_dit(model, case, dtype) for dtype in TYPES]
        for name in runs[0]:
            results.add(f"{case}.{name}", *(run[name] for run in runs))


def run_text(model, ids, padded, dtype, clip):
    x = torch.full((1, padded), int(ids[-1]) if clip else 0)
    x[0, : len(ids)] = ids
    mask = None if clip else (torch.arange(padded) < len(ids)).long()[None]
    with torch.no_grad():
        out = model.to(dtype)(x, attention_mask=mask, output_hidden_states=True)
    return out.pooler_output[0] if clip else out.hidden_states[-3][0, : len(ids)]


def texts(results):
    for case, (config, count, padded) in TEXT.items():
        clip = case.startswith("clip")
        config._attn_implementation = "eager"
        model = results.fill(case, (CLIPTextModel if clip else LlamaModel)(config))
        unit = fill.unit(case + ".ids", count).astype(np.float64)
        ids = torch.from_numpy(((unit + 1) / 2 * (config.vocab_size - 1)).astype(np.int64))
        if clip:
            ids[-1] = config.eos_token_id
        results.add(case, *(run_text(model, ids, padded, dtype, clip) for dtype in TYPES))


def run_vae(vae, latents, tile, dtype):
    if tile:
        vae.enable_tiling(tile, tile, 16, tile * 3 // 4, tile * 3 // 4, 12)
    with torch.no_grad():
        video = vae.to(dtype).decode(latents.to(dtype) / vae.config.scaling_factor, return_dict=False)[0][0]
    return video.permute(1, 2, 3, 0).clamp(-1, 1).contiguous()


def vaes(results):
    for case, (config, latent, tile) in DECODE.items():
        vae = AutoencoderKLHunyuanVideo(
            down_block_types=("HunyuanVideoDownBlock3D",) * len(config["block_out_channels"]),
            up_block_types=("HunyuanVideoUpBlock3D",) * len(config["block_out_channels"]), **config)
        key = f"vae{len(config['block_out_channels'])}"
        results.fill(key, vae, ("decoder.", "post_quant_conv.", "encoder.conv_in"))
        with torch.no_grad():       # pixels in the middle of their range, so that little is clamped
            vae.decoder.conv_out.conv.weight.mul_(0.25)
        latents = fill.tensor(case + ".latents", (1, vae.config.latent_channels) + latent, 2.0)
        results.add(case, *(run_vae(vae, latents, tile, dtype) for dtype in TYPES))


def schedules(results):
    for steps in (1, 5, 50):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=7.0)
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 0.0, steps + 1)[:-1])
        scheduler.set_begin_index(0)
        x = fill.tensor("sched.x", (100,), 2.0)
        for i, t in enumerate(scheduler.timesteps):
            x = scheduler.step(fill.tensor(f"sched.v.{i}", (100,), 1.0), t, x, return_dict=False)[0]
        results.tensors[f"sched.{steps}.timesteps"] = scheduler.timesteps.float().contiguous()
        results.tensors[f"sched.{steps}.sigmas"] = scheduler.sigmas.float().contiguous()
        results.tensors[f"sched.{steps}.x"] = x.float().contiguous()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=23)
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = Results(args.every)
    for make in (dits, texts, vaes, schedules):
        make(results)
    save_file(results.tensors, Path(args.out) / "hunyuan.safetensors",
              metadata={"every": str(args.every), "diffusers": diffusers.__version__, "torch": torch.__version__})
    (Path(args.out) / "hunyuan_shapes.txt").write_text("\n".join(results.shapes) + "\n")


if __name__ == "__main__":
    main()
