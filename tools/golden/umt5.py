# SPDX-License-Identifier: Apache-2.0
"""Hidden states of transformers' UMT5EncoderModel and T5EncoderModel for the C tests.

    python tools/golden/umt5.py --out tests/golden/umt5.safetensors
    python tools/golden/umt5.py --bf16 --model models/wan-tiny --out tests/golden/umt5_bf16.safetensors

Weights come from fill.py; the file holds every n-th element of the states of the tokens that are there (run with
padding and its mask, as the pipeline does) and the largest magnitude of all. --every 1 keeps everything (the live
test does), --model adds a real folder. With --bf16 the file holds how far bf16 is from f32: for each case the root mean
square of the difference over that of f32."""
import argparse
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import T5Config, T5EncoderModel, UMT5Config, UMT5EncoderModel
from transformers import __version__ as version

import fill

# name: config, tokens that are there, tokens with padding. tests/model/test_umt5.c has the same table.
CASES = {
    "mini": (dict(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=3,
                  num_heads=4), 7, 12), "small": (dict(vocab_size=264, d_model=192, d_kv=64, d_ff=384, num_layers=2,
                                                       num_heads=3), 33, 64),
    "long": (dict(vocab_size=120, d_model=48, d_kv=12, d_ff=64, num_layers=2, num_heads=5,
                  relative_attention_num_buckets=20, relative_attention_max_distance=90), 300, 300),
    "one": (dict(vocab_size=99, d_model=32, d_kv=8, d_ff=37, num_layers=1, num_heads=4), 1, 4),
    "t5": (dict(vocab_size=80, d_model=40, d_kv=12, d_ff=52, num_layers=3, num_heads=4), 26, 26),
}


def ids_of(name, count, vocab):
    """Ids by fill.py's numbers: any of the vocabulary."""
    return torch.from_numpy(((fill.unit(name, count).astype(np.float64) + 1) / 2 * vocab).astype(np.int64))


def run(model, ids, padded):
    x = torch.zeros(1, padded, dtype=torch.long)
    mask = torch.zeros(1, padded, dtype=torch.long)
    x[0, : len(ids)] = ids
    mask[0, : len(ids)] = 1
    with torch.no_grad():
        return model(x, mask).last_hidden_state[0, : len(ids)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--every", type=int, default=7)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--model", help="a model folder: its encoder sees 40 tokens as case 'model'")
    args = parser.parse_args()
    torch.set_num_threads(1)
    states, tensors = {}, {}

    def add(case, model, ids, padded):
        states[case] = run(model, ids, padded)
        if args.bf16:
            off = run(model.bfloat16(), ids, padded).float() - states[case]
            tensors[case] = (off.square().mean() / states[case].square().mean()).sqrt().reshape(1)
            print(f"{case:8s} bf16 is off by {float(tensors[case]):.5f}")

    for case, (config, count, padded) in CASES.items():
        made, settings = (T5EncoderModel, T5Config) if case == "t5" else (UMT5EncoderModel, UMT5Config)
        model = made(settings(dropout_rate=0.0, feed_forward_proj="gated-gelu", **config)).eval()
        fill.fill_module(model)
        with torch.no_grad():               # scores are not scaled: keep them as small as T5's initialisation does
            for name, parameter in model.named_parameters():
                if ".SelfAttention.q." in name:
                    parameter.mul_(0.25)
        add(case, model, ids_of(case + ".ids", count, config["vocab_size"]), padded)
    if args.model:
        model = UMT5EncoderModel.from_pretrained(Path(args.model) / "text_encoder", dtype=torch.float32).eval()
        add("model", model, ids_of("model.ids", 40, model.config.vocab_size), 512)
    for case, state in states.items() if not args.bf16 else ():
        flat = state.float().reshape(-1)
        tensors[case] = flat[:: args.every].contiguous()
        tensors[case + ".scale"] = flat.abs().max().reshape(1)
        print(f"{case:8s} {tuple(state.shape)}, largest {flat.abs().max():.3f}")
    save_file(tensors, args.out,
              metadata={"every": str(args.every), "transformers": version, "torch": torch.__version__})


if __name__ == "__main__":
    main()
