#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How accurate attention in 8 bits is: esa's arithmetic and the one that SageAttention 2 publishes, both recomputed in
torch (precision_recipes.py), against float64, on random data, on heads with outliers, and on q, k and v of a model.

    precision.py                                 random data
    precision.py --model models/wan-tiny         also q, k and v of all layers and of some steps of a clip
    precision.py --json FILE                     also as JSON
    precision.py --guard                         also whether the scales foretell which rows have large errors

Relative error: of the whole output in the L2 norm. Largest error: of one element, in units of the root mean square of
the output. Needs torch; --model needs diffusers and transformers."""
import argparse
import json
import pathlib
import sys

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
import precision_recipes as recipes  # noqa: E402

RECIPES = {
    "esa": recipes.ours,
    "Sage 2": recipes.sage2,
    "Sage 2, Hopper": lambda q, k, v: recipes.sage2(q, k, v, warp_q=16, tile=128),
    "Sage 2, q smoothed": lambda q, k, v: recipes.sage2(q, k, v, smooth_q=True),
    "bf16": recipes.bf16,
}


def random_data(seed, tokens, heads, dim):
    """(name, q, k, v): noise; noise around a centre, as trained heads have it; and channels ten times as large."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(heads, tokens, dim, generator=g) for _ in range(3))
    yield "random", q, k, v
    shift = [torch.randn(heads, 1, dim, generator=g) for _ in range(3)]
    yield "random around a centre", q + shift[0], k + 2 * shift[1], v + shift[2]
    large = torch.ones(dim)
    large[::dim // 4] = 10.0
    yield "four channels ten times as large", q * large / 4, k * large / 4, v
    yield "the same, around a centre", q * large / 4, (k + 2 * shift[1]) * large / 4, v * large + shift[2]


def errors(q, k, v):
    """{recipe: (relative error, largest error)}."""
    want = recipes.exact(q, k, v)
    size, rms = want.norm(), want.pow(2).mean().sqrt()
    found = {}
    for name, recipe in RECIPES.items():
        wrong = recipe(q, k, v).double() - want
        found[name] = (float(wrong.norm() / size), float(wrong.abs().max() / rms))
    return found


def guard(q, k, v, share=0.05):
    """Would it pay to compute the rows with the largest estimated error in 16 bits? The estimate is, up to a factor,
    the standard deviation of a row's logits that its int8 scales cause. Returns the shares of the squared error in the
    worst rows and in the rows with the largest estimates, and the rank correlation of estimate and error."""
    error = (recipes.ours(q, k, v).double() - recipes.exact(q, k, v)).pow(2).sum(-1).flatten()
    k = k - k.mean(1, keepdim=True)
    scale_q, scale_k = (x.abs().amax(-1) / 127 for x in (q, k))
    from_q, from_k = scale_q * k.norm(dim=-1).mean(-1, keepdim=True), scale_k.amax(-1, keepdim=True) * q.norm(dim=-1)
    estimate = torch.sqrt(from_q ** 2 + from_k ** 2).flatten()
    rows = max(1, round(share * error.numel()))
    ranks = torch.stack([x.argsort().argsort().double() for x in (error, estimate)])
    found = [error[x.topk(rows).indices].sum() / error.sum() for x in (error, estimate)]
    return float(found[0]), float(found[1]), float(torch.corrcoef(ranks)[0, 1])


class Recorder:
    """Stands in for scaled_dot_product_attention and hands the self-attention calls of some steps of a transformer to a
    function: those of the first guidance branch."""

    def __init__(self, pipe, steps, listen):
        self.real, self.pipe, self.steps, self.listen = torch.nn.functional.scaled_dot_product_attention, pipe, steps, \
            listen
        self.forwards, self.layer, self.calls = -1, None, 0

    def __enter__(self):
        torch.nn.functional.scaled_dot_product_attention = self.attention
        self.hooks = [self.pipe.transformer.register_forward_pre_hook(self.begin),
                      self.pipe.transformer.register_forward_hook(self.end)]
        return self

    def __exit__(self, *error):
        torch.nn.functional.scaled_dot_product_attention = self.real
        for hook in self.hooks:
            hook.remove()

    def begin(self, *_):
        self.forwards, self.layer = self.forwards + 1, 0

    def end(self, *_):
        self.layer = None

    def attention(self, query, key, value, *words, **more):
        if self.layer is not None and query.shape == key.shape:
            step, branch = divmod(self.forwards, 2)
            if step in self.steps and branch == 0:
                self.listen(step, self.layer, *(x[0].float() for x in (query, key, value)))
                self.calls += 1
            self.layer += 1
        return self.real(query, key, value, *words, **more)


def model_data(folder, steps, chosen, frames, side, listen):
    """Makes a clip with guidance and calls listen(step, layer, q, k, v) for the chosen steps."""
    from diffusers import WanPipeline
    pipe = WanPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    with torch.no_grad(), Recorder(pipe, chosen, listen) as recorder:
        pipe("a red circle moves to the right", num_frames=frames, height=side, width=side, num_inference_steps=steps,
             guidance_scale=2.5, generator=torch.Generator().manual_seed(0), output_type="latent")
    if recorder.calls != len(chosen) * len(pipe.transformer.blocks):
        sys.exit(f"{recorder.calls} calls of scaled_dot_product_attention were seen, expected one per layer and step: "
                 "this diffusers computes attention in another way")


def table(rows):
    names = list(RECIPES)
    lines = ["| data | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for name, found in rows:
        cells = " | ".join(f"{100 * found[n][0]:.2f} % ({found[n][1]:.2f})" for n in names)
        lines.append(f"| {name} | {cells} |")
    return "\n".join(lines)


def mean_rows(found):
    """[(name, {recipe: errors})]: the mean and the worst relative error of many calls, with the largest error."""
    mean, worst = {}, {}
    for name in RECIPES:
        relative, largest = zip(*(x[name] for x in found))
        mean[name] = (sum(relative) / len(relative), sum(largest) / len(largest))
        worst[name] = (max(relative), max(largest))
    return mean, worst


def main(argv=None):
    ap = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    ap.add_argument("--tokens", type=int, default=2048)
    ap.add_argument("--heads", type=int, default=2)
    ap.add_argument("--dim", type=int, default=128)
    ap.add_argument("--seed", type=int, default=1)
    ap.add_argument("--model", help="a Wan folder of diffusers")
    ap.add_argument("--steps", type=int, default=10)
    ap.add_argument("--chosen", default="0,3,6,9", help="steps whose q, k and v are taken")
    ap.add_argument("--frames", type=int, default=33)
    ap.add_argument("--side", type=int, default=128)
    ap.add_argument("--guard", action="store_true")
    ap.add_argument("--json")
    args = ap.parse_args(argv)
    rows, cells, guards = [], [], {}

    def measure(name, q, k, v):
        if args.guard:
            guards.setdefault(name, []).append(guard(q, k, v))
        return errors(q, k, v)
    for name, q, k, v in random_data(args.seed, args.tokens, args.heads, args.dim):
        rows.append((name, measure(name, q, k, v)))
    if args.model:
        chosen = {int(x) for x in args.chosen.split(",")}
        model_data(args.model, args.steps, chosen, args.frames, args.side,
                   lambda step, layer, q, k, v: cells.append((step, layer, measure("model", q, k, v))))
        mean, worst = mean_rows([found for _, _, found in cells])
        name = pathlib.Path(args.model).name
        rows += [(f"{name}, mean of {len(cells)} calls", mean), (f"{name}, worst call", worst)]
    print(f"{args.tokens} tokens, {args.heads} heads, D {args.dim}, seed {args.seed}; relative error (largest error)")
    print(table(rows))
    if cells:
        better = sum(found["esa"][0] <= min(found["Sage 2"][0], found["Sage 2, Hopper"][0]) for _, _, found in cells)
        print(f"esa's relative error is at most that of both Sage 2 recipes in {better} of {len(cells)} calls")
    for name, found in guards.items():
        worst, estimated, rank = (sum(x) / len(found) for x in zip(*found))
        print(f"{name}: {100 * worst:.0f} % of the squared error lie in the worst 5 % of the rows, "
              f"{100 * estimated:.0f} % in those with the largest estimates; rank correlation {rank:.2f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump({"command": " ".join(["precision.py", *(argv or sys.argv[1:])]), "rows": rows,
                       "calls": [{"step": s, "layer": n, "errors": found} for s, n, found in cells]}, f, indent=1)


if __name__ == "__main__":
    main()
