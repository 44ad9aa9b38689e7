# SPDX-License-Identifier: Apache-2.0
"""The same forward in diffusers and in the engine (bench/wan_dit.c), on one machine in one run.

    python bench/wan_dit.py --model models/wan-tiny --latent 17 32 32 --threads 2 --program build/bench/wan_dit

Runs of the two alternate, so that a busy machine hurts both; the fastest of each counts. Both run in f32 and in
bf16. With --command build/esa the table also has the mean forward of a whole run at each of --presets: masks, orders
and anchors are in it, as in use."""
import argparse
import json
import pathlib
import subprocess
import tempfile
import time

import torch

import diffusers
from diffusers import WanTransformer3DModel


def preset_run(args, dtype, preset):
    """Seconds of a forward, the mean over a run of --steps steps, and the work that the run took."""
    with tempfile.TemporaryDirectory(prefix="esa-wan-dit-") as folder:
        path = pathlib.Path(folder, "run.json")
        command = [args.command, "bench", "model", "--model", args.model, "--device", "cpu", "--dtype", dtype]
        command += ["--steps", str(args.steps), "--preset", preset, "--rounds", "1", "--skip-dense", "--no-decode"]
        command += ["--threads", str(args.threads), "--json", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        row = json.loads(path.read_text(encoding="utf-8"))["rows"][-1]
    return {"seconds": row["denoise_seconds"]["median"] / args.steps / 2, "work": row["attention_work"]["realised"]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--latent", type=int, nargs=3, default=(17, 32, 32))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--program", required=True)
    parser.add_argument("--select", nargs="*", default=["entropy:0.5:tail", "entropy:0.3:tail"])
    parser.add_argument("--block", default="64")
    parser.add_argument("--command", help="path of esa, for whole runs of the model with guidance (none are made)")
    parser.add_argument("--presets", nargs="*", default=["faithful", "balanced", "fast"])
    parser.add_argument("--steps", type=int, default=8, help="of a whole run (8)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    types = {"f32": torch.float32, "bf16": torch.bfloat16}
    models = {name: WanTransformer3DModel.from_pretrained(args.model, subfolder="transformer", torch_dtype=dtype).eval()
              for name, dtype in types.items()}
    config = models["f32"].config
    x = torch.randn(1, config.in_channels, *args.latent)
    text = torch.zeros(1, 512, config.text_dim)
    text[:, :20] = torch.randn(1, 20, config.text_dim)
    names = ["dense"] + args.select
    runs = [(dtype, name) for dtype in types for name in names]
    whole = [(dtype, preset) for dtype in types for preset in args.presets] if args.command else []
    theirs, best = {}, {}
    for _ in range(args.rounds):
        for dtype, model in models.items():
            for i in range(3):
                with torch.no_grad():
                    start = time.perf_counter()
                    model(x.to(types[dtype]), torch.tensor([900]), text.to(types[dtype]), return_dict=False)
                    seconds = time.perf_counter() - start
                if i:
                    theirs[dtype] = min(theirs.get(dtype, seconds), seconds)
        for dtype, name in runs:
            command = [args.program, args.model] + [str(n) for n in args.latent] + [
                "--threads", str(args.threads), "--repeat", "2", "--select", name, "--dtype", dtype
            ]
            command += ["--block", args.block] if name != "dense" else []
            result = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            if (dtype, name) not in best or result["seconds"] < best[dtype, name]["seconds"]:
                best[dtype, name] = result
        for run in whole:
            result = preset_run(args, *run)
            if run not in best or result["seconds"] < best[run]["seconds"]:
                best[run] = result
    fastest = min(theirs.values())
    print(f"torch {torch.__version__}, diffusers {diffusers.__version__}, {args.threads} threads, seconds per forward: "
          + ", ".join(f"{dtype} {seconds:.3f}" for dtype, seconds in theirs.items()))
    for dtype, name in runs:
        r = best[dtype, name]
        print(
            f"esa {dtype:4s} {name:18s} {r['seconds']:.3f} s = self-attention {r['self_attention']:.3f} "
            f"+ gemm {r['gemm']:.3f} + cross {r['cross_attention']:.3f} + rest {r['rest']:.3f}; "
            f"density {r['density']:.3f}, {fastest / r['seconds']:.2f} x the faster diffusers")
    for dtype, preset in whole:
        r = best[dtype, preset]
        print(f"esa {dtype:4s} {preset:18s} {r['seconds']:.3f} s in the mean of {args.steps} steps, work "
              f"{r['work']:.2f}; {fastest / r['seconds']:.2f} x the faster diffusers")


if __name__ == "__main__":
    main()
