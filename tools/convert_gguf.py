# SPDX-License-Identifier: Apache-2.0
"""Writes the transformer of a Wan model folder as a GGUF file, with the names of Wan's authors.

    python tools/convert_gguf.py --model models/wan-tiny --type Q4_K --out wan-tiny-Q4_K.gguf

Matrices of the blocks get the type; what lies outside the blocks, vectors, tables and matrices whose rows are not whole
blocks stay in F32 (--rest F16 or BF16: the matrices among them). The quantisers are plain: each group gets the scale
that spans its values. Converters that search for better scales lose less.

Needs numpy and safetensors."""
import argparse
import json
import pathlib
import re
import struct

import numpy as np
from safetensors.numpy import load_file

NAMES = (                                    # diffusers, original; # stands for the number of the block
    (r"^condition_embedder\.time_embedder\.linear_1\.", "time_embedding.0."),
    (r"^condition_embedder\.time_embedder\.linear_2\.", "time_embedding.2."),
    (r"^condition_embedder\.time_proj\.", "time_projection.1."),
    (r"^condition_embedder\.text_embedder\.linear_1\.", "text_embedding.0."),
    (r"^condition_embedder\.text_embedder\.linear_2\.", "text_embedding.2."),
    (r"^proj_out\.", "head.head."),
    (r"^scale_shift_table$", "head.modulation"),
    (r"\.scale_shift_table$", ".modulation"),
    (r"\.attn1\.to_out\.0\.", ".self_attn.o."),
    (r"\.attn2\.to_out\.0\.", ".cross_attn.o."),
    (r"\.attn1\.to_", ".self_attn."),
    (r"\.attn2\.to_", ".cross_attn."),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
NUMBERS = {"F32": 0, "F16": 1, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14, "BF16": 30}
BLOCK = {"Q8_0": 32, "Q4_K": 256, "Q5_K": 256, "Q6_K": 256}
ALIGNMENT = 32


def original(name):
    for ours, theirs in NAMES:
        name = re.sub(ours, theirs, name)
    return name


def divided(a, b):
    """a / b, and 0 where b is 0."""
    return np.divide(a, b, out=np.zeros_like(a, dtype=np.float32), where=b != 0)


def half(x):
    """x rounded to f16: its bytes and its value."""
    rounded = x.astype("<f2")
    return rounded.view(np.uint8), rounded.astype(np.float32)


def q8_0(x):
    x = x.reshape(-1, 32)
    stored, d = half(np.abs(x).max(axis=1, keepdims=True) / 127)
    code = np.rint(divided(x, np.broadcast_to(d, x.shape))).clip(-127, 127).astype(np.int8)
    return np.concatenate([stored, code.view(np.uint8)], axis=1)


def with_minima(x, bits):
    """The first 16 bytes of Q4_K and Q5_K, and the codes [blocks][8][32]."""
    x = x.reshape(-1, 8, 32)
    top = (1 << bits) - 1
    minimum = np.maximum(0, -x.min(axis=2))
    scale = (x.max(axis=2) + minimum) / top
    stored_d, d = half(scale.max(axis=1, keepdims=True) / 63)
    stored_m, m = half(minimum.max(axis=1, keepdims=True) / 63)
    sc = np.rint(divided(scale, np.broadcast_to(d, scale.shape))).clip(0, 63).astype(np.uint8)
    mn = np.rint(divided(minimum, np.broadcast_to(m, scale.shape))).clip(0, 63).astype(np.uint8)
    step = (d * sc)[:, :, None]
    code = np.rint(divided(x + (m * mn)[:, :, None], np.broadcast_to(step, x.shape)))
    low = sc[:, :4] | (sc[:, 4:] >> 4) << 6
    middle = mn[:, :4] | (mn[:, 4:] >> 4) << 6
    high = (sc[:, 4:] & 15) | (mn[:, 4:] & 15) << 4
    return np.concatenate([stored_d, stored_m, low, middle, high], axis=1), code.clip(0, top).astype(np.uint8)


def in_pairs(code):
    """The lower four bits of groups 2 i and 2 i + 1 in 32 bytes."""
    low = code & 15
    return (low[:, 0::2] | low[:, 1::2] << 4).reshape(len(code), 128)


def q4_k(x):
    head, code = with_minima(x, 4)
    return np.concatenate([head, in_pairs(code)], axis=1)


def q5_k(x):
    head, code = with_minima(x, 5)
    fifth = (code >> 4 << np.arange(8, dtype=np.uint8)[None, :, None]).sum(axis=1).astype(np.uint8)
    return np.concatenate([head, fifth, in_pairs(code)], axis=1)


def q6_k(x):
    x = x.reshape(-1, 16, 16)
    scale = np.abs(x).max(axis=2) / 31
    stored, d = half(scale.max(axis=1, keepdims=True) / 127)
    sc = np.rint(divided(scale, np.broadcast_to(d, scale.shape))).clip(0, 127).astype(np.int8)
    step = (d * sc)[:, :, None]
    code = (np.rint(divided(x, np.broadcast_to(step, x.shape))).clip(-32, 31) + 32).astype(np.uint8)
    code = code.reshape(-1, 2, 4, 32)                                          # halves, quarters of 32
    low = (code[:, :, :2] & 15) | (code[:, :, 2:] & 15) << 4
    high = code >> 4
    high = high[:, :, 0] | high[:, :, 1] << 2 | high[:, :, 2] << 4 | high[:, :, 3] << 6
    count = len(code)
    return np.concatenate([low.reshape(count, 128), high.reshape(count, 64), sc.view(np.uint8), stored], axis=1)


def bf16(x):
    bits = np.ascontiguousarray(x, dtype="<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2")


QUANTISE = {"Q8_0": q8_0, "Q4_K": q4_k, "Q5_K": q5_k, "Q6_K": q6_k, "BF16": bf16,
            "F16": lambda x: x.astype("<f2"), "F32": lambda x: x.astype("<f4")}


def type_for(name, x, kind, rest):
    if x.ndim < 2 or "modulation" in name:
        return "F32"
    if not ("blocks." in name or "layers." in name) or x.shape[-1] % BLOCK.get(kind, 1):
        return rest
    return kind


def text(value):
    raw = value.encode()
    return struct.pack("<Q", len(raw)) + raw


def write(path, tensors, kind, rest, architecture="wan"):
    """tensors: name -> array. Leading dimensions of 1 are dropped, as ggml's tools do."""
    infos, data = b"", []
    at = 0
    for name, x in tensors.items():
        x = np.asarray(x, dtype=np.float32)
        used = type_for(name, x, kind, rest)
        raw = QUANTISE[used](x).tobytes()
        dims = list(x.shape)
        while len(dims) > 1 and dims[0] == 1:
            dims = dims[1:]
        infos += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *reversed(dims), NUMBERS[used], at)
        raw += bytes(-len(raw) % ALIGNMENT)
        data.append(raw)
        at += len(raw)
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 2)
    head += text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    head += text("general.quantization_version") + struct.pack("<II", 4, 2) + infos
    with open(path, "wb") as out:
        out.write(head + bytes(-len(head) % ALIGNMENT))
        out.writelines(data)


def read(folder):
    """The tensors of a transformer's folder."""
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    files = {"diffusion_pytorch_model.safetensors"}
    if index.exists():
        files = set(json.loads(index.read_text())["weight_map"].values())
    tensors = {}
    for name in sorted(files):
        tensors.update(load_file(folder / name))
    return tensors


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, type=pathlib.Path, help="a folder with transformer/ in it")
    parser.add_argument("--type", choices=sorted(NUMBERS), default="Q8_0")
    parser.add_argument("--rest", choices=("F32", "F16", "BF16"), default="F32")
    parser.add_argument("--out", required=True, type=pathlib.Path)
    args = parser.parse_args()
    tensors = {original(name): x for name, x in read(args.model / "transformer").items()}
    write(args.out, tensors, args.type, args.rest)
    print(f"{args.out}: {len(tensors)} tensors, {args.out.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
