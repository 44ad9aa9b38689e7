#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Attention in several versions of esa, in turns on one device: times, ratios and errors.

    git worktree add ../before 54ee14c && make -C ../before cuda && make cuda
    bench/versions.py --tree before=../before --tree now=. --shapes cogvideox-5b --rest 0.05

A tree is a checkout with its library in build-cuda/ or build/. Each tree runs in its own process
with its own Python package. It must have bench/esa_ctypes.py, esa.attention and
esa.Mask.from_blocks; commit 54ee14c has them. All trees get the same random q, k, v and the same
random masks of 128 x 128 blocks. The processes take turns in random order, and one runs at a time.
Two ways to call are timed:

  call     esa.attention of the package, as a user calls it
  plan     the call of a prepared plan: the kernels and little else

A timing is a batch of calls that takes about 8 ms and starts on an idle device. Times are medians.
A ratio is the time of the first tree divided by the time of this tree; above 1 is faster. An error
is the relative L2 error of 64 rows of two heads against float64."""
import argparse
import contextlib
import json
import math
import os
import pathlib
import random
import statistics
import subprocess
import sys
import time

WAYS = ("plan", "call")
BLOCK = 128


# ---- the process of one tree ----

class Worker:
    """Answers one JSON line with another: {"shape": [H, N, D], "densities": [...], "seed": n} makes
    tensors and masks, {"way": ..., "density": ..., "calls": n} times n calls."""

    def __init__(self, device):
        # Without the folder of this script, modules come from the tree. So this class repeats a few
        # lines of gpu_measure.py, whose interface differs from version to version.
        del sys.path[0]
        import torch

        import esa
        import esa_ctypes
        self.torch, self.esa, self.low, self.device = torch, esa, esa_ctypes, device
        self.gpu = device == "cuda"
        self.dtype = torch.bfloat16 if self.gpu else torch.float32
        if self.gpu:
            stream = torch.cuda.Stream()
            torch.cuda.set_stream(stream)
            self.ctx = esa_ctypes.Ctx(esa_ctypes.Library(), stream.cuda_stream)
        self.jobs, self.made = {}, []

    def prepare(self, shape, densities, seed):
        torch, (H, N, D) = self.torch, shape
        self.forget()
        gen = torch.Generator(self.device).manual_seed(seed)
        q, k, v = (torch.randn(1, H, N, D, device=self.device, generator=gen).to(self.dtype)
                   for _ in range(3))
        n = -(-N // BLOCK)
        errors = {}
        for d in densities:
            kept = mask = None
            if d < 1:
                rank = torch.rand(1, H, n, n, device=self.device, generator=gen).argsort(-1)
                kept = rank.argsort(-1) < max(1, round(d * n))
                mask = self.esa.Mask.from_blocks(kept.cpu().numpy(), N, N, block=BLOCK)
                mask = mask.to("cuda") if self.gpu else mask
            self.jobs["call", d] = lambda mask=mask: self.esa.attention(q, k, v, mask)
            errors[f"call {d}"] = self.error(q, k, v, kept, self.jobs["call", d]())
            if self.gpu:
                self.jobs["plan", d], o = self.prepared(q, k, v, kept)
                self.jobs["plan", d]()
                torch.cuda.synchronize()
                errors[f"plan {d}"] = self.error(q, k, v, kept, o)
        return {"errors": errors}

    def forget(self):
        """Frees what the shape before needed."""
        self.jobs = {}
        for thing in self.made:
            thing.free()
        self.made = []

    def prepared(self, q, k, v, kept):
        """The call of a plan, and the tensor it writes."""
        import numpy
        torch, o, mask = self.torch, self.torch.full_like(q, math.nan), None
        if kept is not None:
            bits = numpy.packbits(kept.cpu().numpy(), axis=-1, bitorder="little")
            mask = self.ctx.mask_from_bits(numpy.ascontiguousarray(bits), *kept.shape[:2],
                                           q.shape[2], k.shape[2], BLOCK, BLOCK)
            self.made.append(mask)
        plan = self.low.Plan(self.ctx, q, k)
        self.made.append(plan)
        space = torch.empty(max(64, plan.workspace), dtype=torch.uint8, device="cuda")
        return plan.attention(mask, q, k, v, o, space), o

    def error(self, q, k, v, kept, o):
        torch, N = self.torch, q.shape[2]
        rows = torch.arange(0, N, max(1, N // 64), device=self.device)[:64]
        off = size = 0.0
        for h in {0, q.shape[1] - 1}:
            x = q[0, h, rows].double() @ k[0, h].double().T / math.sqrt(q.shape[3])
            if kept is not None:
                seen = kept[0, h, rows // BLOCK].repeat_interleave(BLOCK, 1)[:, :N]
                x = x.masked_fill(~seen, -math.inf)
            right = x.softmax(-1) @ v[0, h].double()
            off += (o[0, h, rows].double() - right).square().sum().item()
            size += right.square().sum().item()
        return math.sqrt(off / size)

    def time(self, way, density, calls):
        job = self.jobs[way, density]
        if not self.gpu:
            start = time.perf_counter()
            for _ in range(calls):
                job()
            return {"ms": 1e3 * (time.perf_counter() - start) / calls}
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            job()
        end.record()
        end.synchronize()
        return {"ms": begin.elapsed_time(end) / calls}

    def serve(self, answers):
        for line in sys.stdin:
            ask = json.loads(line)
            try:
                answer = self.prepare(**ask) if "shape" in ask else self.time(**ask)
            except Exception as error:      # the other process prints it and stops
                answer = {"failed": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), file=answers, flush=True)


# ---- the process that asks ----

def library_of(tree, device):
    for folder in ("build-cuda", "build") if device == "cuda" else ("build", "build-cuda"):
        if (tree / folder / "libesa.so").exists():
            return tree / folder / "libesa.so"
    sys.exit(f"versions.py: {tree} has neither build-cuda/libesa.so nor build/libesa.so: build it first")


class Tree:
    def __init__(self, name, folder, library, device):
        self.name, self.library = name, library
        others = os.environ.get("PYTHONPATH")           # torch may be there
        environment = dict(os.environ, ESA_LIB=str(library), PYTHONDONTWRITEBYTECODE="1",
                           PYTHONPATH=os.pathsep.join([str(folder / "bench"), str(folder / "python")]
                                                      + ([others] if others else [])))
        environment.pop("ESA_CUDA_LIB", None)
        plugin = library.parent / "libesa_cuda.so"
        if plugin.exists():
            environment["ESA_CUDA_LIB"] = str(plugin)
        self.process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__), "--worker", device],
            env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, **question):
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(question), file=self.process.stdin, flush=True)
            answer = self.process.stdout.readline()
        if not answer:
            sys.exit(f"versions.py: the process of tree '{self.name}' ended with status "
                     f"{self.process.wait()}")
        answer = json.loads(answer)
        if "failed" in answer:
            sys.exit(f"versions.py: tree '{self.name}': {answer['failed']}")
        return answer

    def close(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def measure(trees, name, shape, a):
    """[{shape, tree, way, density, ms, least, most, ratio, error}] of one shape."""
    ways = WAYS if a.device == "cuda" else ("call",)
    asked = dict(shape=shape[:3], densities=a.densities, seed=a.seed)
    errors = {t.name: t.ask(**asked)["errors"] for t in trees}
    jobs = [(t, way, d) for t in trees for way in ways for d in a.densities]
    calls, times = {}, {job: [] for job in jobs}
    for job in jobs:
        tree, way, d = job
        once = [tree.ask(way=way, density=d, calls=1)["ms"] for _ in range(2)][-1]   # the first warms up
        calls[job] = max(1, math.ceil(8.0 / max(once, 1e-3)))
    for _ in range(a.rounds):
        random.shuffle(jobs)
        for job in jobs:
            time.sleep(a.rest)
            times[job].append(job[0].ask(way=job[1], density=job[2], calls=calls[job])["ms"])
    first, rows = trees[0], []
    for way in ways:
        for d in a.densities:
            base = statistics.median(times[first, way, d])
            for tree in trees:
                t = times[tree, way, d]
                rows.append(dict(shape=name, tree=tree.name, way=way, density=d, ms=statistics.median(t),
                                 least=min(t), most=max(t), ratio=base / statistics.median(t),
                                 error=errors[tree.name][f"{way} {d}"]))
    return rows


def show(rows, densities):
    width = max(len(r["tree"]) for r in rows)
    for way in dict.fromkeys(r["way"] for r in rows):
        print(f"\n{rows[0]['shape']}, {way}: ms (ratio) error")
        for tree in dict.fromkeys(r["tree"] for r in rows):
            of = {r["density"]: r for r in rows if r["tree"] == tree and r["way"] == way}
            cells = [f"{of[d]['ms']:8.3f} ({of[d]['ratio']:.3f}) {of[d]['error']:.2e}" for d in densities]
            print(f"  {tree:{width}}  " + "  ".join(cells), flush=True)


def main():
    import shapes
    known = dict(shapes.SHAPES, small=shapes.Shape(2, 1000, 64, (1, 25, 40), (0, 0)))   # small: to try the script
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--tree", action="append", metavar="NAME=FOLDER", default=[],
                    help="a version to time; repeat it. Ratios compare with the first one")
    ap.add_argument("--shapes", default="cogvideox-5b",
                    help=f"with commas, of {','.join(known)} (default: %(default)s)")
    ap.add_argument("--densities", default="1,0.5,0.2,0.1",
                    help="with commas, above 0 and at most 1, which is dense (default: %(default)s)")
    ap.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: f32, only way 'call'")
    ap.add_argument("--rounds", type=int, default=7,
                    help="timings of each tree, way and density (default: %(default)s)")
    ap.add_argument("--rest", type=float, default=0.0, help="idle seconds before each timing (default: 0)")
    ap.add_argument("--seed", type=int, default=7, help="seed of tensors, masks and order (default: %(default)s)")
    ap.add_argument("--json", metavar="FILE", help="also write the rows to FILE")
    a = ap.parse_args()
    names, given = a.shapes.split(","), dict(t.partition("=")[::2] for t in a.tree)
    try:
        a.densities = [float(d) for d in a.densities.split(",")]
    except ValueError:
        ap.error(f"--densities takes numbers with commas between them, not '{a.densities}'")
    if not all([given, *given, *given.values()]) or len(given) < len(a.tree):
        ap.error("--tree NAME=FOLDER is needed at least once, and each NAME once")
    if any(n not in known for n in names):
        ap.error(f"unknown shape in '{a.shapes}', expected some of {', '.join(known)}")
    if not all(0 < d <= 1 for d in a.densities) or a.rounds < 1 or not 0 <= a.rest < math.inf:
        ap.error("densities are above 0 and at most 1, rounds at least 1, rest at least 0")
    if len(set(names)) < len(names) or len(set(a.densities)) < len(a.densities):
        ap.error("a shape or a density is given twice")
    if a.json and not pathlib.Path(a.json).resolve().parent.is_dir():
        ap.error(f"--json: '{a.json}' is in a folder that does not exist")
    folders = {n: pathlib.Path(folder).resolve() for n, folder in given.items()}
    libraries = {n: library_of(folder, a.device) for n, folder in folders.items()}
    random.seed(a.seed)
    trees, rows = [], []
    try:
        for n, folder in folders.items():
            print(f"{n}: {libraries[n]}", flush=True)
            trees.append(Tree(n, folder, libraries[n], a.device))
        for name in names:
            rows += measure(trees, name, known[name], a)
            show([r for r in rows if r["shape"] == name], a.densities)
            if a.json:
                out = dict(command=sys.argv, device=a.device,
                           libraries={n: str(path) for n, path in libraries.items()}, rows=rows)
                pathlib.Path(a.json).write_text(json.dumps(out, indent=1) + "\n")
    except KeyboardInterrupt:
        return 130
    finally:
        for tree in trees:
            tree.close()
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        pipe = os.fdopen(os.dup(1), "w")        # what libraries print must not look like an answer
        os.dup2(2, 1)
        with contextlib.suppress(KeyboardInterrupt):
            Worker(sys.argv[2]).serve(pipe)
        sys.exit(0)
    sys.exit(main())
