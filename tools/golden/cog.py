# SPDX-License-Identifier: Apache-2.0
"""Outputs of diffusers' CogVideoX parts for the C tests: the transformer (whole, and after every block), the frames
that the VAE decodes, and every step of the two schedulers.

    python tools/golden/cog.py --out tests/golden/cog.safetensors
    python tools/golden/cog.py --bf16 --out tests/golden/cog_bf16.safetensors

Weights and inputs come from fill.py; the file holds every n-th element of each output and the largest magnitude of all.
--every 1 keeps everything (the live test does). With --bf16 the file holds how far bf16 is from f32: the root mean
square of the difference over that of f32, for the input of block 0, the output of each block and that of the model; and
the root mean square of the difference for frames."""
import argparse

import torch
from safetensors.torch import save_file

import diffusers
import fill
from diffusers import (
    AutoencoderKLCogVideoX,
    CogVideoXDDIMScheduler,
    CogVideoXDPMScheduler,
    CogVideoXTransformer3DModel,
)
from diffusers.models.embeddings import get_3d_rotary_pos_embed
from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

# name: model, latents (c, t, h, w), rows of text, timestep. tests/model/cog_cases.h has the same tables.
MODELS = {
    "two": (dict(num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, time_embed_dim=8,
                 text_embed_dim=12, num_layers=2, sample_width=18, sample_height=12, sample_frames=9,
                 max_text_seq_length=10), (4, 3, 12, 10), 10, 417),
    "five": (dict(num_attention_heads=2, attention_head_dim=64, in_channels=16, out_channels=16, time_embed_dim=32,
                  text_embed_dim=24, num_layers=3, sample_width=18, sample_height=12, sample_frames=49,
                  max_text_seq_length=26, use_rotary_positional_embeddings=True), (16, 5, 24, 28), 26, 999),
    "bare": (dict(num_attention_heads=3, attention_head_dim=32, in_channels=3, out_channels=5, time_embed_dim=6,
                  text_embed_dim=10, num_layers=1, sample_width=9, sample_height=15, sample_frames=9, patch_size=1,
                  max_text_seq_length=7, use_rotary_positional_embeddings=True, attention_bias=False,
                  patch_bias=False, norm_eps=1e-3), (3, 4, 5, 6), 7, 1),
}
# name: config, latents (t, h, w), pixels of a tile (0: none)
FOUR = dict(block_out_channels=(8, 16, 16, 24), latent_channels=6, layers_per_block=1, norm_num_groups=4,
            scaling_factor=0.7)
THREE = dict(block_out_channels=(12, 8, 16), latent_channels=4, layers_per_block=2, norm_num_groups=2,
             temporal_compression_ratio=2, scaling_factor=1.15258426)
CLIPS = {
    "one": (FOUR, (1, 3, 4), 0), "even": (FOUR, (4, 3, 4), 0), "odd": (FOUR, (5, 4, 3), 0), "three": (THREE, (3, 5, 4),
                                                                                                     0),
    "tiled": (THREE, (1, 32, 33), 120),
}


def blocks_of(config):
    count = len(config["block_out_channels"])
    return dict(down_block_types=("CogVideoXDownBlock3D", ) * count, up_block_types=("CogVideoXUpBlock3D", ) * count,
                **config)


