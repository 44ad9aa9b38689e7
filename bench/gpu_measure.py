# SPDX-License-Identifier: Apache-2.0
"""What bench/gpu.py measures with: shapes, masks, torch's attentions, interleaved timing, the machine."""
import math
import pathlib
import random
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import esa_ctypes as esa
import shapes

SHAPES = dict(shapes.SHAPES, small=shapes.Shape(4, 4096, 128, (4, 32, 32), (0, 0)))     # small: to try the script
DENSITIES = (1.0, 0.5, 0.2, 0.1)


def tensors(shape, gen, count=3, dtype=torch.bfloat16):
    H, N, D = SHAPES[shape][:3]
    return [torch.randn(1, H, N, D, device="cuda", generator=gen).to(dtype) for _ in range(count)]


# ---- masks ----

def random_kept(H, nq, nk, density, gen):
    """bool [1,H,nq,nk], each row its own uniformly random set; density: a number, or a tensor that broadcasts to
    [1,H,nq,1]."""
    if torch.is_tensor(density):
        keep = (density * nk).round().clamp(1, nk)
    else:
        keep = max(1 if density > 0 else 0, min(nk, round(density * nk)))
    rank = torch.rand(1, H, nq, nk, device="cuda", generator=gen).argsort(-1).argsort(-1)
    return rank < keep


def random_levels(H, nq, nk, density, share, gen):
    """uint8 [1,H,nq,nk] numpy: each row its own random blocks, density of them exact (0), share fine (1), others 2."""
    exact, fine = round(density * nk), round(share * nk)
    rank = torch.rand(1, H, nq, nk, device="cuda", generator=gen).argsort(-1).argsort(-1)
    return ((rank >= exact).to(torch.uint8) + (rank >= exact + fine).to(torch.uint8)).cpu().numpy()


def esa_mask(ctx, kept, N, block_q, block_k):
    """The same set as a mask of ours on the GPU."""
    import numpy
    bits = numpy.packbits(kept.cpu().numpy(), axis=-1, bitorder="little")
    B, H = kept.shape[:2]
    return ctx.mask_from_bits(numpy.ascontiguousarray(bits), B, H, N, N, block_q, block_k)


# ---- torch ----

def sdpa(backend, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v)


def cudnn(q, k, v):
    return lambda: sdpa(SDPBackend.CUDNN_ATTENTION, q, k, v)


def flash(q, k, v):
    return lambda: sdpa(SDPBackend.FLASH_ATTENTION, q, k, v)


def lists_of(kept):
    """The kept blocks of every row: their number, and their indices before those of the others."""
    number = kept.sum(-1).to(torch.int32).contiguous()
    index = torch.sort((~kept).to(torch.uint8), dim=-1, stable=True).indices.to(torch.int32).contiguous()
    return number, index


def fa4(q, k, v, kept, block_q, block_k):
    """FlashAttention-4 over the same kept blocks (None: dense), on tensors in its own layout. None if it is not
    installed."""
    from esa.core.library import EsaError
    from esa.diffusers.fa4 import keywords_of, load
    try:
        function, lists = load()
    except EsaError:
        return None
    rows = [x.transpose(1, 2).contiguous() for x in (q, k, v)]
    keywords = {} if kept is None else keywords_of(lists, *lists_of(kept), (block_q, block_k))

    def run():
        result = function(*rows, **keywords)
        return (result[0] if isinstance(result, tuple) else result).transpose(1, 2)
    return run


_compiled = None


