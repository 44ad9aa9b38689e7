#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What it costs to stream carried differences: steps of a session whose d lies on the GPU beside steps of one whose d
lies in page-locked host memory, in turns.

    bench/gpu_stream.py --json stream.json              Wan 14B at 720p: 8 layers, 0.4 GB of d a layer
    bench/gpu_stream.py --shapes wan-1.3b-480p,wan-14b-720p --densities 0.05,0.1,0.2

A step is one call of attention per layer and nothing else. In a model, linear layers run between the calls and give the
copies more time. The call of a layer copies the d of a later one meanwhile, and the last layers that of the next step's
first ones. Masks are made at the first step, by the selector `error`, of random q, k and v. A time is the median over
the rounds of steps that add d; the ratio of streamed to resident should be at most 1.03."""
import argparse
import json
import statistics
import sys
import time

import shapes
import torch

import esa

BAR = 1.03
WHERE = {"resident": None, "streamed": 0}       # carry_memory


def session(shape, layers, density, steps, memory):
    config = esa.EsaConfig(selector="error", budget=density, carry=[0], carry_memory=memory)
    layout = esa.Layout(grid=shape.grid, text_front=shape.text[0], text_back=shape.text[1])
    return esa.Session(config, layers=layers, steps=steps, device="cuda", layout=layout)


def one_step(s, step, layers, qkv):
    """Milliseconds on the GPU."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    s.step(step)
    begin.record()
    for layer in range(layers):
        s.attention(layer, *qkv)
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def measure(name, density, a):
    shape = shapes.SHAPES[name]
    gen = torch.Generator("cuda").manual_seed(a.seed)
    qkv = [torch.randn(1, shape.heads, shape.tokens, shape.head_dim, device="cuda", dtype=torch.bfloat16,
                       generator=gen) for _ in range(3)]
    steps = a.rounds + 4                        # the first makes d, two warm up, and the last is never reached
    sessions = {where: session(shape, a.layers, density, steps, memory) for where, memory in WHERE.items()}
    times = {where: [] for where in WHERE}
    for s in sessions.values():
        s.begin()
    for step in range(steps - 1):
        for where in (list(WHERE) if step % 2 else reversed(WHERE)):
            ms = one_step(sessions[where], step, a.layers, qkv)
            if step > 2:
                times[where].append(ms)
    stats = {where: s.stats() for where, s in sessions.items()}
    assert stats["resident"].carry_host_bytes == 0 < stats["streamed"].carry_host_bytes, stats
    assert all(x.carried_calls == (steps - 2) * a.layers for x in stats.values()), stats
    ms = {where: statistics.median(t) for where, t in times.items()}
    row = {"shape": name, "density": density, "layers": a.layers, **{f"{w}_ms": x for w, x in ms.items()},
           "ratio": ms["streamed"] / ms["resident"], "times": times, "kernel": stats["streamed"].kernel,
           "device_bytes": {w: x.carry_bytes for w, x in stats.items()},
           "host_bytes": stats["streamed"].carry_host_bytes}
    for s in sessions.values():
        s.close()
    print(f"{name} density {density:g}, {a.layers} layers: {ms['resident']:.2f} ms a step resident, "
          f"{ms['streamed']:.2f} streamed, ratio {row['ratio']:.4f}{'' if row['ratio'] <= BAR else ' MISSED'}; "
          f"{row['host_bytes'] / 1e9:.2f} GB on the host, {row['device_bytes']['streamed'] / 1e9:.2f} GB of "
          f"{row['device_bytes']['resident'] / 1e9:.2f} on the GPU", flush=True)
    return row


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shapes", default="wan-14b-720p", help=f"of {', '.join(shapes.SHAPES)} (wan-14b-720p)")
    ap.add_argument("--densities", default="0.05,0.1,0.2", help="of the masks (0.05,0.1,0.2)")
    ap.add_argument("--layers", type=int, default=8)
    ap.add_argument("--rounds", type=int, default=7, help="timed steps of each kind (7)")
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--json", metavar="FILE", help="everything measured, for machines")
    a = ap.parse_args()
    a.shapes = a.shapes.split(",")
    try:
        densities = [float(x) for x in a.densities.split(",")]
    except ValueError:
        ap.error(f"--densities must be numbers with commas, not {a.densities!r}")
    if unknown := [x for x in a.shapes if x not in shapes.SHAPES]:
        ap.error(f"unknown shape {unknown[0]!r}, expected some of {', '.join(shapes.SHAPES)}")
    if a.layers < 2 or a.rounds < 1:
        ap.error("--layers must be at least 2, --rounds at least 1")
    if not torch.cuda.is_available():
        sys.exit("gpu_stream.py: torch sees no GPU on this machine: nothing was measured")
    head = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "esa": esa.__version__,
            "rounds": a.rounds, "date": time.strftime("%Y-%m-%d", time.gmtime())}
    print(", ".join(f"{k} {v}" for k, v in head.items()), flush=True)
    rows = []
    for name in a.shapes:
        for density in densities:
            rows.append(measure(name, density, a))
            torch.cuda.empty_cache()
            if a.json:
                with open(a.json, "w", encoding="utf-8") as file:
                    json.dump({**head, "rows": rows}, file, indent=1)
    missed = sum(r["ratio"] > BAR for r in rows)
    print(f"{len(rows) - missed} of {len(rows)} at most {BAR}")


if __name__ == "__main__":
    main()
