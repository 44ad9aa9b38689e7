# SPDX-License-Identifier: Apache-2.0
"""Every step of diffusers' UniPC (flow) and flow-match Euler schedulers for the C tests.

    python tools/golden/wan_sched.py --rule unipc --out tests/golden/sched_unipc.safetensors           diffusers >= 0.37
    python tools/golden/wan_sched.py --rule unipc_036 --out tests/golden/sched_unipc_036.safetensors   diffusers 0.36
    python tools/golden/wan_sched.py --rule euler --out tests/golden/sched_euler.safetensors

The model is a stand-in: v = sin(3 x) + (t / 1000) * n, n from fill.py, so that steps depend on one another."""
import argparse

import numpy as np
import torch
from safetensors.torch import save_file

import diffusers
import fill
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

STEPS = (1, 2, 3, 8, 20, 50)
LIST = (1.0, 0.9375, 0.7, 0.3)                    # sigmas of a distilled model; diffusers 0.36 has none for UniPC
SHIFTS = (1.0, 3.0, 5.0, 12.0)
COUNT = 64


def make(rule, shift):
    if rule == "euler":
        return FlowMatchEulerDiscreteScheduler(shift=shift)
    return UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rule", choices=("unipc", "unipc_036", "euler"), required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    version = tuple(int(n) for n in diffusers.__version__.split(".")[:2])
    if args.rule != "euler" and (version >= (0, 37)) != (args.rule == "unipc"):
        raise SystemExit(f"rule {args.rule} is not that of diffusers {diffusers.__version__}")
    noise = fill.tensor("sched.noise", (1, COUNT), 1.0)
    tensors = {}
    for steps in STEPS + (("list",) if args.rule != "unipc_036" else ()):
        for shift in SHIFTS:
            scheduler = make(args.rule, shift)
            if steps == "list":
                scheduler.set_timesteps(sigmas=np.array(LIST))
            else:
                scheduler.set_timesteps(steps)
            x = fill.tensor("sched.x", (1, COUNT), 2.0)
            samples = []
            for t in scheduler.timesteps:
                v = torch.sin(3 * x) + (t.float() / 1000) * noise
                x = scheduler.step(v, t, x, return_dict=False)[0]
                samples.append(x.reshape(-1).clone())
            name = f"{steps}.{shift:g}"
            tensors[name + ".samples"] = torch.stack(samples)
            tensors[name + ".timesteps"] = scheduler.timesteps.float()
            tensors[name + ".sigmas"] = scheduler.sigmas.float()
    save_file(tensors, args.out, metadata={"diffusers": diffusers.__version__})


if __name__ == "__main__":
    main()
