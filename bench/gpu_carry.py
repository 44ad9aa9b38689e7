# SPDX-License-Identifier: Apache-2.0
"""The section "carry" of bench/gpu.py: what a carried difference costs. One run times calls that add d beside the same
calls without one, and anchors (a dense call and one that makes d) beside a dense and a sparse call, at the densities
that presets use. The tail has two levels. With "scatter" every head has a random order of its own, the worst that an
order can be for rows of d; real orders keep neighbours together."""
import torch

import esa_ctypes as esa
import gpu_measure as g

DENSITIES = (0.04, 0.08, 0.12, 0.2)
FINE_SHARE, FINE = 0.1, 8           # of the blocks; means per block
ADD_BAR, ANCHOR_BAR = 1.02, 1.05


def carried(shape, gen, o):
    """A d in E4M3 and one in bf16 of the size of what sparse attention leaves out: {name: Carry}."""
    size = (1, *shape)
    codes = (torch.randn(size, device="cuda", generator=gen) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(size[:3], device="cuda", generator=gen) * 1e-3
    values = torch.randn(size, device="cuda", generator=gen).mul_(0.1).to(torch.bfloat16)
    return {"e4m3": esa.Carry(o, codes, scale), "bf16": esa.Carry(o, values)}


def masks(ctx, shape, density, gen):
    """The same random levels in order, and with random orders of all heads."""
    H, N = g.SHAPES[shape][:2]
    n = -(-N // 128)
    levels = g.random_levels(H, n, n, density, FINE_SHARE, gen)
    order = torch.rand(H, N, device="cuda", generator=gen).argsort(-1).to(torch.int32).cpu().numpy()
    return {"": ctx.mask_from_levels(levels, FINE, N, N, 128, 128),
            "scatter": ctx.mask_from_levels(levels, FINE, N, N, 128, 128, order)}


def select_params(ctx, order):
    """What a plan must know of the masks of `order` to have room for rows in their order; None: in order."""
    if not order:
        return None
    p = ctx.lib.c.esa_select_params_default(esa.SELECTORS["error"])
    p.tail, p.fine, p.block_q, p.block_k, p.layout.order = esa.LEVELS, FINE, 128, 128, esa.ORDERS["adaptive"]
    return p


def jobs_of(bench, q, k, v, o, shape, density, precision, carries, gen):
    """Each name is (what, order): plain, add of either format, then pairs of calls. Each plan has its workspace."""
    dense = bench.ours(bench.ctx, None, q, k, v, o, precision=precision)[1]
    jobs = {}
    for order, mask in masks(bench.ctx, shape, density, gen).items():
        plan = esa.Plan(bench.ctx, q, k, select_params(bench.ctx, order), tail=esa.LEVELS, precision=precision)
        ws = bench.workspace(plan)
        plain = plan.attention(mask, q, k, v, o, ws)
        jobs["plain", order] = plain
        for name, d in carries.items():
            jobs[f"add {name}", order] = plan.attention_carry(mask, q, k, v, o, ws, d, esa.ADD)
        make = plan.attention_carry(mask, q, k, v, o, ws, carries["e4m3"], esa.MAKE)
        jobs["dense and sparse", order] = lambda plain=plain: (dense(), plain())
        jobs["anchor", order] = lambda make=make: (dense(), make())
    return jobs, plan.kernel(mask, q, k, v, o)


def ratios(bench, times, name, kernel):
    """One row of the table for each order."""
    rows = []
    for order in ("", "scatter"):
        if any(order == at and not t for (_, at), t in times.items()):
            continue
        ms = {what: g.median(t) for (what, at), t in times.items() if at == order}
        row = [f"{name} {order}".strip(), f"{ms['plain']:.3f}"]
        for what, base, bar in (("add e4m3", "plain", ADD_BAR), ("add bf16", "plain", None),
                                ("anchor", "dense and sparse", ANCHOR_BAR)):
            ratio = ms[what] / ms[base]
            bench.report.add("carry", f"{row[0]} {what}", ratio, bar, higher=False, ms=ms[what], ms_base=ms[base],
                             kernel=kernel)
            row.append(f"{ratio:.4f}{'' if bar is None or ratio <= bar else ' MISSED'}")
        rows.append(row)
    return rows


def run(bench):
    rows = []
    for shape in bench.a.shapes:
        H, N, D = g.SHAPES[shape][:3]
        gen = bench.generator()
        q, k, v = g.tensors(shape, gen)
        o = torch.zeros_like(q)
        carries = carried((H, N, D), gen, o)
        for precision in (16, 8):
            for density in DENSITIES:
                jobs, kernel = jobs_of(bench, q, k, v, o, shape, density, precision, carries, gen)
                if precision == 8 and not kernel.endswith("8bit"):
                    break                           # the GPU has no such kernel for this shape
                times, failed = bench.measure(jobs)
                for name, why in failed.items():
                    bench.report.failed("carry", f"{shape} {density} {' '.join(name)}", why)
                if not failed:
                    rows += ratios(bench, times, f"{shape} {precision} bits {density}", kernel)
                del jobs
        del q, k, v, o, carries
        torch.cuda.empty_cache()
    return rows
