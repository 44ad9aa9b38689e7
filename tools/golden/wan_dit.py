# SPDX-License-Identifier: Apache-2.0
"""Outputs of diffusers' WanTransformer3DModel (whole, and after every block) for the C tests.

    python tools/golden/wan_dit.py --out tests/golden/wan_dit.safetensors

Weights and inputs come from fill.py; the file holds every n-th element of each output and the largest magnitude of all.
--every 1 keeps everything (the live test does)."""
import argparse

import torch
from safetensors.torch import save_file

import diffusers
import fill
from diffusers import WanTransformer3DModel

# name: model, latents (c, t, h, w), text rows, of them not zero, timestep. tests/model/dit_cases.h has the same table.
CASES = {
    "tiny": (dict(num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
                  freq_dim=256, ffn_dim=32, num_layers=2, rope_max_seq_len=32), (4, 2, 16, 16), 12, 12, 417),
    "mini1280": (dict(num_attention_heads=2, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=64,
                      freq_dim=256, ffn_dim=512, num_layers=2), (16, 5, 32, 32), 40, 17, 999),
    "mini1650": (dict(num_attention_heads=2, attention_head_dim=128, in_channels=16, out_channels=16, text_dim=64,
                      freq_dim=256, ffn_dim=512, num_layers=2), (16, 5, 30, 44), 40, 39, 57), "wan-tiny":
                          (dict(num_attention_heads=4, attention_head_dim=64, in_channels=16, out_channels=16,
                                text_dim=192, freq_dim=256, ffn_dim=512, num_layers=8), (16, 5, 16, 24), 512, 23, 750),
    "nonorm": (dict(num_attention_heads=3, attention_head_dim=20, in_channels=3, out_channels=5, text_dim=10,
                    freq_dim=32, ffn_dim=48, num_layers=1, cross_attn_norm=False,
                    patch_size=(2, 1, 2)), (3, 4, 6, 10), 7, 7, 1),
}


def run(case):
    config, latent, rows, valid, t = CASES[case]
    config = {"patch_size": (1, 2, 2), "cross_attn_norm": True, **config}
    model = WanTransformer3DModel(**config).eval()
    fill.fill_module(model)
    x = fill.tensor(case + ".latents", (1,) + latent, 2.0)
    text = fill.tensor(case + ".text", (1, rows, config["text_dim"]), 1.0)
    text[:, valid:] = 0
    out = {}
    with torch.no_grad():
        hooks = [
            block.register_forward_hook(lambda m, a, o, i=i: out.__setitem__(f"block.{i}", o[0]))
            for i, block in enumerate(model.blocks)
        ]
        hooks.append(
            model.blocks[0].register_forward_pre_hook(lambda m, a: out.__setitem__("block.-1", a[0][0].clone())))
        out["output"] = model(x, torch.tensor([t]), text, return_dict=False)[0][0]
        for h in hooks:
            h.remove()
    return out


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=29)
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {}
    for case in CASES:
        for name, value in run(case).items():
            flat = value.float().reshape(-1)
            tensors[f"{case}.{name}"] = flat[:: args.every].contiguous()
            tensors[f"{case}.{name}.scale"] = flat.abs().max().reshape(1)
    save_file(tensors, args.out,
              metadata={"every": str(args.every), "diffusers": diffusers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
