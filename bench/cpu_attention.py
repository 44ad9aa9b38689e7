#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention on this CPU beside torch's, in one process and in turns.

    ESA_LIB=build/libesa.so python bench/cpu_attention.py --threads 2

For each dtype and head size: torch's dense attention, esa's, and esa's with random masks of 128x128 blocks given in
advance. Every round runs all of them once, in a new order, so a busy machine hurts all; the best time of each counts.
`of torch` is speed against torch's dense attention in the same dtype; `efficiency` is speedup over esa's own dense
attention times density. Outputs of bf16 and f32 are compared with torch in float64 first; a wrong one ends the run.
ESA_CPU in the environment lowers esa's kernels: run it again with ESA_CPU=avx512 to see what AMX is worth."""
import argparse
import json
import pathlib
import random
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "python"))
import esa  # noqa: E402
from esa.core.context import set_num_threads, shared_context  # noqa: E402

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# Relative errors in the L2 norm. Inputs are exact in their dtype; a bf16 output is rounded by at most 2^-9, and so are
# probabilities; f32 sums of 4096 products stay far below 1e-5.
BOUND = {"bf16": 1e-2, "f16": 2e-3, "f32": 1e-5}


def same(got, want, bound, what):
    error = ((got.double() - want).norm() / want.norm()).item()
    if not error < bound:
        raise SystemExit(f"{what}: relative error {error:.2e}, at most {bound:.0e} expected")
    return error


def measure(dtype, shape, densities, rounds, rest):
    """Rows of (name, density, best seconds, GFLOP/s, of torch, efficiency, error)."""
    B, H, N, D = shape
    q, k, v = (torch.randn(shape, dtype=torch.float32).to(DTYPES[dtype]) for _ in range(3))
    masks = [None if x == 1 else esa.select(q, k, esa.EsaConfig(selector="random", budget=x)) for x in densities]
    calls = {("torch", 1.0): lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)}
    for mask in masks:
        density = 1.0 if mask is None else mask.density
        calls["esa", density] = lambda mask=mask: esa.attention(q, k, v, mask)
    want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    error = same(esa.attention(q, k, v), want, BOUND[dtype], f"{dtype}, {shape}")
    best, order = {}, list(calls)
    for i in range(rounds + 1):             # the first round warms up
        random.shuffle(order)
        for key in order:
            time.sleep(rest)
            start = time.perf_counter()
            calls[key]()
            seconds = time.perf_counter() - start
            if i:
                best[key] = min(best.get(key, seconds), seconds)
    rows = []
    for (name, density), seconds in best.items():
        rows.append({
            "name": name, "dtype": dtype, "shape": list(shape), "density": round(density, 4), "seconds": seconds,
            "gflops": 4 * B * H * N * N * D * density / seconds * 1e-9,
            "of_torch": best["torch", 1.0] / seconds if name == "esa" else 1.0,
            "efficiency": best["esa", 1.0] / seconds * density if name == "esa" else None,
            "error": error if (name, density) == ("esa", 1.0) else None})
    return sorted(rows, key=lambda r: (r["name"] == "esa", -r["density"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="CPU threads of both (torch's)")
    parser.add_argument("--heads", type=int, default=4, help="(4)")
    parser.add_argument("--tokens", type=int, default=4096, help="(4096)")
    parser.add_argument("--head-sizes", type=int, nargs="+", default=[128, 64], help="(128 64)")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "f32"], help="(bf16 f32)")
    parser.add_argument("--densities", type=float, nargs="+", default=[1, 0.5, 0.2, 0.1], help="(1 0.5 0.2 0.1)")
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds (15)")
    parser.add_argument("--rest", type=float, default=0.0, help="seconds of rest before each call (0)")
    parser.add_argument("--json", help="also write the rows to this file")
    args = parser.parse_args()
    torch.manual_seed(1)
    random.seed(1)
    torch.set_num_threads(args.threads)
    set_num_threads(args.threads)
    context = shared_context()
    kernels = context.lib.c.esa_ctx_cpu(context.ptr).decode()
    print(f"esa: {kernels} kernels; torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}; "
          f"{args.threads} threads; H {args.heads}, N {args.tokens}")
    print("      dtype    D  density   best ms  GFLOP/s of torch efficiency")
    rows = []
    densities = sorted({1.0, *args.densities}, reverse=True)
    for dtype in args.dtypes:
        for size in args.head_sizes:
            for r in measure(dtype, (1, args.heads, args.tokens, size), densities, args.rounds, args.rest):
                rows.append(r)
                efficiency = "" if r["efficiency"] is None else f"{r['efficiency']:.2f}"
                print(f"{r['name']:5} {dtype:5} {size:4} {r['density']:8.4f} {r['seconds'] * 1e3:9.2f} "
                      f"{r['gflops']:8.0f} {r['of_torch']:8.2f} {efficiency:>10}", flush=True)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps({"kernels": kernels, "torch": torch.__version__,
                                                       "threads": args.threads, "rows": rows}, indent=1) + "\n",
                                           encoding="utf-8")


if __name__ == "__main__":
    main()
