"""Make the text encoder of wan-tiny: a small UMT5 encoder that has learned to read the captions' grammar.

    python text.py --init stage --out stage --steps 800

The transformer's training goes on training this encoder, but should not have to teach it to read: its signal is
weak and slow. So the encoder first learns, in a minute on a CPU, to tell what a caption says: colour and kind of
the background, and colour, shape, motion and size of the front and of the other object. Answers are read out by
attention over the token states, much as the transformer's cross-attention will look at them; the readout is
thrown away afterwards.
"""
import argparse
import time
from pathlib import Path

import torch
from transformers import UMT5Config, UMT5EncoderModel

import tokenizer as tokenizer_step
from clips import (BACKGROUNDS, BG_COLOUR, BG_KIND, COLOUR_NAMES, MOTION_NAMES, O_COLOUR, O_MOTION, O_ON, O_RADIUS,
                   O_SHAPE, OBJECT_COLUMNS, SHAPES, SIZES, WORLD_A, make_clip)
from common import HELD_OUT_SEED, TEXT_CONFIG, Log, learning_rate, save_half
from optim import MuonAdam, split_parameters

CAPTION_TOKENS = 32                    # no caption of the grammar is longer
NEIGHBOURS = [(1, -1, 2), (1, -2, 3)]  # for each layer, the distance each head starts with
OBJECT_ANSWERS = [len(COLOUR_NAMES), len(SHAPES), len(MOTION_NAMES), len(SIZES)]
ANSWERS = [len(COLOUR_NAMES), len(BACKGROUNDS)] + OBJECT_ANSWERS * 2
NONE = -100                            # the second object's answers where there is none: not counted


def favour_neighbours(text_encoder, strength=4.0):
    """Let each head start by looking at one neighbour (the next word, the one before, ...).

    T5 knows word order only through a learned bias for each distance, which starts near zero. From there both this
    training and the transformer's stay for long with a bag of words, where "a red ball over a blue floor" may as
    well have a blue ball. With this start the colours are told apart within 50 steps; without it 200 steps leave
    them at chance. A colour must know its noun, and that is nearly always a word or two away.
    """
    for block, distances in zip(text_encoder.encoder.block, NEIGHBOURS):
        bias = block.layer[0].SelfAttention.relative_attention_bias.weight.data
        half = bias.shape[0] // 2  # the first half of the buckets is for words before, the second for words after
        for head, distance in enumerate(distances):
            bias[half + distance if distance > 0 else -distance, head] += strength


def tokenize(tokenizer, captions, device):
    batch = tokenizer(captions, padding="max_length", max_length=CAPTION_TOKENS, truncation=True, return_tensors="pt")
    return batch.input_ids.to(device)


def answers(row):
    """What the caption of a clip says, read off the numbers it was drawn from."""
    found = [int(row[BG_COLOUR]), int(row[BG_KIND])]
    for base in (4, 4 + OBJECT_COLUMNS):
        if not row[base + O_ON]:
            return found + [NONE] * len(OBJECT_ANSWERS)
        radius = row[base + O_RADIUS]
        size = min(range(len(SIZES)), key=lambda i: abs(WORLD_A.sizes[SIZES[i]] - radius))
        found += [int(row[base + O_COLOUR]), int(row[base + O_SHAPE]), int(row[base + O_MOTION]), size]
    return found


class Readout(torch.nn.Module):
    """One learned question per answer, put to the token states by attention."""

    def __init__(self, width):
        super().__init__()
        self.questions = torch.nn.Parameter(torch.randn(len(ANSWERS), width) * 0.1)
        self.key, self.value = torch.nn.Linear(width, width), torch.nn.Linear(width, width)
        self.answers = torch.nn.ModuleList(torch.nn.Linear(width, n) for n in ANSWERS)

    def forward(self, hidden, mask):
        scores = self.questions @ self.key(hidden).mT / hidden.shape[-1] ** 0.5
        scores = scores.masked_fill(mask.unsqueeze(1) == 0, float("-inf"))
        read = scores.softmax(-1) @ self.value(hidden)
        return [layer(read[:, i]) for i, layer in enumerate(self.answers)]


def clips_as_text(tokenizer, seed, count, device):
    clips = [make_clip(seed, i) for i in range(count)]
    return (tokenize(tokenizer, [c.caption for c in clips], device),
            torch.tensor([answers(c.row) for c in clips], device=device))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--init", required=True, help="folder with tokenizer/")
    parser.add_argument("--out", required=True, help="stage folder to write")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = tokenizer_step.load(Path(args.init) / "tokenizer")
    vocabulary = -(-len(tokenizer) // 8) * 8
    text = UMT5EncoderModel(UMT5Config(vocab_size=vocabulary, **TEXT_CONFIG)).to(device)
    favour_neighbours(text)
    readout = Readout(text.config.d_model).to(device)
    ids, wanted = clips_as_text(tokenizer, args.seed, args.steps * args.batch, device)
    held_ids, held_wanted = clips_as_text(tokenizer, HELD_OUT_SEED, 400, device)
    matrices, others = split_parameters(text)
    optimizer = MuonAdam(matrices, others + list(readout.parameters()))
    log = Log(Path(args.out) / "text_log.jsonl")

    def ask(batch_ids):
        mask = (batch_ids != 0).long()
        return readout(text(batch_ids, mask).last_hidden_state, mask)

    @torch.no_grad()
    def right():
        replies = torch.stack([reply.argmax(1) for reply in ask(held_ids)], 1)
        return (replies == held_wanted)[held_wanted != NONE].float().mean().item()

    start = time.time()
    for step in range(args.steps):
        part = slice(step * args.batch, (step + 1) * args.batch)
        loss = sum(torch.nn.functional.cross_entropy(reply, wanted[part, i], ignore_index=NONE)
                   for i, reply in enumerate(ask(ids[part])))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step(learning_rate(args.lr, step, step / args.steps, 50, 0.5, 0.02))
        if (step + 1) % 100 == 0:
            log(step=step + 1, loss=loss.item(), right=right())
    save_half(text, Path(args.out) / "text_encoder")
    log(event="end", right=right(), train_seconds=round(time.time() - start))


if __name__ == "__main__":
    main()
