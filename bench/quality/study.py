#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Which way to choose blocks gives sparse clips closest to the dense ones at equal attention work?

    bench/quality/study.py --embeds FILE --encode              prompts -> FILE, once, where transformers is installed
    bench/quality/study.py --group decide --minutes 8 --embeds FILE [--diffusers FOLDER] [--done results.json]
    bench/quality/study.py --runs "sel=errq8m4 bud=layer; base" --works 0.57,0.44
    bench/quality/study.py --group decide --list

Masks are simulated with dense f32 arithmetic. Every setting is given by the work of the whole clip (see README.md); the
program solves for the density. Results are written after every run to --out; a setting that fails is noted and the next
one runs. Needs torch and diffusers; transformers only to encode prompts."""
import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import replace

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import attend
import choose
import metrics
import model
import plans
import table
from calib import Calib
from hub import Late
from prompts import EVAL, OTHERS, PUBLISHED
from schedule import Schedule, by_drift
from settings import GROUPS
from spec import DRIFT, Spec

SHORT = 8       # steps of a run whose measured sensitivities serve longer runs of the same model (--done)


def options():
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ap.add_argument("--group", default="", help="named settings, several with commas: " + " ".join(GROUPS))
    ap.add_argument("--runs", default="", help="own settings, ; between them")
    ap.add_argument("--works", default="", help="works of --runs (default 0.44); with --group: only these")
    ap.add_argument("--minutes", type=float, default=8.0, help="no run is begun that would end later")
    ap.add_argument("--model", default="models/wan-tiny")
    ap.add_argument("--transformer", default="", help="folder of another transformer (default: the model's)")
    ap.add_argument("--diffusers", default="", help="folder that holds the package (default: the installed one)")
    ap.add_argument("--embeds", default="", help="file of encoded prompts (default: encode now)")
    ap.add_argument("--encode", action="store_true", help="write --embeds and stop")
    ap.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", choices=("cuda", "cpu"))
    ap.add_argument("--chunk", type=int, default=0, help="batch entries computed together (default 8, CPU 1)")
    ap.add_argument("--clips", type=int, default=16, help="judged clips, 1 to 16: prompt i / 2, seed i mod 2")
    ap.add_argument("--heldout", type=int, default=0, help="judge so many of the other prompts (from the end) instead")
    ap.add_argument("--steps", type=int, default=8)
    ap.add_argument("--guidance", type=float, default=2.5)
    ap.add_argument("--frames", type=int, default=33)
    ap.add_argument("--side", type=int, default=128)
    ap.add_argument("--done", default="", help="earlier results: their runs and calibrations are not made again")
    metrics.add_lpips(ap)
    ap.add_argument("--out", default="quality.json", help="results (quality.json)")
    ap.add_argument("--fit", action="store_true", help="print the plan of each setting with plan=cell and its shape")
    ap.add_argument("--list", action="store_true", help="print the settings and stop")
    return ap.parse_args()


def wanted(a):
    """[(Spec)] in order, each once."""
    only = [float(x) for x in a.works.split(",") if x]
    rows = []
    for name in filter(None, a.group.split(",")):
        if name not in GROUPS:
            sys.exit(f"no group {name}; there are: {' '.join(GROUPS)}")
        rows += [(words, [w for w in works if not only or w in only]) for words, works in GROUPS[name]]
    rows += [(words, only or [0.44]) for words in a.runs.split(";") if words.strip()]
    specs = [Spec.parse(words, work=w) for words, works in rows for w in works]
    return list(dict.fromkeys(specs))


class Study:
    def __init__(self, a):
        self.a, self.start, self.slowest = a, time.time(), 3.0
        self.path = a.out
        self.results = {"torch": torch.__version__, "device": a.device, "runs": [], "notes": [], "left": [],
                        "calib": {}, "shape": ""}
        self.kind = f"{a.transformer or a.model} {a.steps} steps guidance {a.guidance:g} {a.frames}x{a.side}"
        self.kind += f" heldout {a.heldout}" if a.heldout else f" clips {a.clips}"
        if a.done:
            with open(a.done) as f:
                old = json.load(f)
            self.results["runs"] = old["runs"]
            self.results["calib"] = old["calib"]
            self.results["shape"] = old.get("shape", "")
        self.mine = self.results["calib"].setdefault(f"{a.transformer or a.model} {a.steps} {a.frames}x{a.side}", {})

    def left(self):
        return self.a.minutes * 60 - (time.time() - self.start)

    def save(self):
        self.results["seconds"] = time.time() - self.start
        with open(self.path + ".tmp", "w") as f:
            json.dump(self.results, f, indent=1)
        os.replace(self.path + ".tmp", self.path)

    def note(self, text):
        self.results["notes"].append(text)
        print("note:", text, flush=True)

    def prepare(self):
        a = self.a
        prompts = sorted(set(EVAL + OTHERS) | {""})
        self.lpips = metrics.Lpips.open(a.lpips, a.device)
        embeds = torch.load(a.embeds, weights_only=True) if a.embeds else model.encode(a.model, prompts)
        self.sim = model.Sim(a, embeds)
        self.note(attend.prepare(Spec(), self.sim.shape.dim, self.sim.device))
        self.sim.hub.deadline = self.start + a.minutes * 60 - 2
        print(f"model ready, grid {self.sim.hub.grid}, {self.left():.0f} s left", flush=True)
        if a.heldout:
            chosen = OTHERS[-a.heldout:]
            self.clips = model.Clips(self.sim, chosen, [500 + i for i in range(len(chosen))])
        else:
            n = min(16, a.clips)
            self.clips = model.Clips(self.sim, [EVAL[i // 2] for i in range(n)], [i % 2 for i in range(n)])
        made = {}

        def others(n):
            n = min(n, len(OTHERS))
            bigger = [m for m in made if m >= n]
            if not bigger:
                made[n] = model.Clips(self.sim, OTHERS[:n], [100 + i for i in range(n)], decode=False)
            return made[min(bigger or [n])].first(n)
        shorter = self.results["calib"].get(f"{a.transformer or a.model} {SHORT} {a.frames}x{a.side}", {})
        self.calib = Calib(self.sim, others, self.mine, shorter.get("sensitivity", []))
        print(f"dense clips ready, {self.left():.0f} s left", flush=True)

    def run(self, spec):
        """One setting over all clips."""
        sim, hub, label = self.sim, self.sim.hub, spec.label()
        if spec.shape == "fit":
            if not self.results["shape"]:
                raise ValueError("no shape was fitted: run plan=cell with --fit first, or give its results with --done")
            spec = replace(spec, shape=self.results["shape"])
        spec = spec.resolved(sim.steps)
        if told := attend.prepare(spec, sim.shape.dim, sim.device):
            self.note(told)
        anchors, drift = None, DRIFT.match(spec.carry)
        if drift:
            anchors = by_drift(self.calib.drifts(drift[1]), int(drift[2]))
        schedule = Schedule(spec, anchors)
        curves = self.calib.curves(spec, schedule) if spec.plan in ("cell", "even") else None
        density, expected = plans.solve(spec, sim.shape, curves, schedule=schedule)
        more = {"density": density, "schedule": schedule}
        if spec.wt != "none":
            more["weights"] = self.calib.head_weights()
        if spec.src == "cached":
            more.update(self.recording(spec, density, more.get("weights")))
        if self.a.fit and spec.plan == "cell":
            self.fit(spec, curves)
        begun = time.time()
        hub.begin("run", spec, **more)
        last = sim.denoise(self.clips, 0, skips=spec.skips)
        cells = sim.steps * sim.layers
        assert hub.calls == cells - sim.layers * sum(map(spec.skips, range(sim.steps)))
        parts = {name: float(x) / cells for name, x in hub.spent.items()}
        found = metrics.compare(self.clips.frames, sim.decode(last), self.lpips)
        seconds = time.time() - begun
        mean = {name: table.mean(x) for name, x in found.items()}
        return {"label": label, "asked": spec.work, "expected": expected, "work": sum(parts.values()),
                "clips": self.kind, "parts": parts, "shape": spec.shape, **mean,
                "psnrs": found["psnr"], "ssims": found["ssim"], "psnr_mins": found["psnr_min"],
                "lpipss": found["lpips"], "flickers": found["flicker"], "seconds": seconds,
                "latent_mse": float((last - self.clips.last).square().mean()),
                "anchors": [sorted(x) for x in anchors.values()] if anchors else None,
                "density": {f"{s},{layer}": d for (s, layer), d in density.items()} if spec.plan != "flat" else None}

    def fit(self, spec, curves):
        """Prints the shape that comes closest to a plan; the first one is what shape=fit means."""
        wanted = plans.solve(spec, self.sim.shape, curves, held=False)[0]
        text, (all_, rest, rich) = plans.fit_shape(wanted, curves, self.sim.shape)
        print(f"plan at work {spec.work}: shape={text}; its densities vary by {all_:.3f}, {rest:.3f} around the shape, "
              f"{rich:.3f} around one with squares and the first layer", flush=True)
        for layer in range(self.sim.layers):
            print(f"  layer {layer}: " + " ".join(f"{wanted[s, layer]:.2f}" for s in range(self.sim.steps)), flush=True)
        self.results["shape"] = self.results["shape"] or text

    def recording(self, spec, density, heads):
        """Recorded errors for the hub, weighted; levels of all cells at once for bud=joint."""
        found = self.calib.record(spec)
        logs = self.calib.sensitivity() if spec.wt == "cell" else None
        out = {}
        for cell, (errors, p) in found.items():
            if heads:
                w = heads[cell] * (2.718281828 ** logs[cell[0]][cell[1]] if logs else 1.0)
                errors = [x * w[None, :, None, None] for x in errors]
            out[cell] = (errors, p)
        if spec.bud != "joint":
            return {"recorded": out}
        live = {c: out[c][0] for c in density}
        return {"fixed": choose.joint_levels(live, spec.sizes(), sum(density.values()) / len(density), spec.least)}

    def one(self, spec):
        runs = self.results["runs"]
        if any((r["label"], r["asked"], r["clips"]) == (spec.label(), spec.work, self.kind) for r in runs):
            return
        if self.left() < 1.3 * self.slowest + 2:
            self.results["left"].append([spec.label(), spec.work])
            return
        begun = time.time()
        try:
            r = self.run(spec)
        except Late:
            self.results["left"].append([spec.label(), spec.work])
            self.save()                         # parts of calibrations are kept
            return
        except Exception as e:
            where = traceback.extract_tb(e.__traceback__)[-1]
            self.note(f"{spec.label()} at {spec.work}: {type(e).__name__} {str(e)[:300]} "
                      f"({os.path.basename(where.filename)}:{where.lineno})")
            if self.a.device == "cuda":
                torch.cuda.empty_cache()
            return
        self.slowest = max(self.slowest, min(time.time() - begun, 20))
        runs.append(r)
        base = table.reference([x for x in runs if x["clips"] == self.kind], spec.work)
        diff = table.signed(r, base) if base else ""
        print(f"{r['label']:90s} {spec.work:g} ({r['work']:.4f}) {r['psnr']:.2f} dB {diff} SSIM {r['ssim']:.4f} | "
              f"{r['seconds']:.1f} s, {self.left():.0f} left", flush=True)
        self.save()


def main():
    a = options()
    torch.set_grad_enabled(False)
    specs = wanted(a)
    if a.list:
        for s in specs:
            print(f"{s.work:<5g} {s.label()}")
        print(len(specs), "runs")
        return
    if a.encode:
        torch.save(model.encode(a.model, sorted(set(EVAL + OTHERS) | {""})), a.embeds)
        print("wrote", a.embeds)
        return
    study = Study(a)
    try:
        study.prepare()
    except Late:
        sys.exit(f"{a.minutes:g} minutes are too short for the dense clips")
    for spec in specs:
        study.one(spec)
    study.save()
    if study.results["left"]:
        print(f"no time for {len(study.results['left'])} runs; --done goes on from here. First: "
              f"{study.results['left'][0]}", flush=True)
    print(table.table([r for r in study.results["runs"] if r["clips"] == study.kind]), flush=True)
    for work, psnr in PUBLISHED.items():
        for r in study.results["runs"]:
            if r["label"] == "base" and r["clips"] == study.kind and abs(r["work"] - work) < 0.002:
                print(f"base at work {r['work']:.4f}: {r['psnr']:.2f} dB; tests/quality/video.csv has {psnr} at {work}")
    print(f"{len(study.results['runs'])} runs, {time.time() - study.start:.0f} s -> {study.path}", flush=True)


if __name__ == "__main__":
    main()
