#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Linear layers of the engine beside torch's, in turns: f32 and bf16 on the CPU.

    python bench/products.py build/bench/products [--threads 2] [--seconds 2]

Each turn runs one layer in the engine and the same in torch (its weight is packed once in neither: torch gets it as a
model has it). The table has GFLOP/s of the fastest turn and the median of the ratios of the turns."""
import argparse
import os
import statistics
import subprocess
import time

SHAPES = [(2048, 2048, 2048),                                                             # rows, in, out
          (4352, 256, 256), (4352, 256, 512), (4352, 512, 256),                           # wan-tiny
          (4096, 1536, 1536), (2048, 1536, 8960), (2048, 8960, 1536)]                     # Wan 1.3B


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=2, help="per shape and type (2)")
    parser.add_argument("--busy", action="store_true",
                        help="compare processor time instead of time: on a machine with other work; take --threads 1")
    parser.add_argument("--no-torch", action="store_true", help="the engine alone")
    args = parser.parse_args()
    if not args.no_torch:
        os.environ |= {"KMP_BLOCKTIME": "0", "OMP_WAIT_POLICY": "passive"}  # no spinning in the other's turns
        import torch
        torch.set_num_threads(args.threads)
    engine = subprocess.Popen([args.program, str(args.threads)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True)

    def ask(line):
        engine.stdin.write(line + "\n")
        engine.stdin.flush()
        return engine.stdout.readline().strip()

    print("| rows x in x out | type | torch GFLOP/s | esa GFLOP/s | esa/torch, median of turns |")
    print("|---|---|---:|---:|---:|")
    for rows, inner, out in SHAPES:
        for kind in ("f32", "bf16"):
            made = ask(f"shape {rows} {inner} {out} {kind}")
            if made != "ok":
                print(f"| {rows} x {inner} x {out} | {kind} | | {made} | |")
                continue
            if not args.no_torch:
                dtype = torch.float32 if kind == "f32" else torch.bfloat16
                x, w = torch.randn(rows, inner).to(dtype), torch.randn(out, inner).to(dtype)
                bias = torch.randn(out).to(dtype)
            times, ratios, end = ([], []), [], time.monotonic() + args.seconds
            while time.monotonic() < end or len(ratios) < 5:
                ours = float(ask("run").split()[args.busy])
                clock = time.process_time if args.busy else time.perf_counter
                start = clock()
                if not args.no_torch:
                    torch.nn.functional.linear(x, w, bias)
                theirs = clock() - start
                times[0].append(theirs)
                times[1].append(ours)
                ratios.append(theirs / ours)
            work = 2e-9 * rows * inner * out
            torch_best = "-" if args.no_torch else f"{work / min(times[0]):.0f}"
            ratio = "-" if args.no_torch else f"{statistics.median(ratios):.2f}"
            ours_best = f"{work / min(times[1]):.0f}"
            print(f"| {rows} x {inner} x {out} | {kind} | {torch_best} | {ours_best} | {ratio} |", flush=True)
    engine.stdin.close()
    engine.wait()


if __name__ == "__main__":
    main()
