# SPDX-License-Identifier: Apache-2.0
"""Output of diffusers' transformer with the weights of models/wan-tiny at its full size (4,352 tokens), for the live
test only: the weights change when the model is trained again.

    python tools/golden/wan_tiny_dit.py --model models/wan-tiny --out /tmp/golden/wan_tiny_dit.safetensors"""
import argparse

import torch
from safetensors.torch import save_file

import diffusers
import fill
from diffusers import WanTransformer3DModel


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    model = WanTransformer3DModel.from_pretrained(args.model, subfolder="transformer", torch_dtype=torch.float32).eval()
    tensors = {}
    for name, t, valid in (("late", 60, 20), ("early", 999, 1)):
        x = fill.tensor("wan_tiny.latents", (1, 16, 17, 32, 32), 2.0)
        text = fill.tensor("wan_tiny.text", (1, 512, model.config.text_dim), 1.0)
        text[:, valid:] = 0
        with torch.no_grad():
            tensors[name] = model(x, torch.tensor([t]), text, return_dict=False)[0].reshape(-1).contiguous()
    save_file(tensors, args.out, metadata={"diffusers": diffusers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
