# SPDX-License-Identifier: Apache-2.0
"""Writes src/model/text/unicode_tables.c: classes of characters, lower case and NFC as the `tokenizers` package has
them, by asking that package about every code point.

    python tools/tables/unicode_text.py > src/model/text/unicode_tables.c

tokenizers 0.23 mixes versions of Unicode: its regular expressions have 16.0, its lower case 17.0, its NFC 9.0. Ids must
equal its ids, so the tables follow it and not one version. Python's unicodedata (14.0 or newer) gives the candidates of
NFC: every decomposition and every combining class; those that tokenizers does not know yet are dropped."""
import sys
import unicodedata

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

CODES = [c for c in range(1, 0x110000) if not 0xD800 <= c < 0xE000]
NFC, NFD, LOWER = normalizers.NFC(), normalizers.NFD(), normalizers.Lowercase()
# One mark of each of five combining classes (1, 230, 220, 240, 8), to see how another one is ordered beside it.
PROBES = "\u0334\u0301\u0316\u0345\u3099"


def members(pattern):
    """The code points that the pattern matches."""
    split = pre_tokenizers.Split(Regex(pattern), "removed", invert=True)
    found = set()
    for at in range(0, len(CODES), 4096):
        for text, _ in split.pre_tokenize_str("".join(map(chr, CODES[at: at + 4096]))):
            found.update(map(ord, text))
    return found


def runs(value):
    """(first code point, value) wherever the value changes."""
    out, last = [], 0
    for c in range(0x110000):
        v = value(c)
        if v != last:
            out.append((c, v))
            last = v
    return out


def lower_ranges():
    """(first, last, step, delta): code points that go to themselves plus delta, every one or every second."""
    out = []
    for c in CODES:
        to = LOWER.normalize_str(chr(c))
        if c == 0x130:
            assert to == "i\u0307"              # the only one that becomes two; unicode.c knows it
            continue
        assert len(to) == 1
        delta = ord(to) - c
        if not delta:
            continue
        if out and out[-1][3] == delta:
            first, last, step, _ = out[-1]
            if c - last == step or (first == last and c - last <= 2):
                out[-1] = (first, c, c - last, delta)
                continue
        out.append((c, c, 1, delta))
    return out


def combining(c):
    ccc = unicodedata.combining(chr(c))
    if not ccc:
        return 0
    for probe in PROBES:
        for text in ("q" + probe + chr(c), "q" + chr(c) + probe):
            if NFC.normalize_str(text) != unicodedata.normalize("NFC", text):
                return 0
    return ccc


def decompositions():
    out = []
    for c in CODES:
        text = unicodedata.decomposition(chr(c))
        if not text or text.startswith("<") or NFD.normalize_str(chr(c)) == chr(c):
            continue
        parts = [int(p, 16) for p in text.split()]
        assert len(parts) <= 2
        out.append((c, parts[0], parts[1] if len(parts) == 2 else 0))
    return out


def print_array(head, items):
    print(f"\n{head} = {{")
    line = "   "
    for item in items:
        if len(line) + len(item) + 2 > 98:
            print(line)
            line = "   "
        line += f" {item},"
    print(line + "\n};")


def main():
    assert tuple(map(int, unicodedata.unidata_version.split("."))) >= (14, 0), "Python 3.11 or newer is needed"
    letters, numbers, spaces = members(r"\p{L}"), members(r"\p{N}"), members(r"\s")
    classes = runs(lambda c: 1 if c in letters else 2 if c in numbers else 3 if c in spaces else 0)
    marks = runs(combining)
    lower = lower_ranges()
    parts = decompositions()
    pairs = [i for i, (c, a, b) in enumerate(parts) if b and NFC.normalize_str(chr(a) + chr(b)) == chr(c)]
    pairs.sort(key=lambda i: parts[i][1:])
    print("/* unicode_tables.c - classes, lower case, NFC; made by tools/tables/unicode_text.py.")
    print(" * SPDX-License-Identifier: Apache-2.0")
    print(" *")
    print(f" * As in tokenizers {tokenizers.__version__}: classes of Unicode 16.0, lower case of 17.0, NFC of 9.0. */")
    print('#include "model/text/unicode.h"\n')
    print("/* clang-format off */")
    for name, table in (("class", classes), ("mark", marks), ("lower", lower), ("part", parts), ("pair", pairs)):
        print(f"const int32_t esa_unicode_{name}_count = {len(table)};")
    print_array(f"const uint32_t esa_unicode_class[{len(classes)}]", [f"0x{c << 8 | v:x}" for c, v in classes])
    print_array(f"const uint32_t esa_unicode_mark[{len(marks)}]", [f"0x{c << 8 | v:x}" for c, v in marks])
    print_array(f"const int32_t esa_unicode_lower[{len(lower)}][4]",
                [f"{{ {a}, {b}, {s}, {d} }}" for a, b, s, d in lower])
    print_array(f"const uint32_t esa_unicode_part[{len(parts)}][3]",
                [f"{{ 0x{c:x}, 0x{a:x}, 0x{b:x} }}" for c, a, b in parts])
    print_array(f"const uint16_t esa_unicode_pair[{len(pairs)}]", map(str, pairs))
    print("/* clang-format on */")
    print(len(classes), len(marks), len(lower), len(parts), len(pairs), file=sys.stderr)


if __name__ == "__main__":
    main()
