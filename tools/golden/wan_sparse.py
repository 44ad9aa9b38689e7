# SPDX-License-Identifier: Apache-2.0
"""Output of diffusers' WanTransformer3DModel with block masks expanded into SDPA, for masks that the C test made.

    ESA_TEST_DUMP=/tmp/masks.safetensors build/tests/test_wan_sparse
    python tools/golden/wan_sparse.py --masks /tmp/masks.safetensors --out tests/golden/wan_sparse.safetensors"""
import argparse

import numpy as np
import torch
from safetensors.torch import load_file, save_file

import diffusers
import fill
from diffusers import WanTransformer3DModel
from diffusers.models.transformers.transformer_wan import WanAttnProcessor
from wan_dit import CASES


def expand(bits, perm, block_q, block_k):
    """[H, nq, bytes] of bits over the ordered sequence -> bool [H, N, N] over the sequence as the grid has it."""
    n = len(perm)
    flags = np.unpackbits(bits.numpy(), axis=2, bitorder="little").astype(bool)
    rows, columns = np.arange(n) // block_q, np.arange(n) // block_k
    ordered = flags[:, rows][:, :, columns]
    mask = np.empty_like(ordered)
    mask[:, perm[:, None], perm[None, :]] = ordered
    return torch.from_numpy(mask)


class Masked(WanAttnProcessor):
    """Wan's own self-attention with a mask; everything else is inherited."""

    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None, rotary_emb=None, **kwargs):
        return super().__call__(attn, hidden_states, encoder_hidden_states, self.mask[None], rotary_emb)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--masks", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=29)
    args = parser.parse_args()
    torch.set_num_threads(1)
    given = load_file(args.masks)
    names = list(CASES)
    tensors = {}
    for key in sorted(k for k in given if k.endswith(".facts")):
        case = key[: -len(".facts")]
        model_index, block_q, block_k, n = (int(v) for v in given[key])
        config, latent, rows, valid, t = CASES[names[model_index]]
        model = WanTransformer3DModel(**{"patch_size": (1, 2, 2), "cross_attn_norm": True, **config}).eval()
        fill.fill_module(model)
        x = fill.tensor(names[model_index] + ".latents", (1,) + latent, 2.0)
        text = fill.tensor(names[model_index] + ".text", (1, rows, config["text_dim"]), 1.0)
        text[:, valid:] = 0
        perm = given[case + ".perm"].numpy()
        for i, block in enumerate(model.blocks):
            bits = given[f"{case}.mask.{i}"]
            block.attn1.set_processor(Masked(expand(bits, perm, block_q, block_k)))
            tensors[f"{case}.mask.{i}"] = bits
        with torch.no_grad():
            out = model(x, torch.tensor([t]), text, return_dict=False)[0].reshape(-1)
        tensors[case + ".output"] = out[:: args.every].contiguous()
        tensors[case + ".output.scale"] = out.abs().max().reshape(1)
    save_file(tensors, args.out,
              metadata={"every": str(args.every), "diffusers": diffusers.__version__, "torch": torch.__version__})


if __name__ == "__main__":
    main()
