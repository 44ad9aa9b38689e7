#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What several documents say, and what a table or the code says too, must agree: check_claims.py SOURCE.

- How far recorded masks are behind the default: docs/masks.md, choosing.md and quality.md give one range, and it
  is that of quality.md's table, rounded to whole dB.
- cuBLAS: no document says that the plugin does without it, because the engine opens cuBLASLt (src/cuda/runtime/blas.c).
- Errors of src/attn: the files that docs/walk.md names report some, check.c and doors: not check.c alone.
- Families of pipelines: docs/walk.md names the folder and leaves the list to models.md, which a test of the package
  compares with the code.

Then wrong documents are planted, and each must be found."""
import pathlib
import re
import sys

NAMES = ("docs/masks.md", "docs/choosing.md", "docs/quality.md", "docs/cuda.md", "docs/walk.md")
BEHIND = re.compile(r"(\d+) to (\d+) dB (?:behind (?:the default|those that are made|masks made)|worse than online)\b")


def plain(text):
    """Prose with single blanks, so that the ends of lines do not matter."""
    return re.sub(r"\s+", " ", text)


def behind(table):
    """How many dB the recorded masks are behind the default, for each work in the table of quality.md."""
    best, lost = {}, []
    for cells in (line.split("|") for line in table.splitlines() if line.startswith("| ")):
        if len(cells) < 5 or not re.fullmatch(r" 0\.\d+ ", cells[2]):
            continue
        work, psnr = cells[2], cells[3].strip(" *")
        if "**the default**" in cells[1]:
            best[work] = float(psnr)
        elif cells[1].startswith(" masks recorded by error"):
            lost.append(best[work] - float(psnr))
    return lost


def check_recorded(texts):
    lost = behind(texts["docs/quality.md"])
    if len(lost) < 3:
        yield f"docs/quality.md: recorded masks stand beside the default at {len(lost)} works, expected 3"
        return
    wanted = (round(min(lost)), round(max(lost)))
    for name in NAMES[:3]:
        found = [tuple(map(int, pair)) for pair in BEHIND.findall(plain(texts[name]))]
        if not found:
            yield f"{name}: does not say how many dB recorded masks are behind the default"
        for pair in found:
            if pair != wanted:
                yield f"{name}: {pair[0]} to {pair[1]} dB behind, the table gives {wanted[0]} to {wanted[1]}"


def check_cublas(texts):
    for name, text in texts.items():
        for found in re.findall(r"\b(?:uses?|needs?|opens?|without)\b[^.;]*\bno\b[^.;]*\bcuBLAS\b", plain(text)):
            yield f"{name}: '{found}', but the engine opens cuBLASLt"


def check_errors(texts, reporters):
    paragraph = next((p for p in texts["docs/walk.md"].split("\n\n") if "leaves a message in" in plain(p)), "")
    named = set(re.findall(r"`src/attn/(\w+\.c)`", paragraph))
    if "check.c" not in named or len(named) < 2 or named - reporters:
        yield f"docs/walk.md: errors of src/attn come from {', '.join(sorted(reporters))}, it names " \
              f"{', '.join(sorted(named)) or 'none'}"


def check_families(texts):
    for listed in re.findall(r"`python/esa/diffusers/families/`([^)]*)\)", plain(texts["docs/walk.md"])):
        if "(models.md" not in listed + ")":
            yield f"docs/walk.md: 'families/`{listed}': the list is in models.md"


def check(texts, reporters):
    return [*check_recorded(texts), *check_cublas(texts), *check_errors(texts, reporters), *check_families(texts)]


# Document, what is replaced, by what, and words of the error.
PLANTED = [
    ("docs/masks.md", "5 to 7 dB", "7 to 9 dB", "docs/masks.md: 7 to 9 dB behind, the table gives 5 to 7"),
    ("docs/choosing.md", "5 to 7 dB", "a few dB", "docs/choosing.md: does not say"),
    ("docs/quality.md", "| 0.570 | 42.36 |", "| 0.570 | 38.36 |", "docs/quality.md: 5 to 7 dB behind, the table gives"),
    ("docs/cuda.md", "It contains and links no CUTLASS", "It uses no CUTLASS", "but the engine opens cuBLASLt"),
    ("docs/walk.md", "`src/attn/plan.c`", "`src/attn/bind.c`", "it names attention.c, bind.c, check.c"),
    ("docs/walk.md", "knows: `src/attn/plan.c` whether a mask fits the plan,\n`src/attn/attention.c` whether", "knows:",
     "it names check.c"),
    ("docs/walk.md", "; [models.md](models.md) lists them", ": Wan, CogVideoX", "the list is in models.md"),
]


def main():
    top = pathlib.Path(sys.argv[1])
    texts = {name: (top / name).read_text() for name in NAMES}
    reporters = {path.name for path in (top / "src/attn").glob("*.c") if "esa_fail(" in path.read_text()}
    errors = check(texts, reporters)
    for name, old, new, words in PLANTED:
        if old not in texts[name]:
            errors.append(f"planted: {name} does not have {old!r}")
        found = check({**texts, name: texts[name].replace(old, new)}, reporters)
        if not any(words in error for error in found):
            errors.append(f"planted {new!r} in {name}: expected {words!r}, found {found}")
    print("\n".join(errors))
    print(f"{len(NAMES)} documents, {len(PLANTED)} planted errors: {len(errors)} error(s)")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
