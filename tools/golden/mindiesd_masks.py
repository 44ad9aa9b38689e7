# SPDX-License-Identifier: Apache-2.0
"""Block masks of rf_v2 and rf_v3 as MindIE-SD's own Python code computes them, on the CPU.

    pip download --no-deps --python-version 3.11 --platform manylinux_2_34_x86_64 --only-binary :all: \\
        -d wheels mindiesd==3.1.0 einops
    python tools/golden/mindiesd_masks.py wheels > tests/golden/mindiesd_masks.json

Pooling, scores and masks of the original are torch code for any device. What the modules import beside it (torch_npu,
the operators, logging) is replaced by empty modules. The original runs in float64, so that the gap between the last
block that is kept and the first that is not says how near a decision was."""
import importlib
import json
import math
import pathlib
import sys
import types
import zipfile

import numpy as np
import torch

VERSION = "3.1.0"
NAME = "original_mindiesd"          # not mindiesd, which esa-mindiesd or the real package may hold
# A decision that hangs on less than this (relative) may fall either way in float32.
NEAR = 2e-6


def fetch_command(python, folder):
    """The command that downloads what `load` needs."""
    return [python, "-m", "pip", "download", "--no-deps", "--disable-pip-version-check", "--python-version", "3.11",
            "--platform", "manylinux_2_34_x86_64", "--only-binary", ":all:", "-d", str(folder),
            f"mindiesd=={VERSION}", "einops==0.8.2"]


def load(folder):
    """The modules (rf_v2, rf_v3) of the wheel in a folder."""
    folder = pathlib.Path(folder)
    for wheel in folder.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder, [n for n in archive.namelist() if n.endswith(".py")])
    sys.path.append(str(folder))

    def stub(name, path=None, **names):
        module = sys.modules[name] = types.ModuleType(name)
        module.__dict__.update(names)
        if path is not None:
            module.__path__ = [str(path)]

    invalid = type("ParametersInvalid", (Exception,), {})
    top = folder / "mindiesd"
    stub("torch_npu")
    stub(NAME, top)
    stub(f"{NAME}.utils", top / "none")
    stub(f"{NAME}.utils.exception", ParametersInvalid=invalid)
    stub(f"{NAME}.utils.get_platform", is_a5_device=lambda: False)
    stub(f"{NAME}.layers", top / "layers", _custom_ops=None)
    stub(f"{NAME}.layers._custom_ops")
    stub(f"{NAME}.layers.flash_attn", top / "layers" / "flash_attn")
    module = importlib.import_module
    return tuple(module(f"{NAME}.layers.flash_attn.sparse_flash_attn_{name}") for name in ("rf_v2", "rf_v3"))


def values(seed, *shape):
    """Values of a linear congruential generator's top bytes, ((s >> 24) - 128) / 64, as in tests/python/golden.py."""
    n = math.prod(shape)
    power = np.cumprod(np.full(n, 1664525, np.uint32), dtype=np.uint32)
    sums = np.cumsum(np.concatenate(([np.uint32(1)], power[:-1])), dtype=np.uint32)
    s = power * np.uint32(seed) + np.uint32(1013904223) * sums
    return (((s >> 24).astype(np.int64) - 128) / 64).astype(np.float32).reshape(shape)


def qkv(case):
    """q and k of a case, [1, heads, tokens, dim] float32."""
    shape = (1, case["heads"], case["tokens"], case["dim"])
    return values(case["seed"], *shape), values(case["seed"] + 7, *shape)


