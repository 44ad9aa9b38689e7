# SPDX-License-Identifier: Apache-2.0
"""A results folder as `esa experiment run` leaves it, with made-up numbers: what the tests of `esa report` read. The
files follow docs/schemas/experiment-*.schema.json, and make() checks that they do."""
import json
import os
import shutil

import schemas

MACHINE = {
    "cpu": "Example CPU <9000> & friends", "cores": 2, "memory_bytes": 8 << 30, "os": "Linux", "threads": 2,
    "kernels": "avx2", "blas": None, "version": "0.1.0"
}
PROMPTS = [
    "a red ball rolls to the right over a blue floor", "a \"green\" box & a <script>alert(1)</script> ball",
    "ein grüner Würfel fällt"
]


def least(schema):
    """Some value a schema allows: of settings the page does not look at."""
    schema = schema.get("anyOf", [schema])[0]
    kind = schema["type"] if isinstance(schema.get("type"),
                                        str) else "null" if "null" in schema.get("type", []) else None
    if "enum" in schema:
        return schema["enum"][0]
    return {
        "string": "64x64" if "pattern" in schema else "x", "integer": schema.get("minimum", 0),
        "number": schema.get("minimum", 0), "boolean": False, "array": [], "object": {}, "null": None
    }[kind]


def spread(x):
    return {"median": x, "lowest": 0.97 * x, "highest": 1.06 * x}


def carried(steps, anchors, layers, dense):
    """What a record says of differences that are made at some steps and added at the others."""
    ages = [step - max(a for a in anchors if a <= step) for step in range(steps)] if anchors and not dense else []
    return {"carry": {
        "asked": ",".join(map(str, anchors)) if ages else "off", "format": "e4m3" if ages else None,
        "anchors": list(anchors) if ages else [], "anchor_calls": layers * len(anchors) if ages else 0,
        "carried_calls": layers * (steps - len(anchors)) if ages else 0, "age": sum(ages) / steps if ages else None,
        "step_age": ages, "bytes": 10**6 if ages else 0, "host_bytes": 0
    }}


def record(budget, steps, warmup, layers, heads, dense, work=True, anchors=()):
    """Times that fall with the budget; layer 0 is dense, so its densities are null. work False: as older files, which
    do not count the work and know of no carry."""
    step = [0.4 if dense or i < warmup else 0.4 * (0.45 + 0.55 * budget) + 0.002 * (i % 3) for i in range(steps)]
    attention = [0.25 if dense or i < warmup else 0.25 * budget for i in range(steps)]
    heads_of = [[
        None if dense or layer == 0 else round(min(1, budget * (0.6 + 0.8 * h / max(1, heads - 1))), 4)
        for h in range(heads)
    ] for layer in range(layers)]
    sparse = (layers - 1) * (steps - warmup) / (layers * steps)
    counted = {"attention_work": {"asked": None, "realised": 1 if dense else 1 - sparse * (1 - budget)}}
    return {
        **({**counted, **carried(steps, anchors, layers, dense)} if work else {}),
        "seconds": sum(step) + 0.9, "text_seconds": 0.2, "denoise_seconds": sum(step),
        "attention_seconds": sum(attention), "select_seconds": 0.0 if dense else 0.004 * steps,
        "gemm_seconds": 0.1 * steps, "decode_seconds": 0.7, "peak_bytes": 10**8,
        "density_asked": None if dense else budget, "density": None if dense else budget,
        "kept_mass": None if dense else 1 - 0.2 * (1 - budget)**2, "calls": layers * steps,
        "sparse_calls": 0 if dense else
                        (layers - 1) * (steps - warmup), "kernel": "avx2", "warmup_steps": 0 if dense else warmup,
        "step_seconds": step, "step_select_seconds": [0.0] * steps, "step_attention_seconds": attention,
        "layer_density": [None if dense or layer == 0 else budget for layer in range(layers)], "head_density": heads_of
    }


