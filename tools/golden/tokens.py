# SPDX-License-Identifier: Apache-2.0
"""Prompts, what WanPipeline's cleaning makes of them, and the token ids of transformers' T5 tokenizer, for the C tests.

    python tools/golden/tokens.py --model models/wan-tiny --out tests/golden

Writes tokens.json (about 220 strings in many scripts, ids by two vocabularies: wan-tiny's, and a small one of many
scripts that is trained here and stored as world/spiece.model, with byte pieces as UMT5's has). --keep uses the
stored vocabulary instead of training it."""
import argparse
import io
import json
import random
import tempfile
import types
from pathlib import Path

import sentencepiece
from diffusers.pipelines.wan import pipeline_wan
from transformers import T5TokenizerFast

SENTENCES = """
a red ball rolls to the right over a blue floor
A green square grows slowly in front of a checkered wall, then turns.
Two birds fly over the sea at sunset; the camera follows them.
ein roter Ball rollt über einen blauen Boden, während es draußen regnet
Größe, Maß und Straße: drei Wörter mit ß
un ballon rouge roule vers la droite sur un sol bleu, près de l'été
où est le cœur de la forêt ? là-bas !
una pelota roja rueda hacia la derecha sobre un suelo azul ¿verdad? ¡sí!
uma bola vermelha rola para a direita sobre um chão azul, não é?
czerwona piłka toczy się w prawo po niebieskiej podłodze, źdźbło i żółw
červený míč se kutálí doprava po modré podlaze, příliš žluťoučký kůň
kırmızı bir top mavi zeminde sağa doğru yuvarlanıyor, İstanbul ve ığdır
en röd boll rullar åt höger över ett blått golv, älg och örn
một quả bóng màu đỏ lăn sang phải trên sàn xanh
красный мяч катится вправо по синему полу, ёлка и съезд
червона м'яч котиться праворуч по синій підлозі, їжак і ґанок
μια κόκκινη μπάλα κυλάει δεξιά πάνω σε ένα μπλε πάτωμα
כדור אדום מתגלגל ימינה על רצפה כחולה
كرة حمراء تتدحرج إلى اليمين فوق أرضية زرقاء
توپ قرمز به سمت راست روی کف آبی می‌غلتد
एक लाल गेंद नीले फर्श पर दाईं ओर लुढ़कती है
একটি লাল বল নীল মেঝেতে ডানদিকে গড়িয়ে যায়
சிவப்பு பந்து நீல தரையில் வலதுபுறம் உருளுகிறது
ลูกบอลสีแดงกลิ้งไปทางขวาบนพื้นสีน้ำเงิน
赤いボールが青い床の上を右へ転がる。
カメラはゆっくりと右へ動く、そして止まる！
一个红色的球在蓝色的地板上向右滚动，镜头跟随。
紅色的球在藍色的地板上向右滾動
빨간 공이 파란 바닥 위에서 오른쪽으로 굴러간다
წითელი ბურთი მარჯვნივ მიგორავს ლურჯ იატაკზე
կարմիր գնդակը գլորվում է աջ կապույտ հատակի վրայով
ቀይ ኳስ በሰማያዊ ወለል ላይ ወደ ቀኝ ይንከባለላል
""".strip().splitlines()

NEGATIVE = ("色调艳丽，过曝，静态，细节模糊不清，字幕，风格，作品，画作，画面，静止，"
            "整体发灰，最差质量，低质量，JPEG压缩残留，丑陋的，残缺的，多余的手指，"
            "画得不好的手部，画得不好的脸部，畸形的，毁容的，形态畸形的肢体，手指融合，"
            "静止不动的画面，杂乱的背景，三条腿，背景人很多，倒着走")

