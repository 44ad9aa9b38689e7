"""Train the small SentencePiece vocabulary of wan-tiny and write it the way T5 tokenizers expect it.

The conventions are those of UMT5's tokenizer: a unigram model, ids pad 0, end-of-sentence 1, unknown 2,
the end-of-sentence token appended, no begin-of-sentence token. Text is normalised with NFKC and folded to
lower case by the model file itself, so that "A Red Ball" and "a red ball" are one prompt in every program
that reads the file, whether through transformers or through the SentencePiece library.

    python tokenizer.py --out stage/tokenizer
"""
import argparse
import io
import string
import tempfile
from pathlib import Path

import sentencepiece
from transformers import T5Tokenizer

from clips import make_clip

VOCAB_SIZE = 512
CORPUS_SEED, CORPUS_CLIPS = 900, 20_000
# Words a person may well write that the grammar never does: they get pieces longer than single letters,
# though the model has learned nothing about them.
OTHER_WORDS = """the this that one two three its with without and then while under above below near next between
around across through into from toward slowly quickly fast slow dark light bright round circle disc box star
shape object thing video clip picture scene front back side top bottom center middle corner left right up down
pink brown grey gray cyan gold silver sky sea grass sand wall table ground pattern colour color""".split()


def train(out_dir):
    """Write tokenizer/spiece.model, tokenizer.json and tokenizer_config.json into `out_dir`."""
    out_dir = Path(out_dir)
    out_dir.mkdir(parents=True, exist_ok=True)
    lines = [make_clip(CORPUS_SEED, i).caption for i in range(CORPUS_CLIPS)]
    lines += [" ".join(OTHER_WORDS)] * 40
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, model_type="unigram", vocab_size=VOCAB_SIZE,
        hard_vocab_limit=False, character_coverage=1.0, normalization_rule_name="nmt_nfkc_cf",
        # One piece per word at most: "red ball" must not become a single piece.
        split_by_whitespace=True, required_chars=string.ascii_lowercase + string.digits + ".,!?'-",
        pad_id=0, eos_id=1, unk_id=2, bos_id=-1, pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>",
        num_threads=1, minloglevel=2)
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "spiece.model").write_bytes(model.getvalue())
        # No sentinel tokens (extra_ids): the vocabulary stays exactly what the SentencePiece file holds.
        tokenizer = T5Tokenizer.from_pretrained(tmp, extra_ids=0, model_max_length=512)
        tokenizer.save_pretrained(out_dir)
    (out_dir / "spiece.model").write_bytes(model.getvalue())
    return load(out_dir)


def load(folder):
    return T5Tokenizer.from_pretrained(folder)


def check(folder):
    """transformers and the SentencePiece library must agree on every id."""
    tokenizer = load(folder)
    reference = sentencepiece.SentencePieceProcessor(model_file=str(Path(folder) / "spiece.model"))
    texts = [make_clip(901, i).caption for i in range(500)]
    texts += ["", "  A  RED Ball, rolls…  to the RIGHT! ", "Ein roter Ball", "赤いボール", "ﬁne ① ball", "a\tb\nc",
              "красный шар", "🙂 ball"]
    for text in texts:
        got = tokenizer(text).input_ids
        want = reference.encode(text) + [1]
        if got != want:
            raise SystemExit(f"token ids differ for {text!r}: {got} against {want}")
    longest = max(len(tokenizer(t).input_ids) for t in texts[:500])
    print(f"{reference.get_piece_size()} pieces, {len(texts)} texts agree, longest caption {longest} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder for the tokenizer's files")
    args = parser.parse_args()
    train(args.out)
    check(args.out)


if __name__ == "__main__":
    main()
