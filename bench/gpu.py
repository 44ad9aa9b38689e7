#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Speed of the CUDA backend beside torch's attentions, in one process, interleaved: torch SDPA (cuDNN, flash), compiled
FlexAttention and FlashAttention-4 (if it is installed) over the same blocks, and ours, in 16 and in 8 bits, through
libesa's plan tier on torch tensors and torch's stream. One table per section, the wanted figure (bar) beside the
measured one. Needs a GPU, torch, and libesa with its plugin (make cuda, or a bundle).

    bench/gpu.py --json gpu.json                       everything
    bench/gpu.py --quick                               wan-1.3b-480p alone, few rounds
    bench/gpu.py --shapes wan-1.3b-480p --sections speed,tail --rounds 9 --rest 0.1

Ratios are speedup over cuDNN's dense attention of the same run x realised density: 1.00 is perfect scaling of
cuDNN's rate."""
import argparse
import json
import math
import sys

import torch

import esa_ctypes as esa
import gpu_carry
import gpu_measure as g

SECTIONS = ("speed", "ragged", "tail", "levels", "carry", "select", "online", "sm80", "numerics")
BARS = {  # speedup x density at dense, 0.5, 0.2, 0.1
    "wan-1.3b-720p": (0.95, 0.95, 0.92, 0.88), "wan-1.3b-480p": (0.95, 0.92, 0.88, 0.80),
    "cogvideox-5b": (0.95, 0.92, 0.86, 0.75), "hunyuan-544p": (0.95, 0.95, 0.92, 0.88)
}
FA4_BAR = 1.02
# plain speedup of 8 bits over cuDNN dense at dense, 0.5, 0.2, 0.1, rounding included
EIGHT = "esa 8 bits"
EIGHT_BARS = {"wan-1.3b-720p": (1.58, 3.1, 7.2, 13.0), "wan-1.3b-480p": (None, 2.9, 6.5, 11.0)}
# milliseconds
SELECT_BARS = {("entropy", "wan-1.3b-720p"): 0.8, ("entropy", "wan-1.3b-480p"): 0.25, ("rf_v2", "wan-1.3b-720p"): 0.35,
               ("rf_v2", "wan-1.3b-480p"): 0.15}
# speedup at 0.2
ONLINE_BARS = {("entropy", "wan-1.3b-720p"): 4.2, ("rf_v2", "wan-1.3b-720p"): 4.3, ("ada_bsa", "wan-1.3b-720p"): 3.2}
# SpargeAttn's 8-bit kernel on one H200, plain speedup over cuDNN dense: measured apart, not in this run.
SPARGE = {("wan-1.3b-480p", 0.2): 4.26, ("wan-1.3b-480p", 0.1): 6.38, ("cogvideox-5b", 0.2): 3.82,
          ("cogvideox-5b", 0.1): 5.71, ("wan-1.3b-720p", 0.2): 5.50, ("wan-1.3b-720p", 0.1): 9.23}
DEFAULT = "wan-1.3b-480p,cogvideox-5b,wan-1.3b-720p,hunyuan-544p"
SELECTORS = {"entropy": esa.ENTROPY, "rf_v2": esa.RF_V2, "ada_bsa": esa.ADA_BSA}


class Report:
    def __init__(self):
        self.rows, self.missed = [], []

    def add(self, section, name, value, bar=None, higher=True, **more):
        ok = None if bar is None else bool(value >= bar if higher else value <= bar)
        self.rows.append(dict(section=section, name=name, value=value, bar=bar, ok=ok, **more))
        if ok is False:
            self.missed.append(f"{section} {name}: {value:.3f}, bar {bar}")
        return ok

    def failed(self, section, name, why):
        self.rows.append(dict(section=section, name=name, value=None, failed=why))
        self.missed.append(f"{section} {name}: {why}")


