# SPDX-License-Identifier: Apache-2.0
"""Outputs of diffusers' WanTransformer3DModel (whole, and after every block) for the C tests.

    python tools/golden/wan_dit.py --out tests/golden/wan_dit.safetensors
    python tools/golden/wan_dit.py --bf16 --out tests/golden/wan_dit_bf16.safetensors

Weights and inputs come from fill.py; the file holds every n-th element of each output and the largest magnitude of all.
--every 1 keeps everything (the live test does). With --bf16 the file holds how far bf16 is from f32: for each case the
root mean square of the difference over that of f32, for the input of block 0, the output of each block, and the output
of the model."""
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


def halve(model):
    """The model in bf16, as from_pretrained(torch_dtype=bfloat16) makes it: some modules stay in f32."""
    for name, value in model.named_parameters():
        if not any(kept in name.split(".") for kept in model._keep_in_fp32_modules):
            value.data = value.data.bfloat16()


def run(case, bf16=False):
    config, latent, rows, valid, t = CASES[case]
    config = {"patch_size": (1, 2, 2), "cross_attn_norm": True, **config}
    model = WanTransformer3DModel(**config).eval()
    fill.fill_module(model)
    x = fill.tensor(case + ".latents", (1,) + latent, 2.0)
    text = fill.tensor(case + ".text", (1, rows, config["text_dim"]), 1.0)
    text[:, valid:] = 0
    if bf16:
        halve(model)
        x, text = x.bfloat16(), text.bfloat16()
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


def distances(case):
    exact, rounded = run(case), run(case, bf16=True)
    names = sorted((name for name in exact if name != "output"), key=lambda name: int(name.split(".")[1])) + ["output"]
    return torch.tensor([
        float((rounded[name].float() - exact[name]).square().mean().sqrt() / exact[name].square().mean().sqrt())
        for name in names
    ])


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=29)
    parser.add_argument("--bf16", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tensors = {case: distances(case) for case in CASES} if args.bf16 else {}
    for case in CASES if not args.bf16 else ():
        for name, value in run(case).items():
            flat = value.float().reshape(-1)
            tensors[f"{case}.{name}"] = flat[:: args.every].contiguous()
            tensors[f"{case}.{name}.scale"] = flat.abs().max().reshape(1)
    save_file(tensors, args.out,
              metadata={"every": str(args.every), "diffusers": diffusers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
