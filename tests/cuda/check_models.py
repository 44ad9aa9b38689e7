#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The models of esa.supported() on a GPU, as minis: check_models.py [path of libesa.so [cpu]]. At density 1 each must
give what diffusers gives in the same precision; below, every layer must be sparse, in two steps of two videos, and the
result must be the same again. Key lengths, positions and masks are tensors of the GPU here, which no test on a CPU
shows. Prints a line per model and "N passed, N failed". With "cpu" it runs on the CPU, to see that the script is in
order."""
import os
import pathlib
import sys
import traceback

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "tests" / "python"), str(pathlib.Path(__file__).resolve().parent)]
sys.dont_write_bytecode = True
if len(sys.argv) > 1:
    os.environ["ESA_LIB"] = sys.argv[1]

import diffusers  # noqa: E402
import torch  # noqa: E402

import esa  # noqa: E402
import model_minis  # noqa: E402

DEVICE = sys.argv[2] if len(sys.argv) > 2 else "cuda"
DTYPE = torch.bfloat16
# Kept in float32, as pipelines keep them.
EXACT = ("timestep", "guidance", "img_ids", "txt_ids", "video_coords", "image_rotary_emb", "encoder_attention_mask",
         "encoder_attention_mask_2")


def moved(name, x):
    """An input on the device, in the model's precision where the pipeline casts it."""
    if isinstance(x, tuple):
        return tuple(moved(name, y) for y in x)
    if not isinstance(x, torch.Tensor):
        return x
    return x.to(DEVICE, DTYPE) if x.is_floating_point() and name not in EXACT else x.to(DEVICE)


def config(**settings):
    return esa.EsaConfig(**{"block": 64, "warmup_frac": 0.0, "dense_first_layer": False, "budget": 0.5, **settings})


def check(name):
    model = model_minis.make(name)
    model.model.to(DEVICE, DTYPE)
    model.inputs = {key: moved(key, x) for key, x in model.inputs.items()}
    if name == "hunyuan_15":                            # its pipeline casts the timestep, too
        model.inputs["timestep"] = model.inputs["timestep"].to(DTYPE)
    want = model().float()
    with esa.apply(model.model, config(selector="entropy", budget=1.0)) as handle:
        off = (model().float() - want).abs().max().item()
        assert handle.stats().sparse_calls == model.layers
    # Eight roundings of values up to 4 on the way through two layers.
    bound = 8 * 4 * torch.finfo(DTYPE).eps
    assert off <= bound, f"density 1 is off by {off:.2e}, {bound:.2e} are allowed"
    for selector in ("rf_v2", "entropy", "error"):
        with esa.apply(model.model, config(selector=selector), steps=2) as handle:
            videos = [[model.at(t).float() for t in (0.9, 0.4)] for _ in range(2)]
            stats = handle.stats()
        assert stats.sparse_calls == stats.calls == 2 * model.layers and handle.videos == 2, f"{selector}: {stats}"
        assert all(torch.equal(a, b) for a, b in zip(*videos)), f"{selector}: the second video is another one"
        assert all(torch.isfinite(x).all() for x in videos[0]), f"{selector}: not finite"
    return f"density 1 off by {off:.1e}, kernel {stats.kernel}"


def main():
    diffusers.logging.set_verbosity_error()
    passed = failed = 0
    for name in model_minis.MODELS:
        if name in model_minis.MISSING:
            print(f"{name}: this diffusers does not have it")
            continue
        try:
            print(f"{name}: {check(name)}", flush=True)
            passed += 1
        except Exception:
            traceback.print_exc()
            print(f"{name}: FAILED", flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
