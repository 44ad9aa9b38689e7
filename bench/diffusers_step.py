#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Seconds per denoising step of diffusers' transformers, dense (torch's best SDPA) against esa.apply, in one run.

    python bench/diffusers_step.py --json diffusers.json        the six real shapes; a GPU of 80 GB, about six minutes
    python bench/diffusers_step.py --quick                      Wan 1.3B at 480p and CogVideoX, about one minute
    python bench/diffusers_step.py --shapes wan-14b-720p --limit 200 --offload
    python bench/diffusers_step.py --mini --device cpu          tiny models, to see whether the program runs

Real configurations with random bf16 weights made on the GPU, eager on both sides, one guidance branch (batch 1),
transformer alone. Nothing needs to be installed: PYTHONPATH names python/ of this tree and a folder with diffusers and
what it imports (huggingface_hub, safetensors, ...); ESA_LIB names libesa.so, with libesa_cuda.so beside it (or
ESA_CUDA_LIB names that).

    PYTHONPATH=python:site ESA_LIB=build-cuda/libesa.so python3 bench/diffusers_step.py --json out.json

Columns: `step` is one forward as it is measured after the warm-up steps, with layer 0 dense; `all sparse` is that step
less what dense layer 0 costs more than the mean sparse layer (computed from the attention times of the same forward);
`50 steps` is a whole run with warmup_frac 0.2: 10 dense and 40 sparse steps (computed from the measured step times).
Attention shares come from events around the calls. Cached masks are those of one layer, used for all: speed does not
depend on which blocks are listed."""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import os
import platform
import subprocess
import sys
import tempfile
import time

import shapes
import torch
from torch.overrides import TorchFunctionMode

import esa
from esa.diffusers.families import detect
from esa.core.layout import Layout
from esa.compat.original_masks import TensorWriter

STEPS, WARMUP = 50, 0.2
FILE_U8, FILE_I32 = 8, 5
WAN = dict(patch_size=(1, 2, 2), attention_head_dim=128, in_channels=16, out_channels=16, text_dim=4096, freq_dim=256,
           cross_attn_norm=True, qk_norm="rms_norm_across_heads")
WAN_13B = dict(WAN, num_attention_heads=12, ffn_dim=8960, num_layers=30)
WAN_14B = dict(WAN, num_attention_heads=40, ffn_dim=13824, num_layers=40)
COG_5B = dict(num_attention_heads=48, attention_head_dim=64, in_channels=16, out_channels=16, time_embed_dim=512,
              text_embed_dim=4096, num_layers=42, sample_width=90, sample_height=60, sample_frames=49, patch_size=2,
              temporal_compression_ratio=4, max_text_seq_length=226, use_rotary_positional_embeddings=True)
HUNYUAN = dict(num_attention_heads=24, attention_head_dim=128, num_layers=20, num_single_layers=40,
               num_refiner_layers=2)
MINI_WAN = dict(WAN, num_attention_heads=2, attention_head_dim=32, text_dim=32, ffn_dim=64, num_layers=3)
MINI_COG = dict(COG_5B, num_attention_heads=2, attention_head_dim=32, text_embed_dim=32, time_embed_dim=16,
                num_layers=3, sample_width=24, sample_height=20, sample_frames=9, max_text_seq_length=20)
MINI_HUNYUAN = dict(HUNYUAN, num_attention_heads=2, attention_head_dim=32, num_layers=2, num_single_layers=2,
                    num_refiner_layers=1, text_embed_dim=32, pooled_projection_dim=16, rope_axes_dim=(8, 12, 12))


@dataclasses.dataclass(frozen=True)
class Shape:
    family: str
    config: dict
    grid: tuple[int, int, int]          # of tokens
    text: int
    bars: dict = dataclasses.field(default_factory=dict)


def real(name, family, config, text, bars=None):
    """A shape of bench/shapes.def with the configuration of its model."""
    shape = shapes.SHAPES[name]
    if (shape.heads, shape.head_dim) != (config["num_attention_heads"], config["attention_head_dim"]):
        raise ValueError(f"{name}: bench/shapes.def and the model's configuration have different heads")
    return Shape(family, config, shape.grid, text, bars or {})


SHAPES = {
    "wan-1.3b-480p": real("wan-1.3b-480p", "wan", WAN_13B, 512),
    "wan-1.3b-720p": real("wan-1.3b-720p", "wan", WAN_13B, 512, {0.5: 1.5, 0.2: 2.3, 0.1: 2.7}),
    "wan-14b-480p": real("wan-14b-480p", "wan", WAN_14B, 512),
    "wan-14b-720p": real("wan-14b-720p", "wan", WAN_14B, 512, {0.5: 1.35, 0.2: 1.9, 0.1: 2.2}),
    "cogvideox-5b": real("cogvideox-5b", "cogvideox", COG_5B, 226),
    "hunyuan-544p": real("hunyuan-544p", "hunyuan", HUNYUAN, 256),
}
MINIS = {
    "mini-wan": Shape("wan", MINI_WAN, (5, 10, 12), 16),
    "mini-cogvideox": Shape("cogvideox", MINI_COG, (3, 10, 12), 20),
    "mini-hunyuan": Shape("hunyuan", MINI_HUNYUAN, (3, 10, 12), 24),
}


def methods(quick):
    """Name, settings and whether masks are cached, most wanted first: a time limit cuts at the end."""
    budgets = (0.5, 0.2) if quick else (0.5, 0.2, 0.1)
    rows = [(f"entropy online {b:g}", dict(selector="entropy", budget=b), False) for b in budgets]
    rows += [(f"entropy cached {b:g}", dict(selector="entropy", budget=b), True) for b in budgets]
    rows += [("rf_v2 sparsity 0.8", dict(selector="rf_v2", sparsity=0.8), False)]
    if not quick:
        rows += [("ada_bsa cdf 0.9, cap 0.2", dict(selector="ada_bsa", budget=0.2, cdf_threshold=0.9), False)]
    return rows


# ---------------------------------------------------------------- models


STACKS = {                              # of blocks, by family
    "wan": ["blocks"], "cogvideox": ["transformer_blocks"],
    "hunyuan": ["transformer_blocks", "single_transformer_blocks"]
}

def build(shape, device, dtype):
    """The transformer with random weights, made where it runs, and the inputs of one forward."""
    import diffusers
    t, h, w = shape.grid
    names = {
        "wan": "WanTransformer3DModel", "cogvideox": "CogVideoXTransformer3DModel",
        "hunyuan": "HunyuanVideoTransformer3DModel"
    }
    cls = getattr(diffusers, names[shape.family])
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = cls(**shape.config)
    finally:
        torch.set_default_dtype(before)
    model = model.to(device).eval().requires_grad_(False)
    # from_pretrained keeps these in float32; so do we.
    keep = getattr(cls, "_keep_in_fp32_modules", None) or []
    for name, module in model.named_modules():
        if any(part in name.split(".") for part in keep):
            module.float()
    for name, p in model.named_parameters():
        if any(part in name.split(".") for part in keep):
            p.data = p.data.float()
    random = dict(device=device, dtype=dtype)
    text_dim = shape.config.get("text_dim") or shape.config.get("text_embed_dim") or 4096
    inputs = {"encoder_hidden_states": torch.randn(1, shape.text, text_dim, **random), "return_dict": False}
    if shape.family == "cogvideox":
        from diffusers.models.embeddings import get_3d_rotary_pos_embed
        rope = get_3d_rotary_pos_embed(embed_dim=shape.config["attention_head_dim"], crops_coords=((0, 0), (h, w)),
                                       grid_size=(h, w), temporal_size=t)
        inputs.update(hidden_states=torch.randn(1, t, 16, 2 * h, 2 * w, **random),
                      timestep=torch.tensor([500], device=device), image_rotary_emb=tuple(x.to(device) for x in rope))
    else:
        inputs.update(hidden_states=torch.randn(1, 16, t, 2 * h, 2 * w, **random), timestep=torch.tensor([500],
                                                                                                         device=device))
    if shape.family == "hunyuan":
        inputs.update(timestep=torch.tensor([500.0], device=device, dtype=dtype),
                      encoder_attention_mask=torch.ones(1, shape.text, device=device),
                      pooled_projections=torch.randn(1, shape.config.get("pooled_projection_dim", 768),
                                                     **random), guidance=torch.tensor([6000.0], device=device,
                                                                                      dtype=dtype))
    return model, inputs


@contextlib.contextmanager
def two_layers(model, family):
    """Only the first block of each stack (two of a single one): for warming up and for asking which SDPA is best."""
    stacks = STACKS[family]
    kept = {name: getattr(model, name) for name in stacks}
    for name in stacks:
        setattr(model, name, torch.nn.ModuleList(list(kept[name])[:2 if len(stacks) == 1 else 1]))
    try:
        yield
    finally:
        for name in stacks:
            setattr(model, name, kept[name])


class Attention(TorchFunctionMode):
    """Events around every self-attention of the dense model. HunyuanVideo's mask says that all text is valid, which it
    is here: without it faster kernels may be used, and the best is what esa must beat."""

    def __init__(self, tokens, gpu, measure):
        super().__init__()
        self.tokens, self.gpu, self.measure, self.events, self.seconds = tokens, gpu, measure, [], 0.0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if function is not torch.nn.functional.scaled_dot_product_attention or (
                args[0] if args else kwargs["query"]).shape[2] != self.tokens:
            return function(*args, **kwargs)
        args = (*args[:3], None, *args[4:]) if len(args) > 3 else args
        if "attn_mask" in kwargs:
            kwargs["attn_mask"] = None
        if not self.measure:
            return function(*args, **kwargs)
        if not self.gpu:
            start = time.perf_counter()
            out = function(*args, **kwargs)
            self.seconds += time.perf_counter() - start
            return out
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        out = function(*args, **kwargs)
        pair[1].record()
        self.events.append(pair)
        return out

    def total(self):
        if self.gpu:
            torch.cuda.synchronize()
        return self.seconds + sum(a.elapsed_time(b) for a, b in self.events) / 1000


def sdpa_backends(gpu):
    """Name and context of each SDPA that may be the best."""
    if not gpu:
        return {"default": contextlib.nullcontext}
    from torch.nn.attention import SDPBackend, sdpa_kernel
    return {
        "cudnn": lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION),
        "flash": lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION), "default": contextlib.nullcontext
    }


# ---------------------------------------------------------------- masks for cached mode


def write_masks(path, masks, layers, layout, tokens):
    """A mask file that gives every layer and step the masks {budget: esa.Mask} of one layer (docs/mask-files.md)."""
    first = next(iter(masks.values()))
    _, heads, nq, nk = first.shape
    grid, text = ",".join(map(str, layout.grid)), f"{layout.text_front},{layout.text_back}"
    about = {
        "format": "esa.masks", "format_version": 1, "model": "", "config_hash": "", "selector": "entropy",
        "mode": "fixed", "layers": layers, "steps": STEPS, "groups": 1, "branches": 1, "heads": heads,
        "tokens_q": tokens, "tokens_k": tokens, "block": f"{first.block[0]},{first.block[1]}", "causal": 0,
        "samples": 4, "scale": 0, "order": "raster", "window": "0,0,0", "protect_first_frame": 0, "grid_q": grid,
        "grid_k": grid, "text_q": text, "text_k": text, "prompts": 1, "warmup_frac": WARMUP, "dense_first_layer": 1,
        "importance": "none"
    }
    with TensorWriter(path) as writer:
        for key, value in about.items():
            writer.metadata(key, str(value))
        writer.declare("step_group", FILE_I32, (STEPS,))
        writer.declare("stored_layers", FILE_I32, (layers,))
        writer.declare("stored_groups", FILE_I32, (1,))
        for budget in masks:
            writer.declare(f"mask.{round(1000 * budget):04d}.bits", FILE_U8, (layers, 1, heads, nq, (nk + 7) // 8))
        writer.write(torch.zeros(STEPS, dtype=torch.int32))
        writer.write(torch.arange(layers, dtype=torch.int32))
        writer.write(torch.zeros(1, dtype=torch.int32))
        for mask in masks.values():
            bits = torch.from_numpy(mask.bits())
            for _ in range(layers):
                writer.write(bits)


def make_masks(model, inputs, shape, budgets, path, block):
    """Entropy masks of one later layer, written as a mask file."""
    caught = {}
    with esa.apply(model, esa.EsaConfig(selector="dense", block=block), steps=STEPS) as handle:
        run = handle._run
        attend = run.attention

        def listening(layer, query, key, value):
            if layer != 0:
                caught["q"], caught["k"] = query.clone(), key.clone()
            return attend(layer, query, key, value)
        run.attention = listening
        with two_layers(model, shape.family):
            handle.pin(STEPS - 1)
            model(**inputs)
        geometry = run.geometry
        layout, tokens, layers = Layout(grid=geometry.grid, text_front=geometry.text_front,
                                        text_back=geometry.text_back), geometry.tokens, run.layers
    from esa.core.functional import select
    masks = {
        b: select(caught["q"], caught["k"], esa.EsaConfig(budget=b, block=block), layout=layout, input_layout="BSND")
        for b in budgets
    }
    write_masks(path, masks, layers, layout, tokens)


# ---------------------------------------------------------------- measuring


class Clock:
    def __init__(self, gpu):
        self.gpu = gpu

    def __call__(self, work):
        """Seconds of one call, the GPU idle before and after."""
        if self.gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter() - start


def median(values):
    return sorted(values)[len(values) // 2]


def measure_dense(model, inputs, shape, tokens, clock, rounds_for):
    """The best SDPA, seconds per forward with it, and the share of attention."""
    gpu = clock.gpu

    def forward(measure=False):
        with Attention(tokens, gpu, measure) as mode:
            model(**inputs)
        return mode
    best = {}
    with two_layers(model, shape.family):
        for name, context in sdpa_backends(gpu).items():
            try:
                with context():
                    forward()
                    best[name] = min(clock(forward) for _ in range(2))
            except RuntimeError as error:
                print(f"  sdpa {name}: not available here ({str(error).splitlines()[0]})", flush=True)
    name = min(best, key=best.get)
    with sdpa_backends(gpu)[name]():
        first = clock(forward)
        seconds = [first] + [clock(forward) for _ in range(rounds_for(first) - 1)]
        layers = sum(1 for _ in detect(model).modules(model))
        # All layers do the same work; where a forward takes long, two of them speak for all.
        with two_layers(model, shape.family) if first > 3 else contextlib.nullcontext():
            attention = forward(measure=True).total() * (layers / 2 if first > 3 else 1)
    return name, seconds, attention


def measure_esa(model, inputs, shape, config, clock, rounds):
    """Seconds per forward after the warm-up steps, and the statistics of the last one."""
    with esa.apply(model, config, steps=STEPS) as handle:
        def forward():
            model(**inputs)
        with two_layers(model, shape.family):
            handle.pin(STEPS - 2)
            forward()
        handle.begin()
        handle.pin(STEPS - 1)
        seconds = [clock(forward) for _ in range(rounds)]
        calls = handle.layers
        first, total = handle.stats(layer=0), handle.stats()
        runs = total.calls // calls
        sparse = (total.attention_seconds - first.attention_seconds + total.select_seconds) / max(1, total.sparse_calls)
        return {
            "seconds": seconds, "step": median(seconds),
            "all_sparse": median(seconds) - (first.attention_seconds / max(1, first.calls) - sparse),
            "attention": total.attention_seconds / runs, "select": total.select_seconds / runs,
            "density": total.density, "density_asked": total.density_asked, "sparse_calls": total.sparse_calls,
            "dense_calls": total.dense_calls, "fallback_calls": total.fallback_calls, "kernel": total.kernel
        }


def whole_run(model, inputs, tokens, sdpa, config, clock):
    """Seconds of STEPS forwards dense and with esa, warm-up steps and all: does the sum of measured steps tell the
    truth?"""
    with sdpa_backends(clock.gpu)[sdpa](), Attention(tokens, clock.gpu, False):
        dense = clock(lambda: [model(**inputs) for _ in range(STEPS)])
    with esa.apply(model, config, steps=STEPS) as handle:
        def video():
            for step in range(STEPS):
                handle.pin(step)
                model(**inputs)
        sparse = clock(video)
        stats = handle.stats()
    return {
        "dense_s": dense, "esa_s": sparse, "speedup": dense / sparse, "density": stats.density,
        "sparse_calls": stats.sparse_calls, "dense_calls": stats.dense_calls
    }


def compile_blocks(model, family):
    """One graph for each kind of block, also where diffusers names no blocks to compile (CogVideoX)."""
    for name in STACKS[family]:
        for block in getattr(model, name):
            block.compile(fullgraph=True)


@contextlib.contextmanager
def without_mask(model, family):
    """HunyuanVideo's blocks without their mask, which says that all text is valid: Attention cannot take it off inside
    a graph."""
    def drop(_, args):
        return (*args[:3], None, *args[4:])
    blocks = [block for name in STACKS[family] for block in getattr(model, name)] if family == "hunyuan" else []
    hooks = [block.register_forward_pre_hook(drop) for block in blocks]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def compiled(model, inputs, shape, sdpa, config, clock, rounds):
    """Both sides with compiled blocks: dense, then esa applied on top, where another step compiles nothing.
    HunyuanVideo runs dense alone: esa reads the length of its text from the mask, which a graph does not allow."""
    compile_blocks(model, shape.family)

    def forward():
        model(**inputs)
    with sdpa_backends(clock.gpu)[sdpa](), without_mask(model, shape.family):
        first = clock(forward)
        dense = median([clock(forward) for _ in range(rounds)])
    result = {"first_s": first, "dense_s": dense}
    if shape.family == "hunyuan":
        return result
    with esa.apply(model, config, steps=STEPS) as handle:
        handle.pin(STEPS - 1)
        forward()
        with torch._dynamo.config.patch(error_on_recompile=True):
            sparse = median([clock(forward) for _ in range(rounds)])
            handle.pin(STEPS // 2)
            forward()
    return {**result, "esa_s": sparse, "speedup": dense / sparse}


def offloaded(model, inputs, shape, block, clock):
    """Blocks wait in main memory and come to the GPU one after the other (diffusers' group offloading)."""
    from diffusers.hooks import apply_group_offloading
    device = inputs["hidden_states"].device
    model.to("cpu")
    apply_group_offloading(model, onload_device=device, offload_device=torch.device("cpu"), offload_type="block_level",
                           num_blocks_per_group=1, use_stream=True, record_stream=True)
    result = {}
    for name, config in (("dense", None), ("entropy online 0.2",
                                           esa.EsaConfig(budget=0.2, block=block, warmup_frac=WARMUP))):
        with esa.apply(model, config, steps=STEPS) if config else contextlib.nullcontext() as handle:
            if handle is not None:
                handle.pin(STEPS - 1)
            model(**inputs)
            result[name] = clock(lambda: model(**inputs))
    return result


# ---------------------------------------------------------------- one shape, and the table


def tokens_of(shape):
    t, h, w = shape.grid
    return t * h * w + (0 if shape.family == "wan" else shape.text)


def run_shape(name, shape, args, deadline):
    gpu = args.device.startswith("cuda")
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[args.dtype]
    clock, start = Clock(gpu), time.perf_counter()
    block = args.block if args.block else (32 if args.mini else None)
    model, inputs = build(shape, args.device, dtype)
    built = time.perf_counter() - start
    layers = sum(1 for _ in detect(model).modules(model))
    result = {
        "shape": name, "tokens": tokens_of(shape), "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()), "build_s": built, "rows": [], "skipped": []
    }
    print(f"\n{name}: {result['tokens']} tokens, {layers} layers, {result['parameters'] / 1e9:.2f} B parameters, "
          f"made in {built:.1f} s", flush=True)

    def rounds_for(seconds):
        return args.rounds or (3 if seconds < 1 else 2 if seconds < 3 else 1)
    with torch.no_grad():
        sdpa, seconds, attention = measure_dense(model, inputs, shape, tokens_of(shape), clock, rounds_for)
        dense = median(seconds)
        result.update(sdpa=sdpa, dense_s=dense, dense_seconds=seconds, dense_attention_s=attention)
        print(f"  dense, {sdpa} SDPA: {dense:.3f} s per step, attention {100 * attention / dense:.0f} %", flush=True)
        folder = tempfile.TemporaryDirectory(prefix="esa-bench-")
        masks = os.path.join(folder.name, "masks")
        for method, settings, cached in methods(args.quick):
            if args.methods and not any(m in method for m in args.methods):
                continue
            if time.perf_counter() + 2.2 * dense > deadline:
                result["skipped"].append(method)
                continue
            if cached and not os.path.exists(masks):
                make_masks(model, inputs, shape, [s["budget"] for _, s, c in methods(args.quick) if c], masks, block)
            config = esa.EsaConfig(block=block, warmup_frac=WARMUP, tail=args.tail, masks=masks if cached else None,
                                   **settings)
            row = {"method": method, **measure_esa(model, inputs, shape, config, clock, rounds_for(dense))}
            row.update(speedup=dense / row["step"], speedup_all_sparse=dense / row["all_sparse"],
                       speedup_50_steps=1 / (WARMUP + (1 - WARMUP) * row["step"] / dense))
            bar = shape.bars.get(settings.get("budget")) if method.startswith("entropy online") else None
            row["bar"], row["ok"] = bar, None if bar is None else row["speedup"] >= bar
            result["rows"].append(row)
            print_row(row)
        if time.perf_counter() + dense < deadline:                  # how far the machine drifted meanwhile
            with sdpa_backends(gpu)[sdpa](), Attention(tokens_of(shape), gpu, False):
                result["dense_again_s"] = clock(lambda: model(**inputs))
            print(f"  dense again: {result['dense_again_s']:.3f} s")
        if name == args.whole:
            config = esa.EsaConfig(block=block, warmup_frac=WARMUP, tail=args.tail, budget=0.2)
            result["whole_run"] = whole = whole_run(model, inputs, tokens_of(shape), sdpa, config, clock)
            print(f"  {STEPS} steps for real: dense {whole['dense_s']:.1f} s, "
                  f"entropy online 0.2 {whole['esa_s']:.1f} s, {whole['speedup']:.2f}x", flush=True)
        if args.compile:
            config = esa.EsaConfig(block=block, warmup_frac=WARMUP, tail=args.tail, budget=0.2)
            result["compiled"] = both = compiled(model, inputs, shape, sdpa, config, clock, rounds_for(dense))
            if "speedup" in both:
                print(f"  blocks compiled: dense {both['dense_s']:.3f} s, entropy online 0.2 {both['esa_s']:.3f} s, "
                      f"{both['speedup']:.2f}x", flush=True)
            else:
                print(f"  blocks compiled: dense {both['dense_s']:.3f} s", flush=True)
        if args.offload and name == "wan-14b-480p" and gpu:
            result["offload"] = offloaded(model, inputs, shape, block, clock)
            print(f"  blocks offloaded to the CPU: {', '.join(f'{k} {v:.2f} s' for k, v in result['offload'].items())}")
        folder.cleanup()
    if result["skipped"]:
        print(f"  not measured for lack of time: {', '.join(result['skipped'])}")
    model = inputs = None               # a model of 28 GB goes before the next one comes
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    return result


def print_row(row):
    bar = "" if row["bar"] is None else f"  (bar {row['bar']}{'' if row['ok'] else ', MISSED'})"
    print(
        f"  {row['method']:25s} {row['step']:.3f} s  {row['speedup']:.2f}x   "
        f"all sparse {row['speedup_all_sparse']:.2f}x   50 steps {row['speedup_50_steps']:.2f}x   "
        f"density {row['density']:.3f}   attention {row['attention']:.3f} s, select {row['select']:.3f} s, "
        f"{row['kernel']}{bar}", flush=True)


def table(results):
    """The table of docs/results/diffusers-h200.md."""
    lines = [
        "| shape | attention share | method | density | s per step | speedup | all layers sparse "
        "| 50 steps, warm-up 0.2 |",
        "|---|---|---|---|---|---|---|---|"
    ]
    for r in results:
        share = f"{100 * r['dense_attention_s'] / r['dense_s']:.0f} %"
        lines.append(f"| {r['shape']} | {share} | dense ({r['sdpa']} SDPA) | 1 | {r['dense_s']:.3f} | 1 | | |")
        for row in r["rows"]:
            lines.append(
                f"| | | {row['method']} | {row['density']:.3f} | {row['step']:.3f} | {row['speedup']:.2f} "
                f"| {row['speedup_all_sparse']:.2f} | {row['speedup_50_steps']:.2f} |")
    return "\n".join(lines)


def commit():
    """Of the library that runs: a bundle says so itself, else that of this tree."""
    here = os.path.dirname(os.path.abspath(__file__))
    for folder in (os.path.dirname(os.environ.get("ESA_LIB",
                                                  "")), os.path.dirname(os.path.dirname(os.environ.get("ESA_LIB",
                                                                                                       "")))):
        path = os.path.join(folder, "COMMIT")
        if folder and os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                return file.read().strip()
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, capture_output=True, text=True,
                              check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", help=f"comma-separated, of {', '.join(SHAPES)}")
    parser.add_argument(
        "--methods",
        help="only methods whose name contains one of these, comma-separated (entropy, cached, rf_v2, ada_bsa, 0.2)")
    parser.add_argument("--quick", action="store_true", help="two shapes and fewer methods")
    parser.add_argument("--mini", action="store_true", help="tiny models instead (also on the CPU)")
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1 or cpu (with --mini)")
    parser.add_argument("--dtype", default="bf16", choices=["bf16", "fp16", "fp32"],
                        help="of weights and activations (bf16)")
    parser.add_argument("--tail", default="pooled", choices=["none", "pooled", "centroid"],
                        help="what stands in for skipped blocks (pooled)")
    parser.add_argument("--block", type=int, help="block size instead of each selector's own")
    parser.add_argument("--rounds", type=int, default=0,
                        help="timed forwards of each kind (by their length: 3, 2 or 1)")
    parser.add_argument("--limit", type=float, default=480,
                        help="seconds in all; what does not fit is named and left out (480)")
    parser.add_argument("--shape-limit", type=float, default=150, help="seconds per shape (150)")
    parser.add_argument("--offload", action="store_true", help="also run wan-14b-480p with its blocks in main memory")
    parser.add_argument("--whole", metavar="SHAPE",
                        help=f"also run {STEPS} steps of this shape for real, dense and entropy online 0.2")
    parser.add_argument("--compile", action="store_true",
                        help="also with compiled blocks on both sides, entropy online 0.2")
    parser.add_argument("--json", metavar="FILE", help="everything measured, for machines")
    args = parser.parse_args(arguments)
    args.methods = args.methods.split(",") if args.methods else None
    known = MINIS if args.mini else SHAPES
    names = args.shapes.split(",") if args.shapes else ["wan-1.3b-480p", "cogvideox-5b"
                                                        ] if args.quick and not args.mini else list(known)
    unknown = [n for n in names if n not in known]
    if unknown:
        parser.error(f"unknown shape {unknown[0]!r}, expected {', '.join(known)}")
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        parser.error("torch sees no GPU here (--mini --device cpu runs tiny models on the CPU)")
    import diffusers
    gpu = args.device.startswith("cuda")
    about = {
        "machine": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__, "diffusers": diffusers.__version__, "esa": esa.__version__, "commit": commit(),
        "command": " ".join(sys.argv), "tail": args.tail, "date": time.strftime("%Y-%m-%d", time.gmtime())
    }
    print(", ".join(f"{k} {v}" for k, v in about.items()))
    end, results = time.perf_counter() + args.limit, []
    for name in names:
        now = time.perf_counter()
        if now > end:
            print(f"\n{name}: not measured, the time is over")
            continue
        try:
            results.append(run_shape(name, known[name], args, min(end, now + args.shape_limit)))
        except torch.cuda.OutOfMemoryError as error:
            print(f"  {name}: out of memory ({str(error).splitlines()[0]})")
            gc.collect()
            torch.cuda.empty_cache()
        if args.json:                                   # after every shape: a run that is stopped leaves what it has
            with open(args.json + ".tmp", "w", encoding="utf-8") as file:
                json.dump({**about, "steps": STEPS, "warmup_frac": WARMUP, "shapes": results}, file, indent=1)
            os.replace(args.json + ".tmp", args.json)
    print("\n" + table(results))
    missed = [
        f"{r['shape']} {row['method']}: {row['speedup']:.2f}, bar {row['bar']}" for r in results for row in r["rows"]
        if row["ok"] is False
    ]
    if missed:
        print("\nmissed: " + "; ".join(missed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