def rotations(config, latent):
    """As the pipeline computes them."""
    if not config.get("use_rotary_positional_embeddings"):
        return None
    p = config.get("patch_size", 2)
    grid = (latent[2] // p, latent[3] // p)
    crops = get_resize_crop_region_for_grid(grid, config["sample_width"] // p, config["sample_height"] // p)
    return get_3d_rotary_pos_embed(config["attention_head_dim"], crops, grid, latent[1])


def transform(case, dtype=torch.float32):
    config, latent, rows, t = MODELS[case]
    model = CogVideoXTransformer3DModel(**config).eval()
    fill.fill_module(model)
    model.to(dtype)
    x = fill.tensor(case + ".latents", (1, ) + latent, 2.0).permute(0, 2, 1, 3, 4).to(dtype)
    text = fill.tensor(case + ".text", (1, rows, config["text_embed_dim"]), 1.0).to(dtype)
    out = {}

    def both(hidden, encoded):
        return torch.cat([encoded, hidden], dim=1)[0].float()

    with torch.no_grad():
        for i, block in enumerate(model.transformer_blocks):
            block.register_forward_hook(lambda m, a, o, i=i: out.__setitem__(f"block.{i}", both(*o)))
        model.transformer_blocks[0].register_forward_pre_hook(
            lambda m, a, k: out.__setitem__("block.-1", both(k["hidden_states"], k["encoder_hidden_states"])),
            with_kwargs=True)
        v = model(x, text, torch.tensor([t]), image_rotary_emb=rotations(config, latent), return_dict=False)[0]
    out["output"] = v[0].transpose(0, 1).float().contiguous()
    return out


def decode(case, dtype=torch.float64):
    """Frames, height, width, rgb."""
    config, latent, tile = CLIPS[case]
    vae = AutoencoderKLCogVideoX(**blocks_of(config)).eval()
    fill.fill_module(vae)
    vae.to(dtype)
    if tile:
        vae.enable_tiling(tile, tile)
    latents = fill.tensor(case + ".latents", (1, config["latent_channels"]) + latent, 2.0).to(dtype)
    with torch.no_grad():
        clip = vae.decode(1 / config["scaling_factor"] * latents, return_dict=False)[0]
    return clip[0].permute(1, 2, 3, 0).float().clamp(-1, 1).contiguous()


# kind, steps, snr_shift_scale, timestep_spacing, rescale_betas_zero_snr, set_alpha_to_one
RULES = [("ddim", 1, 3.0, "trailing", True, True), ("ddim", 50, 3.0, "trailing", True, True),
         ("ddim", 7, 1.0, "leading", False, False), ("ddim", 20, 1.0, "linspace", False, True),
         ("dpm", 1, 1.0, "trailing", True, True), ("dpm", 2, 1.0, "trailing", True, True),
         ("dpm", 50, 1.0, "trailing", True, True), ("dpm", 7, 3.0, "leading", False, False)]
COUNT = 64


def steps(number):
    """Timesteps, and the sample after every step. The model's output and the noise are made up."""
    kind, count, shift, spacing, zero, clean = RULES[number]
    made = CogVideoXDDIMScheduler if kind == "ddim" else CogVideoXDPMScheduler
    scheduler = made(prediction_type="v_prediction", snr_shift_scale=shift, timestep_spacing=spacing,
                     rescale_betas_zero_snr=zero, set_alpha_to_one=clean, steps_offset=1 if spacing == "leading" else 0)
    scheduler.set_timesteps(count)
    x, old, samples, draws = fill.tensor("sched.noise", (COUNT, )), None, [], []

    def randn(shape, **_):
        draws.append(fill.tensor(f"sched.draw.{len(draws)}", tuple(shape)))
        return draws[-1]

    module = __import__(made.__module__, fromlist=["randn_tensor"])
    real, module.randn_tensor = getattr(module, "randn_tensor", None), randn
    taken = []
    for i, t in enumerate(scheduler.timesteps):
        v, before = fill.tensor(f"sched.v.{i}", (COUNT, )), len(draws)
        if kind == "ddim":
            x = scheduler.step(v, t, x, return_dict=False)[0]
        else:
            x, old = scheduler.step(v, old, t, scheduler.timesteps[i - 1] if i else None, x, return_dict=False)
        taken.append(len(draws) - before)
        samples.append(x)
    module.randn_tensor = real
    return {"timesteps": scheduler.timesteps.float(), "samples": torch.stack(samples).float(),
            "draws": torch.tensor(taken, dtype=torch.float32)}


def off(rounded, exact, relative):
    error = (rounded - exact).square().mean()
    return float((error / exact.square().mean() if relative else error).sqrt())


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=13)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {}
    for case in MODELS if args.bf16 else ():
        exact, rounded = transform(case), transform(case, torch.bfloat16)
        names = [f"block.{i}" for i in range(-1, MODELS[case][0]["num_layers"])] + ["output"]
        tensors["model." + case] = torch.tensor([off(rounded[name], exact[name], True) for name in names])
    for case in CLIPS if args.bf16 else ():
        tensors["clip." + case] = torch.tensor([off(decode(case, torch.bfloat16), decode(case), False)])
    found = {} if args.bf16 else {f"model.{case}.{name}": value for case in MODELS
                                  for name, value in transform(case).items()}
    found |= {} if args.bf16 else {f"clip.{case}": decode(case) for case in CLIPS}
    for name, value in found.items():
        flat = value.reshape(-1)
        tensors[name] = flat[:: args.every].contiguous()
        tensors[name + ".scale"] = flat.abs().max().reshape(1)
    for number in range(len(RULES)) if not args.bf16 else ():
        tensors |= {f"sched.{number}.{name}": value for name, value in steps(number).items()}
    save_file(tensors, args.out,
              metadata={"every": str(args.every), "diffusers": diffusers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