def flex(q, k, v, kept, block_q, block_k):
    """Compiled FlexAttention over the same kept blocks; all of them are full blocks, so no element is masked one by
    one."""
    global _compiled
    from torch.nn.attention.flex_attention import BlockMask, flex_attention
    if _compiled is None:
        try:
            torch._dynamo.config.cache_size_limit = 64      # one entry per shape
        except AttributeError:
            pass                                            # its name has changed: the default serves four shapes, too
        _compiled = torch.compile(flex_attention, dynamic=False)
    number, index = lists_of(kept)
    N = q.shape[2]
    extra = dict(seq_lengths=(N, N), compute_q_blocks=False)
    while True:
        try:
            mask = BlockMask.from_kv_blocks(torch.zeros_like(number), torch.zeros_like(index), number, index,
                                            BLOCK_SIZE=(block_q, block_k), **extra)
            break
        except TypeError:           # an older torch knows fewer of these
            if not extra:
                raise
            extra.popitem()
    return lambda: _compiled(q, k, v, block_mask=mask)


# ---- timing ----

def timed(fn, reps):
    """Milliseconds per call."""
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    a.record()
    for _ in range(reps):
        fn()
    b.record()
    b.synchronize()
    return a.elapsed_time(b) / reps


def reason(error):
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{type(error).__name__}: {lines[0][:160]}"


def measure(jobs, rounds, rest, least_ms=8.0):
    """jobs: {name: callable}. Every round runs all of them in a new order: a kernel that follows a cool one finds a
    higher clock. Returns {name: [ms]} and {name: why} for those that failed."""
    times, failed, reps = {}, {}, {}
    for name, fn in jobs.items():
        start = time.time()
        try:
            fn()
            torch.cuda.synchronize()
            reps[name] = max(1, math.ceil(least_ms / max(timed(fn, 1), 1e-3)))
            times[name] = []
        except Exception as error:          # a backend that is missing or does not compile must not take the rest along
            failed[name] = reason(error)
            print(f"  {name}: {failed[name]}", flush=True)
        if time.time() - start > 5:
            print(f"  {name}: first call took {time.time() - start:.0f} s", flush=True)
    order = list(times)
    for _ in range(rounds):
        random.shuffle(order)
        for name in order:
            if rest:
                torch.cuda.synchronize()
                time.sleep(rest)
            times[name].append(timed(jobs[name], reps[name]))
    return times, failed


def median(times):
    return statistics.median(times)


class Graph:
    """fn captured on the benchmark's stream and replayed."""

    def __init__(self, fn, stream):
        fn()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            fn()

    def __call__(self):
        self.graph.replay()


# ---- the machine ----

def text_of(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def commit():
    root = pathlib.Path(__file__).resolve().parent.parent
    file = root / "COMMIT"                  # written by make bundle; a bundle may lie inside a tree of another commit
    if file.exists():
        return file.read_text().strip()
    return text_of("git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12") or "unknown"


def machine(ctx):
    info = ctx.info()
    return dict(gpu=torch.cuda.get_device_name(), multiprocessors=info.multiprocessors, memory_bytes=info.memory,
                driver=text_of("nvidia-smi", "--query-gpu=driver_version",
                               "--format=csv,noheader").partition("\n")[0], torch=torch.__version__,
                cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), esa=ctx.lib.version(),
                kernels=info.kernels.decode(), plugin=info.plugin.decode(), commit=commit(), command=" ".join(sys.argv))


def matmul_rate(rounds):
    """TFLOP/s of an 8192^3 bf16 product: the ceiling that percentages refer to."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(torch.bfloat16) for _ in range(2))
    times, _ = measure({"matmul": lambda: a @ b}, rounds, 0.0)
    return 2 * 8192 ** 3 / median(times["matmul"]) / 1e9


# ---- selection parameters ----

def select_params(ctx, shape, selector, budget, applied, block=None):
    p = ctx.lib.c.esa_select_params_default(selector)
    grid, (front, back) = SHAPES[shape][3:]
    p.budget = budget
    if block:
        p.block_q, p.block_k = block
    p.layout.grid_q[:] = grid
    p.layout.text_front_q, p.layout.text_back_q = front, back
    p.layout.order = {esa.ENTROPY: esa.HILBERT, esa.RF_V2: esa.TILE}.get(selector, esa.RASTER)
    p.layout.order_applied = applied
    return p
