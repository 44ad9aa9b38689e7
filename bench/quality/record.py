#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Records error scores of other prompts than the judged ones with the library, and builds mask files for library.py.

    bench/quality/record.py --embeds embeds.pt --groups 8x4,4x2,2x1,1x1 --rows 2,4 --out FOLDER
    bench/quality/record.py --groups 2x1 --prompts 8,16 --weights plan.safetensors --out FOLDER
    bench/quality/library.py --masks FOLDER/2x1-p8-rows2.safetensors --embeds embeds.pt

The clips run dense through esa.apply(record=True). Groups are the queries and keys of a mean that is scored, "default"
is the library's own. Several numbers of prompts share one run: the recording is kept at each of them, and mask files
are built from it with every number of exact rows. What the folder holds already is not made again. Needs what
library.py needs."""
import argparse
import os
import sys
import time

import torch

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import library
import model
from prompts import OTHERS

FIRST_SEED = 100            # as the study's; judged clips have 0 and 1


def _groups(text):
    if text == "default":
        return None
    parts = text.split("x")
    if len(parts) != 2 or not all(p.isdigit() for p in parts):
        raise argparse.ArgumentTypeError(f"groups are default or query x key tokens such as 8x4, not {text!r}")
    return tuple(int(p) for p in parts)


def _several(kind):
    """Reads values with commas between them, each once."""
    def read(text):
        values = list(dict.fromkeys(kind(part) for part in text.split(",") if part))
        if not values:
            raise argparse.ArgumentTypeError(f"{text!r} names nothing")
        return values
    return read


def options(words=None):
    ap = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    library.add_model(ap)
    ap.add_argument("--groups", type=_several(_groups), default=[None], help="one or more, QxK or default (default)")
    ap.add_argument("--rows", type=_several(int), default=[2], help="exact rows of a query block, one or more (2)")
    ap.add_argument("--prompts", type=_several(int), default=[8],
                    help=f"so many of the {len(OTHERS)} other prompts, one or more numbers (8)")
    ap.add_argument("--works", type=_several(float), default=[0.57, 0.44, 0.30], help="works of the masks "
                    "(0.57,0.44,0.3)")
    ap.add_argument("--block", type=int, default=64, help="tokens of a block (64)")
    ap.add_argument("--order", default=None, help="order of the tokens (the library's for recordings)")
    ap.add_argument("--weights", default="", help="work plan with the weights of layers and steps (all alike)")
    ap.add_argument("--minutes", type=float, default=1e9, help="no group is begun later")
    ap.add_argument("--out", required=True, help="folder of the recordings and mask files")
    a = ap.parse_args(words)
    a.prompts.sort()
    if not 1 <= a.prompts[0] <= a.prompts[-1] <= len(OTHERS):
        ap.error(f"--prompts: there are {len(OTHERS)} other prompts, not {a.prompts[-1]}")
    return a


def name_of(group, prompts):
    return ("default" if group is None else f"{group[0]}x{group[1]}") + f"-p{prompts}"


def record(pipe, esa, a, group):
    """Leaves a recording for every number of prompts."""
    paths = {n: os.path.join(a.out, name_of(group, n) + ".recording") for n in a.prompts}
    if all(os.path.exists(path) for path in paths.values()):
        return paths
    begun = time.time()
    config = esa.EsaConfig(selector="error", block=a.block, order=a.order, groups=group)
    with esa.apply(pipe, config, record=True) as handle:
        for i, prompt in enumerate(OTHERS[:a.prompts[-1]]):
            pipe.denoise(prompt, FIRST_SEED + i)
            if i + 1 in paths:
                pipe.wait()
                handle.save_recording(paths[i + 1])
                print(f"{paths[i + 1]}: {i + 1} prompts, {time.time() - begun:.1f} s", flush=True)
    return paths


def build(esa, a, recording):
    """The mask files of a recording."""
    for rows in a.rows:
        stem = recording.removesuffix(".recording") + f"-rows{rows}" + ("-weights" if a.weights else "")
        path = stem + ".safetensors"
        if os.path.exists(path):
            continue
        esa.build_mask_file(path + ".part", [recording], works=tuple(a.works), plan=a.weights or None, exact_rows=rows)
        os.replace(path + ".part", path)
        file = esa.MaskFile(path)
        info = file.info
        works = ", ".join(f"{b:g} counted {file.work(b):.4f}" for b in file.budgets)
        print(f"{path}: groups {info.group_q}x{info.group_k}, {info.fine} fine means, works {works}", flush=True)


def main(words=None):
    a = options(words)
    begun = time.time()
    torch.set_grad_enabled(False)
    if a.threads:
        torch.set_num_threads(a.threads)
    os.makedirs(a.out, exist_ok=True)
    prompts = [*OTHERS[:a.prompts[-1]], ""]
    embeds = torch.load(a.embeds, weights_only=True) if a.embeds else model.encode(a.model, prompts)
    pipe = library.Pipe(a, embeds)
    import esa
    print(f"ready after {time.time() - begun:.0f} s", flush=True)
    for group in a.groups:
        if time.time() - begun > 60 * a.minutes:
            print(f"no time for {name_of(group, a.prompts[-1])}", flush=True)
            continue
        for recording in record(pipe, esa, a, group).values():
            build(esa, a, recording)
    print(f"{time.time() - begun:.0f} s -> {a.out}", flush=True)


if __name__ == "__main__":
    main()
