# SPDX-License-Identifier: Apache-2.0
"""Small byte-level BPE vocabularies in the form of Llama 3's and CLIP's, and the ids that the `tokenizers` package
gives to strings in many scripts, for the C tests.

    python tools/golden/bpe.py --out tests/golden

Writes bpe/llama and bpe/clip (tokenizer.json, tokenizer_config.json) and bpe.json. --keep uses the stored vocabularies
instead of training them (training orders equal counts anew each time); --random N --seed S chooses how many random
strings there are, and which."""
import argparse
import json
import random
import unicodedata
from pathlib import Path

from diffusers.pipelines.hunyuan_video.pipeline_hunyuan_video import DEFAULT_PROMPT_TEMPLATE
from tokenizers import __version__ as tokenizers_version
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from tokens import ODD, SENTENCES, variations
from transformers import PreTrainedTokenizerFast

LLAMA = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
         r"|\s+(?!\S)|\s+")
CLIP = r"'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
NAMES = r"<\|startoftext\|>|<\|endoftext\|>|"      # transformers 5 writes these in front
SPECIAL = {"llama": ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
                     "<image>", "<pad>"],
           "clip": ["<|startoftext|>", "<|endoftext|>"]}

AWKWARD = [
    "I'm you're he'll we've I'd it's can't", "I'M YOU'RE HE'LL WE'VE I'D IT'S CAN'T",
    "it'\u017f IT'\u017f '\u017fa 'tis 'Twas", "''s '''ll 'r 'v 'l '", "don’t ‘tis",
    "1234567890 12 123 1234 1,234.5", "١٢٣٤ ४५६७ Ⅷ½²³ ①②③④", "a1b22c333d4444", "  two  spaces   three",
    "tab\tx \t y\t\t", "\n", "\n\n\na", " \n \n b", "a \r\n\r\n  b\r", "x\n\n\n", "!\n\n?\r\n.", "... \n", " !",
    "  !", "\t!", "\u3000!\u3000a", "\u00a0a\u00a0\u00a0b", "\u2003\u2003a", "end   ", "   ", "\u0085a\u0085",
    "\x01\x02a\x1f\x7f", "\u200b\u200c\u200d\ufeff", "e\u0301e\u0300 \u0301 \u0301a",
    "a\u0323\u0307 a\u0307\u0323 \u1e0b\u0323", "\u1100\u1161\u11a8 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "\uac00\u11a8", "\u212b \u2126 \u212a", "\u0344 \u0958 \ufb1d \u2adc", "\U0001d15e\U0001d1bc",
    "\u0f73\u0f71\u0f72", "\uf900\uf901 \U0002f800", "İstanbul IĞDIR ıi İİ", "ΟΔΥΣΣΕΥΣ Σ ς", "ẞß ǅǄ ﬀ",
    "ⰀⰁ ႠႡ ᏸᏹ Ꭰ ꭰ", "𐐀𐐁 𞤀𞤁", "👨‍👩‍👧‍👦👍🏽🏳️‍🌈🇩🇪", "❤️‍🔥x", "<|begin_of_text|>a<|eot_id|>\n\nb",
    "<|eot_id|><|eot_id|>", "<|EOT_ID|>", "<|startoftext|>a<|endoftext|>b", "<|STARTOFTEXT|>a<|ENDOFTEXT|>b!",
    "!!<|EndOfText|>!!", "<|EndOfText|>!!", "<|endoftext", "<image><pad>", "a<|eot_id|> b",
    "<|start_header_id|>user<|end_header_id|>\n\nhello", "\u0378\u0530\U000e0fff\ue000\ufffe",
    "it'\u017fa IT'\u017fS x'sta y'llama",
    "a\u0305\u0301 e\u033d\u0300", "\u09c7\u0301\u09be \u1100\u0301\u1161", "a" * 300, "1" * 50,
    "\u0301" * 40 + "\u0323" * 40, " " * 50 + "a", "\n" * 30 + " x",
]
# Characters of Unicode 14 to 17, which other versions of tokenizers treat in other ways.
NEWER = ["\u1c89\ua7ce\U00010d50\u0898", "q\u0301\u0898 \U00011938 \U00011935\U00011930", "\U000105c0\U00010d40 \u088f"]


def added(name, first):
    """The added tokens as the real files have them: CLIP's first one is looked for in normalised text."""
    return [{"id": first + i, "content": text, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": text == "<|startoftext|>", "special": True} for i, text in enumerate(SPECIAL[name])]


def split(name):
    regex, behavior, invert = (LLAMA, "isolated", False) if name == "llama" else (NAMES + CLIP, "removed", True)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(regex), behavior, invert=invert),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name != "llama")])


