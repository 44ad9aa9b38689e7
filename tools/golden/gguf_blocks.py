# SPDX-License-Identifier: Apache-2.0
"""Blocks of every type of GGUF that the engine reads, and their values as the gguf package expands them.

    python tools/golden/gguf_blocks.py --out tests/golden/gguf_blocks.safetensors

Codes are random bytes; scales are random finite halves of every size and sign, 0 and subnormal ones among them. For
Q8_0 there are also blocks that the package's own quantiser made."""
import argparse

import gguf
import numpy as np
from gguf.quants import dequantize, quantize
from safetensors.numpy import save_file

TYPES = ("F16", "BF16", "Q8_0", "Q4_K", "Q5_K", "Q6_K")
# Bytes where a block has its scales in f16.
HALVES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}


def halves(random, count):
    """Finite halves: any sign, exponent and mantissa."""
    bits = random.integers(0, 0x7C00, count) | random.integers(0, 2, count) << 15
    bits[:: max(1, count // 3)] &= 0x83FF                       # some subnormal
    bits[-1] = 0
    return bits.astype("<u2")


def random_blocks(random, name, count):
    kind = gguf.GGMLQuantizationType[name]
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    if name == "F16":
        return halves(random, count).view(np.uint8)
    if name == "BF16":
        bits = random.integers(0, 0x7F80, count) | random.integers(0, 2, count) << 15
        return bits.astype("<u2").view(np.uint8)
    blocks = random.integers(0, 256, (count, size)).astype(np.uint8)
    for at in HALVES[name]:
        blocks[:, at : at + 2] = halves(random, count).view(np.uint8).reshape(count, 2)
    return blocks.reshape(-1)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--blocks", type=int, default=2, help="blocks of 256 elements of each type")
    parser.add_argument("--seed", type=int, default=17)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    tensors = {}
    for name in TYPES:
        kind = gguf.GGMLQuantizationType[name]
        elements, _ = gguf.GGML_QUANT_SIZES[kind]
        blocks = random_blocks(random, name, args.blocks * 256 // elements)
        if name == "Q8_0":
            made = quantize(random.standard_normal(256).astype(np.float32), kind)
            blocks = np.concatenate([blocks, made.reshape(-1)])
        tensors[name + ".blocks"] = np.ascontiguousarray(blocks)
        tensors[name + ".values"] = dequantize(blocks, kind).astype(np.float32).reshape(-1)
        if not np.isfinite(tensors[name + ".values"]).all():
            raise SystemExit(f"{name}: a value is not finite")
    save_file(tensors, args.out, metadata={"seed": str(args.seed)})
    print(f"seed {args.seed}, {args.blocks} blocks of each type")


if __name__ == "__main__":
    main()