ODD = [
    "", " ", "\n\t ", "a", "A", ".", "...", "…", "-", "--", "—", "0", "3.14159", "1,000,000", "100%", "50 €", "£5",
    "$9.99", "#1", "@home", "C++ & C#", "e-mail: someone@example.org", "https://example.org/a_b?c=d&e=f#g",
    "snake_case and CamelCase", "don't can't won't", "rock 'n' roll", "“quoted” and ‘single’", "«guillemets»",
    "a  red   ball", "  leading and trailing  ", "tabs\tand\nnewlines\r\nhere", "vertical\x0bform\x0cfeed",
    "file\x1cseparator", "\x1c \x1fends\x1e\u2003\x1d", "x \x1c", "no\u00a0break", "thin\u2009space",
    "ideographic\u3000space", "zero\u200bwidth", "soft\u00adhyphen", "word\u2060joiner", "byte\ufefforder",
    "line\u2028separator", "ＦＵＬＬ　ｗｉｄｔｈ １２３！", "ｶﾀｶﾅ", "ﬁne ﬂow oﬃce", "① ② ③ ⑩", "Ⅷ ⅳ", "½ ¾ ⅓",
    "x² + y³ = z⁴", "H₂O",
    "№ 5 ™ © ®", "㎏ ㎡ ㍿", "ℌℑ ℝ ℕ", "𝐛𝐨𝐥𝐝 𝑖𝑡𝑎𝑙𝑖𝑐", "ſtraße", "ĳ Ĳ ŉ", "Ǆ ǆ", "ﷺ", "ﻻ ﻼ", "ﬀ", "Ω Å K", "µ μ",
    "café naïve façade", "Ångström", "El Niño", "Dvořák", "Łódź", "Šiauliai", "Győr", "🙂", "🙂 ball 🎉🎉",
    "👍🏽 👨‍👩‍👧‍👦 🏳️‍🌈", "🇩🇪🇯🇵", "❤️ ☀️ ☎", "→ ← ↑ ↓ ⇒", "♠♥♦♣", "∀x∈ℝ: x²≥0", "∑∏∫√∞≈≠≤≥", "▁ under ▁bar", "▁▁", "_",
    "日本語とEnglishの混在text", "漢字kana混じり123", "中文,英文comma，全角",
    "한글과 English 혼용", "русский and English",
    "مرحبا world",
    "שלום world", "नमस्ते दुनिया", "สวัสดีชาวโลก", "x" * 60, "supercalifragilisticexpialidocious",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa bbbbbbbbbbbbbbb", "ha" * 40, "!" * 30, "- - - - -",
    "a b c d e f g h i j k l m n o p", "</s>", "a </s> b", "a</s>b", "<pad>", "<unk>", "<unk> ball", "ball<pad><pad>",
    "</s></s>", "< /s>", "<S>", "<extra_id_0>", "[MASK]", "<|endoftext|>", "&amp;", "a &lt; b &gt; c",
    "&amp;lt;b&amp;gt;", "&amp;amp;amp;", "&quot;hi&quot;", "&#65;&#x42;&#X43;", "&#128512;",
    "&#0; &#x110000; &#xD800;", "&#128; &#150; &#159;", "&#1; &#11; &#127; &#xFFFE;", "&nbsp;x&nbsp;",
    "&eacute;t&eacute", "&notit; &notin; &not", "&unknown; &;", "& &", "&&amp", "AT&T", "R&D &copy 2024 &copyright",
    "&#;&#x;&#xg;", "&#99999999999999999999;", "&NotEqualTilde; &nLt; &fjlig;", "&CounterClockwiseContourIntegral;",
    "&" + "a" * 40 + ";", "&hearts;&#9829;", "100&percnt;", "tom&Jerry", "control\x01\x02chars", "del\x7fete",
    "c1\x85next\x80pad", "\u200e\u200fmarks", "a\u0301b (decomposed)", "e\u0301te\u0301", "n\u0303", "가",
    "quote \" backslash \\ slash /", "{json: [1, 2]}", "<b>bold</b>", "C:\\path\\file", "a/b/c", "~tilde^ `tick`",
    "one\u2013two\u2014three", "5\u2032 7\u2033", "±0.5 × 2 ÷ 3", "½½½", "ⓐⓑⓒ", "⑴⑵", "㊤㊦", "ⅩⅩ", "㋿",
    "ｱｲｳ ＡＢＣ ａｂｃ",
    "。「」、・", "！？：；", "٣٤٥ ۳۴۵ ३४५", "ⵜⴰⵎⴰⵣⵉⵖⵜ", "ᓄᓇᕗᑦ", "ᏣᎳᎩ", "𐌰𐌱𐌲", "𒀀𒁀", "\U0001f9ff\U0001fae0",
    "\ue000private",
    NEGATIVE,
]