def random_case(r):
    """A case from a random.Random: a video with text, or several clips."""
    block = r.choice((32, 64, 64, 128))
    case = {"seed": r.randrange(1, 2**31), "heads": r.choice((1, 2, 3)), "dim": r.choice((16, 40, 64)),
            "sparsity": r.choice((0.0, 0.3, 0.5, 0.6, 0.64, 0.8, 0.9, round(r.random(), 3) * 0.99)), "block": block,
            "block_kv": None, "text": 0, "grid": None, "spans": None}
    def grid():
        # The original fails on heights and widths below 8 that are not multiples of 8, and on one such frame.
        return [r.randrange(2, 5), r.randrange(8, 20), r.randrange(8, 20)]
    if r.random() < 0.5:
        case["grid"], case["text"] = grid(), r.choice((0, 0, 1, 5, block - 1, block, block + 1, r.randrange(2, 200)))
        case["tokens"] = math.prod(case["grid"]) + case["text"]
        if r.random() < 0.4 and block <= 128:
            case["block_kv"] = 2 * block
        return case
    spans, at = [], r.randrange(0, 2 * block)
    for _ in range(r.choice((1, 2, 2, 3))):
        shape = grid()
        spans.append({"start": at, "latent_shape": shape})
        at += math.prod(shape) + r.randrange(0, 40)
    room = sum(-math.prod(s["latent_shape"]) % block for s in spans[:-1])
    held = at - sum(math.prod(s["latent_shape"]) for s in spans)
    case["spans"], case["tokens"] = spans, at + max(0, room - held) + r.choice((0, 1, r.randrange(0, 100)))
    return case


def original_mask(modules, case):
    """(mask bool [heads, rows, columns], gap [heads, rows]) of the original. The gap is the relative distance of the
    last kept score from the next one; infinite where every block is kept."""
    rf_v2, rf_v3 = modules
    q, k = (torch.from_numpy(x).double() for x in qkv(case))
    scale, block, block_kv = case["dim"]**-0.5, case["block"], case["block_kv"] or case["block"]
    words = (case["text"], case["sparsity"], scale)
    if case["spans"]:
        done = rf_v2.do_multi_span_tensor_rearrange_pooling(q, k, k, case["spans"], block, "BNSD")
        pooled, _, dense, first = done[3:]
        mask = rf_v2.get_multi_span_blockwise_mask(pooled, case["sparsity"], scale, dense, first, "BNSD", True)
        query, key, _ = pooled.chunk(3)
    elif case["block_kv"]:
        q, k, _ = rf_v3.do_tensor_rearrange_only(q, k, k, case["text"], case["grid"], case["grid"], "BNSD")
        query, key = rf_v2.avgpool(q, block), rf_v2.avgpool(k, block_kv)
        mask = rf_v3._generate_mask_direct(query, key, *words, block, block_kv, case["grid"], "BNSD")
    else:
        pooled = rf_v2.do_tensor_rearrange_pooling(q, k, k, case["text"], block, case["grid"], case["grid"], "BNSD")[3]
        mask = rf_v2.get_blockwise_mask(pooled, *words, block, case["grid"], case["grid"], "BNSD", return_binary=True)
        query, key, _ = pooled.chunk(3)
    score = (query @ key.transpose(2, 3) * scale).softmax(-1).sort(-1, descending=True).values[0]
    keep = max(1, math.ceil(score.shape[-1] * (1 - case["sparsity"])))
    last = score[..., keep - 1]
    gap = (last - score[..., keep]) / last if keep < score.shape[-1] else torch.full_like(last, math.inf)
    return mask[0].bool().numpy(), gap.numpy()


def our_mask(case, **words):
    """The same case by esa: bool [heads, rows, columns]."""
    import esa
    q, k = qkv(case)
    return esa.sparse_attention(
        q, k, k, sparse_type="rf_v3", sparsity=case["sparsity"], txt_len=case["text"], latent_shape_q=case["grid"],
        video_spans=case["spans"], block_size=case["block"], block_size_kv=case["block_kv"], return_mask=True,
        **{"compat": "3.1", **words})[1].blocks()[0]


def hexadecimal(mask):
    """Rows of a mask [heads, rows, columns] as one text, bit j = column j."""
    return " ".join(f"{sum(1 << j for j, kept in enumerate(row) if kept):x}" for head in mask for row in head)


def main():
    import random
    modules, r, cases = load(sys.argv[1]), random.Random(32), []
    while len(cases) < 32:
        case = random_case(r)
        if case["tokens"] > 3500:
            continue
        mask, gap = original_mask(modules, case)
        if gap.min() > 50 * NEAR and not mask.all():
            cases.append({**case, "rows": hexadecimal(mask)})
    print("[" + ",\n".join(json.dumps(case) for case in cases) + "]")


if __name__ == "__main__":
    main()
