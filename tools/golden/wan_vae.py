# SPDX-License-Identifier: Apache-2.0
"""Frames that diffusers' AutoencoderKLWan decodes, for the C tests: 1, 5, 9 and 33 frames, odd shapes, tiles.

    python tools/golden/wan_vae.py --out tests/golden/wan_vae.safetensors
    python tools/golden/wan_vae.py --bf16 --model models/wan-tiny --out tests/golden/wan_vae_bf16.safetensors

Weights and latents come from fill.py; the file holds every n-th element of each clip (frames, height, width, rgb) and
the largest magnitude of all. --every 1 keeps everything (the live test does), --model adds a real folder with its own
weights. With --bf16 the file holds how far bf16 is from f64: for each case the root mean square of the difference.

Computed in f64: diffusers' own tiny configuration normalises over one to three channels, where rounding grows so much
that its f32 results are 1e-4 away from these."""
import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

import diffusers
import fill
from diffusers import AutoencoderKLWan
from diffusers.models.autoencoders.autoencoder_kl_wan import WanUpsample

# name: config, latents (t, h, w), pixels of a tile (0: none). tests/model/test_wan_vae.c has the same table.
TINY = dict(base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True])
SMALL = dict(base_dim=24, z_dim=16, dim_mult=[1, 2, 4], num_res_blocks=1, temperal_downsample=[False, True],
             scale_factor_temporal=2, scale_factor_spatial=4)
ODD = dict(base_dim=8, decoder_base_dim=10, z_dim=5, dim_mult=[1, 3, 2], num_res_blocks=2,
           temperal_downsample=[True, False], scale_factor_temporal=2, scale_factor_spatial=4,
           latents_mean=[0.5, -1.0, 0.0, 2.0, 0.25], latents_std=[1.0, 2.0, 0.5, 1.5, 3.0])
CASES = {
    "tiny1": (TINY, (1, 4, 3), 0), "tiny5": (TINY, (2, 4, 3), 0), "tiny9": (TINY, (3, 4, 3), 0),
    "tiny33": (TINY, (9, 4, 3), 0), "small1": (SMALL, (1, 6, 8), 0), "small5": (SMALL, (3, 6, 8), 0),
    "small9": (SMALL, (5, 6, 8), 0), "small33": (SMALL, (17, 6, 8), 0), "odd7": (ODD, (4, 5, 7), 0), "tiled9":
        (TINY, (3, 20, 13), 64), "tiled_wide": (SMALL, (2, 5, 21), 32),
}


def decode(vae, latents, tile, dtype=torch.float64):
    """As the pipeline does it: statistics of the config, then decode. Frames, height, width, rgb."""
    latents = latents.to(dtype)
    mean = torch.tensor(vae.config.latents_mean, dtype=torch.float64).view(1, -1, 1, 1, 1).to(dtype)
    std = (1.0 / torch.tensor(vae.config.latents_std, dtype=torch.float64)).view(1, -1, 1, 1, 1).to(dtype)
    if tile:
        vae.enable_tiling(tile, tile, tile * 3 // 4, tile * 3 // 4)
    with torch.no_grad():
        return vae.to(dtype).decode(latents / std + mean, return_dict=False)[0][0].permute(1, 2, 3,
                                                                                           0).float().contiguous()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=41)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--model", help="a model folder: its VAE decodes 5 latent frames of 8 x 8 as case 'model'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    WanUpsample.forward = lambda self, x: torch.nn.Upsample.forward(self, x)        # without its detour over f32
    clips, tensors = {}, {}

    def add(case, vae, latents, tile):
        clips[case] = decode(vae, latents, tile)
        if args.bf16:
            rounded = decode(vae, latents, tile, torch.bfloat16)
            tensors[case] = (rounded - clips[case]).square().mean().sqrt().reshape(1)
            print(f"{case:12s} bf16 is off by {float(tensors[case]):.5f}")

    for case, (config, latent, tile) in CASES.items():
        vae = AutoencoderKLWan(**config).eval()
        fill.fill_module(vae)
        add(case, vae, fill.tensor(case + ".latents", (1, vae.config.z_dim) + latent, 2.0), tile)
    if args.model:
        vae = AutoencoderKLWan.from_pretrained(Path(args.model) / "vae", torch_dtype=torch.float32).eval()
        add("model", vae, fill.tensor("model.latents", (1, vae.config.z_dim, 5, 8, 8), 2.0), 0)
    for case, clip in clips.items() if not args.bf16 else ():
        flat = clip.reshape(-1)
        tensors[case] = flat[:: args.every].contiguous()
        tensors[case + ".scale"] = flat.abs().max().reshape(1)
        print(f"{case:12s} {tuple(clip.shape)}, largest {flat.abs().max():.3f}, "
              f"at the limit {(flat.abs() >= 1).float().mean():.3f}")
    save_file(tensors, args.out,
              metadata={"every": str(args.every), "diffusers": diffusers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
