# SPDX-License-Identifier: Apache-2.0
"""One rank of test_parallel.py: the mini Wan under diffusers' context parallelism with esa applied.

    RANK= WORLD_SIZE= MASTER_ADDR= MASTER_PORT= python parallel_worker.py MASKS OUTPUT"""
import sys
import types

import esa
import minis
import torch
from esa.diffusers import parallel

STEPS = 2
HEADS = 4


def configs(masks):
    """By name. Cached masks come from one process; the rest is chosen online."""
    common = {"block": 32, "warmup_frac": 0.0}
    return {
        "dense": esa.EsaConfig(selector="dense"),
        "rf_v2": esa.EsaConfig(selector="rf_v2", budget=0.4, **common),
        "ada_bsa": esa.EsaConfig(selector="ada_bsa", cdf_threshold=0.8, tail="none", **common),
        "cached": esa.EsaConfig(masks=masks, budget=0.4, warmup_frac=0.0),
        "entropy": esa.EsaConfig(budget=0.4, **common),
        # each rank keeps the differences of its heads
        "carry": esa.EsaConfig(selector="rf_v2", budget=0.4, carry=[0], carry_format="bf16", **common),
    }


def run(mini, config):
    """Outputs of two steps, and what ran."""
    with esa.apply(mini.model, config, steps=STEPS) as handle:
        outputs = torch.stack([mini.at(t) for t in (900, 400)])
        return outputs, handle.stats()


def main():
    masks, output = sys.argv[1:]
    torch.set_num_threads(1)
    mini = minis.wan(seed=3, layers=3, heads=HEADS)
    parallel.enable_ulysses(types.SimpleNamespace(transformer=mini.model))
    found = {}
    for name, config in configs(masks).items():
        outputs, stats = run(mini, config)
        found[name] = outputs
        found[name + ".density"] = torch.tensor(stats.density)
        found[name + ".sparse_calls"] = torch.tensor(stats.sparse_calls)
        found[name + ".carry"] = torch.tensor([stats.anchor_calls, stats.carried_calls, stats.carry_bytes])
    torch.save(found, f"{output}.{parallel.rank()}")
    parallel.finish()


if __name__ == "__main__":
    main()