def cell(value, bar, higher=True, digits=3):
    if bar is None:
        return f"{value:.{digits}f}"
    reached = value >= bar if higher else value <= bar
    return f"{value:.{digits}f} ({'>=' if higher else '<='} {bar}{'' if reached else ' MISSED'})"


def print_table(title, header, rows):
    print(f"\n{title}")
    rows = [header] + rows
    widths = [max(len(r[i]) for r in rows) for i in range(len(header))]
    for r in rows:
        print("  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths))).rstrip(),
              flush=True)


class Bench:
    def __init__(self, a):
        self.a, self.report = a, Report()
        self.lib = esa.Library(a.lib)
        self.stream = torch.cuda.Stream()
        torch.cuda.set_stream(self.stream)          # torch's work and ours share one stream, so graphs can capture both
        self.ctx = esa.Ctx(self.lib, self.stream.cuda_stream, torch.cuda.current_device())
        self.head = g.machine(self.ctx)

    def generator(self):
        return torch.Generator("cuda").manual_seed(self.a.seed)

    def workspace(self, *plans):
        return torch.empty(max([64] + [p.workspace for p in plans]), dtype=torch.uint8, device="cuda")

    def ours(self, ctx, mask, q, k, v, o, tail=esa.NONE, precision=16):
        plan = esa.Plan(ctx, q, k, tail=tail, precision=precision)
        return plan, plan.attention(mask, q, k, v, o, self.workspace(plan))

    def measure(self, jobs):
        return g.measure(jobs, self.a.rounds, self.a.rest)

    # ---- dense and masks given ----

    def speed(self):
        for shape in self.a.shapes:
            H, N, D = g.SHAPES[shape][:3]
            gen = self.generator()
            q, k, v = g.tensors(shape, gen)
            o = torch.empty_like(q)
            jobs, density, kernel = {("cudnn", 1.0): g.cudnn(q, k, v), ("flash", 1.0): g.flash(q, k, v)}, {}, {}
            for bq, bk in ((128, 128), (256, 128)):
                for d in g.DENSITIES:
                    name = (f"esa {bq}x{bk}", d)
                    if d == 1.0 and bq != 128:
                        continue                    # dense is the same call
                    kept = None if d == 1.0 else g.random_kept(H, -(-N // bq), -(-N // bk), d, gen)
                    mask = None if d == 1.0 else g.esa_mask(self.ctx, kept, N, bq, bk)
                    plan, jobs[name] = self.ours(self.ctx, mask, q, k, v, o)
                    kernel[name] = plan.kernel(mask, q, k, v, o)
                    density[name] = 1.0 if d == 1.0 else kept.float().mean().item()
                    plan, eight = self.ours(self.ctx, mask, q, k, v, o, precision=8) if bq == 128 else (None, None)
                    if plan and plan.kernel(mask, q, k, v, o).endswith("8bit"):
                        jobs[(EIGHT, d)], density[(EIGHT, d)] = eight, density[name]
                        kernel[(EIGHT, d)] = plan.kernel(mask, q, k, v, o)
                    if bq == 128 and not self.a.no_flex:
                        full = torch.ones(1, H, -(-N // bq), -(-N // bk), dtype=torch.bool,
                                          device="cuda") if d == 1.0 else kept
                        try:
                            jobs[("flex", d)] = g.flex(q, k, v, full, bq, bk)
                            density[("flex", d)] = density[name]
                        except Exception as error:
                            self.report.failed("speed", f"{shape} flex {d}", g.reason(error))
                    theirs = g.fa4(q, k, v, kept, bq, bk) if bq == 128 else None
                    if theirs:
                        jobs[("fa4", d)], density[("fa4", d)] = theirs, density[name]
            print(f"{shape}: {', '.join(sorted(set(kernel.values())))} kernels", flush=True)
            times, failed = self.measure(jobs)
            for name, why in failed.items():
                self.report.failed("speed", f"{shape} {name[0]} {name[1]}", why)
            if ("cudnn", 1.0) in times:
                self.speed_table(shape, times, failed, density, kernel)
            if ("flex", 0.2) in times and ("esa 128x128", 0.2) in times:    # the same blocks, so the same numbers
                jobs[("esa 128x128", 0.2)]()
                off = (jobs[("flex", 0.2)]().float() - o.float()).abs().max().item()
                self.report.add("speed", f"{shape} largest difference from FlexAttention at 0.2", off, 0.05,
                                higher=False)
                print(f"  largest difference from FlexAttention at 0.2: {off:.1e}")
            del q, k, v, o, jobs
            torch.cuda.empty_cache()

    def speed_table(self, shape, times, failed, density, kernel):
        H, N, D = g.SHAPES[shape][:3]
        base = g.median(times[("cudnn", 1.0)])
        rows = []
        for version in dict.fromkeys(n[0] for n in [*times, *failed]):
            line = [version]
            for i, d in enumerate(g.DENSITIES):
                t = times.get((version, d))
                if t is None:
                    line.append("failed" if (version, d) in failed else "-")
                    continue
                real, ms = density.get((version, d), 1.0), g.median(t)
                ratio, speedup = base / ms * real, base / ms
                bar = BARS.get(shape, (None,) * 4)[i] if version == "esa 128x128" else None
                rate = 4 * H * N * N * D * real / ms / 1e9
                self.report.add("speed", f"{shape} {version} {d}", ratio, bar, ms=ms, ms_min=min(t), ms_max=max(t),
                                density=real, speedup=speedup, tflops=rate, of_matmul=rate / self.head["matmul_tflops"],
                                kernel=kernel.get((version, d)))
                line.append(f"{cell(ratio, bar)} {ms:.2f} ms")
                if version == EIGHT:
                    self.report.add("speed", f"{shape} {d} in 8 bits, times as fast as cuDNN dense", speedup,
                                    EIGHT_BARS.get(shape, (None,) * 4)[i])
                if version == "esa 128x128" and ("flex", d) in times:
                    self.report.add("speed", f"{shape} {d} times as fast as FlexAttention",
                                    g.median(times[("flex", d)]) / ms, 1.0)
                if version == "esa 128x128" and ("fa4", d) in times:
                    self.report.add("speed", f"{shape} {d} times as fast as FlashAttention-4",
                                    g.median(times[("fa4", d)]) / ms, FA4_BAR)
                if version == "esa 128x128" and (shape, d) in SPARGE:
                    must = shape != "wan-1.3b-720p"     # there it is the goal, not the bar
                    self.report.add("speed", f"{shape} {d} over SpargeAttn's 8-bit kernel (measured apart)",
                                    speedup / SPARGE[(shape, d)], 1.0 if must else None)
            rows.append(line)
        print_table(f"{shape} (H {H}, N {N}, D {D}): speedup over cuDNN x density",
                    ["", *("dense" if d == 1.0 else str(d) for d in g.DENSITIES)], rows)
        for row in self.report.rows:
            if row["section"] == "speed" and row["name"].startswith(shape) and any(
                    word in row["name"] for word in ("FlexAttention", "FlashAttention-4", "Sparge", "8 bits, times")):
                print(f"  {row['name']}: {cell(row['value'], row['bar'])}")

    # ---- rows of different length ----

    def ragged(self):
        rows = []
        for shape in self.a.shapes:
            H, N, D = g.SHAPES[shape][:3]
            gen, n = self.generator(), -(-N // 128)
            q, k, v = g.tensors(shape, gen)
            o = torch.empty_like(q)
            heads = torch.linspace(0.1, 0.9, H, device="cuda")[torch.randperm(H, device="cuda",
                                                                              generator=gen)].view(1, H, 1, 1)
            uneven = {
                "heads 0.1 to 0.9": heads.expand(1, H, n, 1),
                "heads 0.1 to 0.9, rows +-30 %": heads *
                                                 (0.7 + 0.6 * torch.rand(1, H, n, 1, device="cuda", generator=gen))
            }
            jobs, density = {}, {}
            for name, share in uneven.items():
                kept = g.random_kept(H, n, n, share, gen)
                density[name] = kept.float().mean().item()
                _, jobs[name] = self.ours(self.ctx, g.esa_mask(self.ctx, kept, N, 128, 128), q, k, v, o)
                even = g.random_kept(H, n, n, density[name], gen)
                density[name, "uniform"] = even.float().mean().item()
                _, jobs[name, "uniform"] = self.ours(self.ctx, g.esa_mask(self.ctx, even, N, 128, 128), q, k, v, o)
            times, failed = self.measure(jobs)
            for name in uneven:
                if name not in times or (name, "uniform") not in times:
                    self.report.failed("ragged", f"{shape} {name}", failed.get(name) or failed.get((name, "uniform")))
                    continue
                a, b = g.median(times[name]), g.median(times[name, "uniform"])
                loss = 100 * (a / density[name] / (b / density[name, "uniform"]) - 1)
                self.report.add("ragged", f"{shape} {name}", loss, 5.0, higher=False, ms=a, ms_uniform=b,
                                density=density[name])
                rows.append(
                    [f"{shape} {name}", f"{a:.3f}", f"{b:.3f}", f"{density[name]:.4f}",
                     cell(loss, 5.0, False, 1)])
            torch.cuda.empty_cache()
        print_table("ragged rows against uniform ones of the same mean",
                    ["", "ragged ms", "uniform ms", "density", "loss %"], rows)

    # ---- what the tail costs ----

    def tail(self):
        rows = []
        for shape in self.a.shapes:
            H, N, D = g.SHAPES[shape][:3]
            gen, n = self.generator(), -(-N // 128)
            q, k, v = g.tensors(shape, gen)
            o = torch.empty_like(q)
            mask = g.esa_mask(self.ctx, g.random_kept(H, n, n, 0.2, gen), N, 128, 128)
            jobs = {name: self.ours(self.ctx, mask, q, k, v, o, tail)[1] for tail, name in enumerate(esa.TAILS)}
            times, failed = self.measure(jobs)
            bar = 12.0 if D == 64 else 8.0
            for name in esa.TAILS:
                if name not in times:
                    self.report.failed("tail", f"{shape} {name}", failed[name])
                    continue
                ms, plain = g.median(times[name]), g.median(times["none"])
                cost = 100 * (ms / plain - 1)
                wanted = None if name == "none" else bar
                self.report.add("tail", f"{shape} {name}", cost, wanted, higher=False, ms=ms)
                rows.append([f"{shape} {name}", f"{ms:.3f}", cell(cost, wanted, False, 1)])
            torch.cuda.empty_cache()
        print_table("the tail at density 0.2", ["", "ms", "cost %"], rows)

    # ---- what the fine level costs beyond the pooled tail ----

    def levels(self):
        rows = []
        for shape in self.a.shapes:
            H, N, D = g.SHAPES[shape][:3]
            gen = self.generator()
            q, k, v = g.tensors(shape, gen)
            o = torch.empty_like(q)
            for bq in (128, 256):
                levels = g.random_levels(H, -(-N // bq), -(-N // 128), 0.2, 0.1, gen)
                jobs = {}
                for fine in (2, 4, 8, 16):
                    mask = self.ctx.mask_from_levels(levels, fine, N, N, bq, 128)
                    _, jobs[fine] = self.ours(self.ctx, mask, q, k, v, o, esa.LEVELS)
                _, jobs["pooled"] = self.ours(self.ctx, mask, q, k, v, o, esa.POOLED)
                times, failed = self.measure(jobs)
                for fine in (2, 4, 8, 16):
                    name = f"{shape} {bq}x128 {fine} means"
                    if fine not in times or "pooled" not in times:
                        self.report.failed("levels", name, failed.get(fine) or failed.get("pooled"))
                        continue
                    ms, pooled = g.median(times[fine]), g.median(times["pooled"])
                    cost = 100 * (ms / pooled - 1)
                    bar = 6.0 if shape == "wan-1.3b-720p" and bq == 256 and fine in (4, 8) else None
                    self.report.add("levels", name, cost, bar, higher=False, ms=ms, ms_pooled=pooled)
                    rows.append([name, f"{ms:.3f}", f"{pooled:.3f}", cell(cost, bar, False, 1)])
            del q, k, v, o, jobs
            torch.cuda.empty_cache()
        print_table("density 0.2, 0.1 of the blocks on the fine level", ["", "ms", "pooled ms", "cost %"], rows)

    def carry(self):
        rows = gpu_carry.run(self)
        print_table("with a carried difference / without, density, 0.1 of the blocks on the fine level",
                    ["", "plain ms", "add E4M3", "add bf16", "anchor"], rows)

    # ---- mask making, and mask making with attention ----

    def selection(self, shape, selector, q, k, budget=0.2, applied=1):
        plan = esa.Plan(self.ctx, q, k, g.select_params(self.ctx, shape, selector, budget, applied))
        return plan, plan.mask(), self.workspace(plan)

    def select(self):
        rows = []
        for shape in self.a.shapes:
            q, k = g.tensors(shape, self.generator(), 2)
            jobs, density = {}, {}
            for name, selector in SELECTORS.items():
                for applied in (1, 0):
                    label = name if applied else f"{name}, order gathered"
                    try:
                        plan, mask, ws = self.selection(shape, selector, q, k, applied=applied)
                        jobs[label] = g.Graph(plan.select(mask, q, k, ws), self.stream)
                        jobs[label]()
                        torch.cuda.synchronize()
                        density[label] = (mask.info().density, plan.workspace)
                        jobs[label].keep = (plan, mask, ws)
                    except Exception as error:
                        jobs.pop(label, None)
                        self.report.failed("select", f"{shape} {label}", g.reason(error))
                        rows.append([f"{shape} {label}", "failed", g.reason(error)[:60], ""])
            times, failed = self.measure(jobs)
            for label, t in times.items():
                ms, bar = g.median(t), SELECT_BARS.get((label, shape))
                self.report.add("select", f"{shape} {label}", ms, bar, higher=False, density=density[label][0],
                                workspace_bytes=density[label][1])
                rows.append([
                    f"{shape} {label}",
                    cell(ms, bar, False), f"{density[label][0]:.4f}", f"{density[label][1] / 1e6:.1f}"
                ])
            torch.cuda.empty_cache()
        print_table("making a mask at budget 0.2, graph replay", ["", "ms", "density", "workspace MB"], rows)

    def online(self):
        rows = []
        for shape in self.a.shapes:
            q, k, v = g.tensors(shape, self.generator())
            o = torch.empty_like(q)
            jobs, density = {"cudnn": g.cudnn(q, k, v)}, {}
            for name, selector in SELECTORS.items():
                try:
                    plan, mask, ws = self.selection(shape, selector, q, k)
                    choose, attend = plan.select(mask, q, k, ws), plan.attention(mask, q, k, v, o, ws)
                    choose()
                    density[name] = mask.info().density
                    jobs[name] = lambda choose=choose, attend=attend: (choose(), attend())
                except Exception as error:
                    self.report.failed("online", f"{shape} {name}", g.reason(error))
            times, failed = self.measure(jobs)
            for name in density:
                if name not in times or "cudnn" not in times:
                    self.report.failed("online", f"{shape} {name}", failed.get(name, "no baseline"))
                    continue
                speedup, bar = g.median(times["cudnn"]) / g.median(times[name]), ONLINE_BARS.get((name, shape))
                self.report.add("online", f"{shape} {name}", speedup, bar, ms=g.median(times[name]),
                                density=density[name])
                rows.append([
                    f"{shape} {name}", f"{g.median(times[name]):.3f}", f"{density[name]:.4f}",
                    cell(speedup, bar, digits=2)
                ])
            torch.cuda.empty_cache()
        print_table("online at budget 0.2 (mask + attention, order applied) against cuDNN dense",
                    ["", "ms", "density", "speedup"], rows)

    # ---- the kernels of older GPUs ----

    def sm80(self):
        ctx = esa.Ctx(self.lib, self.stream.cuda_stream, torch.cuda.current_device(), level="sm80")
        rows = []
        for shape in self.a.shapes:
            H, N, D = g.SHAPES[shape][:3]
            gen, n = self.generator(), -(-N // 128)
            q, k, v = g.tensors(shape, gen)
            o = torch.empty_like(q)
            jobs, density = {"flash": g.flash(q, k, v)}, {}
            for d in g.DENSITIES:
                kept = None if d == 1.0 else g.random_kept(H, n, n, d, gen)
                mask = None if d == 1.0 else g.esa_mask(ctx, kept, N, 128, 128)
                plan, jobs[d] = self.ours(ctx, mask, q, k, v, o)
                density[d] = 1.0 if d == 1.0 else kept.float().mean().item()
                kernel = plan.kernel(mask, q, k, v, o)
            times, failed = self.measure(jobs)
            for d in g.DENSITIES:
                if d not in times or "flash" not in times or 1.0 not in times:
                    self.report.failed("sm80", f"{shape} {d}", failed.get(d) or failed.get("flash"))
                    continue
                ms = g.median(times[d])
                against = g.median(times["flash"] if d == 1.0 else times[1.0]) / ms * density[d]
                bar = 0.95 if d == 1.0 else 0.85
                self.report.add("sm80", f"{shape} {d}", against, bar if d == 1.0 else None, ms=ms, density=density[d],
                                kernel=kernel, tflops=4 * H * N * N * D * density[d] / ms / 1e9)
                rows.append([
                    f"{shape} {'dense / flash' if d == 1.0 else f'{d} / own dense'}", f"{ms:.3f}",
                    cell(against, bar if d == 1.0 else None)
                ])
            torch.cuda.empty_cache()
        ctx.free()
        print_table("sm80 kernels: dense against torch's flash backend, then speedup over own dense x density",
                    ["", "ms", "ratio"], rows)

    # ---- errors ----

    def numerics(self):
        rows = []
        for shape in self.a.shapes:
            H, N, D = g.SHAPES[shape][:3]
            gen, n = self.generator(), -(-N // 128)
            q, k, v = g.tensors(shape, gen)
            pick = torch.randperm(N, device="cuda", generator=gen)[:256]
            for d in (1.0, 0.2):
                kept = None if d == 1.0 else g.random_kept(H, n, n, d, gen)
                mask = None if d == 1.0 else g.esa_mask(self.ctx, kept, N, 128, 128)
                for factor in (1, 2):  # with q doubled, a few keys dominate many rows
                    queries = q * factor
                    o, again = (torch.full_like(q, math.nan) for _ in range(2))
                    self.ours(self.ctx, mask, queries, k, v, o)[1]()
                    self.ours(self.ctx, mask, queries, k, v, again)[1]()
                    torch.cuda.synchronize()
                    same = torch.equal(o.view(torch.int16), again.view(torch.int16))
                    name = f"{shape} {d}{', q doubled' if factor == 2 else ''}"
                    rows.append([
                        name, *self.errors(name, kept, pick, queries, k, v, o), "same" if same else "DIFFERENT"
                    ])
                    self.report.add("numerics", f"{name} same bits in two runs", float(same), 1.0)
            torch.cuda.empty_cache()
        print_table("largest error against fp32 over 256 rows of two heads, and torch's own bf16",
                    ["", "esa", "torch", "ratio", "bits"], rows)

    def errors(self, name, kept, pick, q, k, v, o):
        worst = []
        for h in (0, q.shape[1] - 1):
            rows, keys, values = q[:, h:h + 1, pick], k[:, h:h + 1], v[:, h:h + 1]
            allowed = torch.ones(len(pick), k.shape[2], dtype=torch.bool, device="cuda")
            if kept is not None:
                allowed = kept[0, h, pick // 128].repeat_interleave(128, 1)[:, :k.shape[2]]
            s = (rows.float() @ keys.float().transpose(-1, -2)) / math.sqrt(q.shape[3])
            ref = torch.softmax(s.masked_fill(~allowed, -math.inf), -1) @ values.float()
            own = torch.nn.functional.scaled_dot_product_attention(rows, keys, values, attn_mask=allowed[None, None])
            worst.append(
                ((o[:, h:h + 1, pick].float() - ref).abs().max().item(), (own.float() - ref).abs().max().item()))
        ours, torchs = max(w[0] for w in worst), max(w[1] for w in worst)
        ratio = ours / max(torchs, 1e-12) if ours == ours else math.inf
        self.report.add("numerics", f"{name} error over torch's", ratio, 2.0, higher=False, error=ours,
                        torch_error=torchs)
        return f"{ours:.2e}", f"{torchs:.2e}", cell(ratio, 2.0, False, 2)


def main():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--shapes", default=DEFAULT, help=f"of {','.join(g.SHAPES)}")
    ap.add_argument("--sections", default=",".join(SECTIONS), help=f"of {','.join(SECTIONS)}")
    ap.add_argument("--rounds", type=int, default=5)
    ap.add_argument("--rest", type=float, default=0.0,
                    help="seconds of idling before each timing: higher clocks, less spread")
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--no-flex", action="store_true", help="leave FlexAttention out (it compiles for every shape)")
    ap.add_argument("--quick", action="store_true", help="wan-1.3b-480p, three rounds, no FlexAttention")
    ap.add_argument("--lib", help="path of libesa.so (default: $ESA_LIB, the build folders, the bundle)")
    ap.add_argument("--json", metavar="FILE")
    a = ap.parse_args()
    if a.quick:
        a.shapes, a.rounds, a.no_flex = "wan-1.3b-480p", 3, True
    a.shapes, a.sections = a.shapes.split(","), a.sections.split(",")
    for given, known, word in ((a.shapes, g.SHAPES, "shape"), (a.sections, SECTIONS, "section")):
        for name in given:
            if name not in known:
                ap.error(f"unknown {word} '{name}', expected some of {', '.join(known)}")
    if not torch.cuda.is_available():
        sys.exit("gpu.py: torch sees no GPU on this machine: nothing was measured")
    try:
        bench = Bench(a)
    except esa.EsaError as error:
        sys.exit(f"gpu.py: {error}")
    print(", ".join(f"{k} {v}" for k, v in bench.head.items() if k != "command"), flush=True)
    bench.head["matmul_tflops"] = g.matmul_rate(a.rounds)
    print(f"8192^3 bf16 product: {bench.head['matmul_tflops']:.0f} TFLOP/s", flush=True)
    for section in a.sections:
        try:
            getattr(bench, section)()
        except Exception as error:              # the other sections are still worth having
            bench.report.failed(section, "section", g.reason(error))
            print(f"{section}: {g.reason(error)}", flush=True)
        if a.json:
            with open(a.json, "w") as f:        # after every section: a run that is cut short leaves what it had
                json.dump(dict(machine=bench.head, rounds=a.rounds, rest=a.rest, rows=bench.report.rows), f, indent=1,
                          default=str)
    wanted = [r for r in bench.report.rows if r.get("bar") is not None]
    print(f"\n{sum(r['ok'] for r in wanted)} of {len(wanted)} bars reached" + "".join(f"\n  {m}"
                                                                                      for m in bench.report.missed))


if __name__ == "__main__":
    main()