def variations():
    """Parts of sentences put together: cases, punctuation and scripts side by side."""
    rng = random.Random(7)
    for i in range(40):
        words = rng.choice(SENTENCES).split() + rng.choice(SENTENCES).split()
        rng.shuffle(words)
        text = " ".join(words[: rng.randint(2, 9)])
        yield [text, text.upper(), text.title(), text.replace(" ", ", "), text + "!?"][i % 5]
    yield " ".join(SENTENCES[:3] * 12)          # far more than 64 tokens


def train(folder):
    """A small unigram vocabulary with UMT5's conventions (ids, normalisation, bytes for what is unknown)."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(SENTENCES * 4), model_writer=model,
                                             model_type="unigram", vocab_size=1500, hard_vocab_limit=False,
                                             character_coverage=0.995, normalization_rule_name="nmt_nfkc",
                                             byte_fallback=True, pad_id=0, eos_id=1, unk_id=2, bos_id=-1,
                                             pad_piece="<pad>", eos_piece="</s>", unk_piece="<unk>", num_threads=1,
                                             minloglevel=2)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as tmp:
        (Path(tmp) / "spiece.model").write_bytes(model.getvalue())
        T5TokenizerFast.from_pretrained(tmp, extra_ids=0).save_pretrained(tmp)
        for name in ("spiece.model", "tokenizer_config.json"):
            data = model.getvalue() if name == "spiece.model" else (Path(tmp) / name).read_bytes()
            (folder / name).write_bytes(data)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="the model folder whose tokenizer is the first vocabulary")
    parser.add_argument("--out", required=True, help="folder of goldens")
    parser.add_argument("--keep", action="store_true", help="use OUT/world as it is")
    args = parser.parse_args()
    out = Path(args.out)
    if not args.keep:
        train(out / "world")
    pipeline_wan.is_ftfy_available = lambda: False      # cleaning without it: see src/model/text/prompt.h
    pipeline_wan.ftfy = types.SimpleNamespace(fix_text=lambda text: text)       # diffusers 0.36 does not ask
    tokenizers = {
        "wan-tiny": T5TokenizerFast.from_pretrained(Path(args.model) / "tokenizer"),
        "world": T5TokenizerFast.from_pretrained(out / "world")
    }
    cases, seen = [], set()
    for text in SENTENCES + ODD + list(variations()):
        if text in seen:
            continue
        seen.add(text)
        clean = pipeline_wan.prompt_clean(text)
        case = {"text": text, "clean": clean}
        for name, tokenizer in tokenizers.items():
            ids = tokenizer(clean).input_ids
            short = tokenizer(clean, padding="max_length", max_length=16, truncation=True,
                              add_special_tokens=True).input_ids
            assert short == (ids if len(ids) <= 16 else ids[:15] + [1]) + [0] * (16 - len(ids)), clean
            case[name] = ids
        cases.append(case)
    lines = ",\n".join(json.dumps(c, separators=(",", ":")) for c in cases)
    (out / "tokens.json").write_text('{"cases": [\n' + lines + "\n]}\n")
    print(len(cases), "strings;", {n: len(t) for n, t in tokenizers.items()})


if __name__ == "__main__":
    main()