def train(name, folder):
    suffix = None if name == "llama" else "</w>"
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix=suffix) if suffix else models.BPE())
    tokenizer.pre_tokenizer = split(name)
    if suffix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "),
                                                     normalizers.Lowercase()])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    lines = SENTENCES * 2 + [text for text in ODD + AWKWARD if len(text) < 100] + SENTENCES[:3] * 8 + \
        [DEFAULT_PROMPT_TEMPLATE["template"]] * 2
    trainer = trainers.BpeTrainer(vocab_size=1100 if suffix else 900, show_progress=False, initial_alphabet=alphabet,
                                  end_of_word_suffix=suffix or "")
    tokenizer.train_from_iterator(lines, trainer)
    data = json.loads(tokenizer.to_str())
    merges = data["model"]["merges"]
    words = alphabet + ([c + suffix for c in alphabet] if suffix else []) + ["".join(pair) for pair in merges]
    words = list(dict.fromkeys(words))
    if suffix:
        data["model"]["vocab"] = {w: i for i, w in enumerate(words + SPECIAL[name])}
        data["model"]["unk_token"] = "<|endoftext|>"
        data["model"]["continuing_subword_prefix"] = ""
        del data["model"]["type"], data["model"]["byte_fallback"], data["model"]["ignore_merges"]    # an old file
        first = len(words)
        eos, bos = SPECIAL[name][1], SPECIAL[name][0]
        data["post_processor"] = {"type": "RobertaProcessing", "sep": [eos, first + 1], "cls": [bos, first],
                                  "trim_offsets": False, "add_prefix_space": False}
    else:
        # Words are found whole, even those that the merges do not reach: every ninth merge is missing.
        data["model"]["vocab"] = {w: i for i, w in enumerate(words)}
        data["model"]["merges"] = [f"{a} {b}" for i, (a, b) in enumerate(merges) if i % 9 != 5]
        data["model"]["ignore_merges"] = True
        first = len(words)
        bos = SPECIAL[name][0]
        template = processors.TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, first)])
        tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
        data["post_processor"] = json.loads(tokenizer.to_str())["post_processor"]
    data["added_tokens"] = added(name, first)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n")
    pad = SPECIAL[name][-1]
    config = {"pad_token": pad, "bos_token": SPECIAL[name][0], "eos_token": SPECIAL[name][1], "padding_side": "right",
              "model_max_length": 1000000000000000019884624838656, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


def stable():
    """Characters that Unicode 3.2 had: every version of every library treats them alike."""
    old = unicodedata.ucd_3_2_0
    return [c for c in range(1, 0x30000) if not 0xD800 <= c < 0xE000 and old.category(chr(c)) != "Cn"]


BLOCKS = [(0x20, 0x7F), (0xA0, 0x250), (0x370, 0x530), (0x590, 0x700), (0x900, 0xE00), (0x1100, 0x1200),
          (0x1E00, 0x2000), (0x2000, 0x2070), (0x3040, 0x3100), (0xAC00, 0xAC80)]
WORDS = ("'s 'T 'Re 've 'M 'lL 'd '\u017f 're' ll 12 1234 a B \u0130 \u03a3 ball red \n \r\n \t \u3000 \u00a0 "
         "<|eot_id|> <|endoftext|> <|EndOfText|> <|startoftext|> <|StartOfText|> <pad> "
         "<| |> \u200d \ufe0f").split(" ") + [" ", "  "]


def words(tokenizer, text):
    """The bytes of each word, without a look at added tokens. A byte is one character here."""
    if tokenizer.normalizer:
        text = tokenizer.normalizer.normalize_str(text)
    return [len(word) for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def draw(rng, codes, marks, blocks):
    parts = []
    for _ in range(rng.randint(1, 14)):
        kind = rng.randrange(5)
        if kind == 0:
            parts.append(rng.choice(WORDS))
        elif kind == 1:
            few = rng.choice(blocks)
            parts.append("".join(chr(rng.choice(few)) for _ in range(rng.randint(1, 6))))
        elif kind == 2:
            parts.append(chr(rng.choice(codes)))
        elif kind == 3:
            parts.append("".join(chr(rng.choice(marks)) for _ in range(rng.randint(1, 3))))
        else:
            parts.append(rng.choice(" \n\t!.,-'") * rng.randint(1, 3))
    return "".join(parts)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True, help="folder of goldens")
    parser.add_argument("--keep", action="store_true", help="use OUT/bpe as it is")
    parser.add_argument("--random", type=int, default=150)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    out = Path(args.out)
    tokenizers = {}
    for name in ("llama", "clip"):
        folder = out / "bpe" / name
        if not args.keep:
            train(name, folder)
        tokenizers[name] = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng, codes = random.Random(args.seed), stable()
    marks = [c for c in codes if unicodedata.combining(chr(c))]
    blocks = [[c for c in codes if lo <= c < hi] for lo, hi in BLOCKS] + [range(0x1F300, 0x1F600)]
    newer = NEWER if tokenizers_version.startswith("0.23.") else []
    texts = SENTENCES + ODD + AWKWARD + newer + list(variations())
    texts += [draw(rng, codes, marks, blocks) for _ in range(args.random)]
    cases = [{"text": text, **{name: t.encode(text).ids for name, t in tokenizers.items()},
              **{name + " words": words(t, text) for name, t in tokenizers.items()}}
             for text in dict.fromkeys(texts)]
    # What HunyuanVideoPipeline asks of its two tokenizers.
    fast = {name: PreTrainedTokenizerFast(tokenizer_object=t, pad_token=SPECIAL[name][-1])
            for name, t in tokenizers.items()}
    template, crop = DEFAULT_PROMPT_TEMPLATE["template"], DEFAULT_PROMPT_TEMPLATE["crop_start"]
    prompts = []
    for text in ("", SENTENCES[0], SENTENCES[22], " ".join(SENTENCES[:12])):
        llama = fast["llama"](template.format(text), max_length=256 + crop, padding="max_length", truncation=True)
        clip = fast["clip"](text, max_length=77, padding="max_length", truncation=True)
        prompts.append({"text": text, "llama": llama.input_ids, "mask": sum(llama.attention_mask),
                        "clip": clip.input_ids})
    body = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    tail = ",\n".join(json.dumps(p, separators=(",", ":")) for p in prompts)
    head = f'{{"seed": {args.seed}, "crop": {crop}, "prompts": [\n{tail}],\n"cases": [\n'
    (out / "bpe.json").write_text(f"{head}{body}\n]}}\n")
    print(len(cases), "strings, seed", args.seed, {n: t.get_vocab_size() for n, t in tokenizers.items()})


if __name__ == "__main__":
    main()