def make(folder, tag, videos, budgets=(0.7, 0.5, 0.3), methods=("cached", ), prompts=PROMPTS, lpips=True,
         size=(9, 64, 64), steps=5, layers=3, heads=2, work=True, anchors=()):
    """Writes folder. videos: files or folders of pictures to copy, in turn (empty: none are there, as after a
    cleaning up). work False: as older folders, whose records do not count the work. anchors: steps at which the sparse
    variants keep differences, which they carry to the others."""
    warmup, frames, height, width = 1, *size
    os.makedirs(folder)
    settings = {
        "model": "wan-tiny", "config_hash": "0" * 16, "weights_hash": "fnv1a64:" + "0" * 16, "frames": frames,
        "height": height, "width": width, "steps": steps, "methods": list(methods), "budgets": list(budgets),
        "tail": "pooled", "block": "64x64", "warmup": 0.2, "evaluation_prompts": list(prompts)
    }
    schema = schemas.schema("experiment-config")["properties"]["settings"]
    settings = {**{name: least(schema["properties"][name]) for name in schema["required"]}, **settings}
    config = {
        "format": 1, "tag": tag, "command": f"esa experiment run --tag {tag}", "machine": MACHINE, "commit": "0123abcd",
        "settings": settings
    }
    common = {
        "format": 1, "tag": tag, "model": "wan-tiny", "frames": frames, "height": height, "width": width, "steps": steps
    }
    speed = {**common, "machine": MACHINE, "commit": "0123abcd", "tokens": 640,
             "calibration": {"file": "masks.safetensors", "bytes": 1000, "prompts": 2, "seconds": 12.5}, "variants": []}
    quality = {**common, "config_hash": "0" * 16, "lpips": "alex" if lpips else None, "variants": []}
    copied = 0
    sparse = [("" if method == "cached" else method + "-", method, b) for method in methods for b in budgets]
    for name, method, budget in [("dense", "dense", 1.0)] + [(f"{prefix}b{b:g}", method, b)
                                                             for prefix, method, b in sparse]:
        dense, files = name == "dense", []
        for i, _ in enumerate(prompts):
            file = f"videos/{name}/{i:03d}" + (os.path.splitext(videos[copied % len(videos)])[1] if videos else ".mp4")
            if videos:
                source, target = videos[copied % len(videos)], os.path.join(folder, file)
                os.makedirs(os.path.dirname(target), exist_ok=True)
                (shutil.copytree if os.path.isdir(source) else shutil.copy)(source, target)
                copied += 1
            files.append(file)
        one = record(budget, steps, warmup, layers, heads, dense, work, anchors)
        total = sum(one["step_seconds"])
        speed["variants"].append({
            "name": name, "method": method, "budget": budget, "clips": len(prompts), "density": budget,
            "clip_seconds": spread(one["seconds"]), "step_seconds": spread(total / steps),
            "step_seconds_sparse": spread(sum(one["step_seconds"][warmup:]) / (steps - warmup)
                                          ), "select_seconds": spread(one["select_seconds"]),
            "attention_seconds": spread(one["attention_seconds"]), "speedup": None if dense else 0.4 * steps / total,
            "speedup_without_warmup": None if dense else 0.4 * (steps - warmup) / sum(one["step_seconds"][warmup:]),
            "videos": [{"index": i, "prompt": prompt, "file": files[i], "record": one}
                       for i, prompt in enumerate(prompts)]
        })
        if dense:
            continue
        figures = {
            "psnr": 20 + 18 * budget + len(method) % 5, "ssim": 0.8 + 0.19 * budget - 0.002 * len(method),
            "lpips": 0.2 * (1 - budget) if lpips else None, "flicker": 0.01 * (1 - budget)
        }
        quality["variants"].append({
            "name": name, "method": method, "budget": budget, "density": budget, "kept_mass": 0.9, "identical": 0,
            "mean": figures, "videos": [{
                "index": i, "prompt": prompt, "file": files[i], "reference": f"videos/dense/{i:03d}.mp4",
                "identical": False, **figures, "psnr_min": figures["psnr"] - 2, "ssim_min": figures["ssim"] - 0.02
            } for i, prompt in enumerate(prompts)]
        })
    for name, value in (("config", config), ("speed", speed), ("quality", quality)):
        path = os.path.join(folder, name + ".json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1, ensure_ascii=False)
        schemas.check(path, "experiment-" + name)
    return config, speed, quality
