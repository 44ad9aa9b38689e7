#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every fuzz target has a corpus, and every corpus a target: check_corpus.py SOURCE.

A target is a file tests/*/fuzz_NAME.c that defines LLVMFuzzerTestOneInput. cmake/*.cmake builds it: those in tests/fuzz
by a pattern, others by name. Its corpus is the folder tests/fuzz/corpus/fuzz_NAME, which scripts/test.sh gives to it,
with 1 to FILES files and at most BYTES bytes. .gitignore keeps none of them out of a commit.

Then wrong trees are planted, and each must be found."""
import pathlib
import re
import subprocess
import sys
import tempfile

FILES, BYTES, ONE = 40, 64 << 10, 16 << 10
ENTRY = re.compile(r"^int LLVMFuzzerTestOneInput\([^;]*\)\s*\{", re.M)


def targets(top):
    return {path.stem: path for path in sorted(top.glob("tests/*/fuzz_*.c")) if ENTRY.search(path.read_text())}


def check_built(top, found):
    cmake = "\n".join(path.read_text() for path in sorted(top.glob("cmake/*.cmake")))
    if "tests/fuzz/fuzz_*.c" not in cmake:
        yield "cmake: the pattern tests/fuzz/fuzz_*.c is gone"
    for name, path in found.items():
        room = path.parent.name
        if room != "fuzz" and not re.search(rf"\b{room}/{name}\b", cmake):
            yield f"{name}: no file of cmake/ builds {room}/{name}.c"
    script = (top / "scripts/test.sh").read_text()
    if "tests/fuzz/corpus/$name" not in script:
        yield "scripts/test.sh: the targets do not get tests/fuzz/corpus/$name"


def check_folder(name, folder):
    files = sorted(folder.rglob("*")) if folder.is_dir() else []
    if not files:
        yield f"{name}: no corpus: tests/fuzz/corpus/{name} has no file"
    if any(not file.is_file() for file in files):
        yield f"{name}: its corpus has something other than files"
    sizes = [file.stat().st_size for file in files if file.is_file()]
    if len(sizes) > FILES or sum(sizes) > BYTES or max(sizes, default=0) > ONE:
        yield f"{name}: its corpus has {len(sizes)} files and {sum(sizes)} bytes, the largest {max(sizes)}; up to " \
              f"{FILES}, {BYTES} and {ONE} are kept"


def check_ignored(top):
    """Files of a corpus that .gitignore leaves out of a commit, although they lie there."""
    done = subprocess.run(["git", "ls-files", "-oi", "--exclude-standard", "tests/fuzz/corpus"], cwd=top,
                          capture_output=True, text=True)
    for name in done.stdout.split():
        yield f"{name}: .gitignore keeps it out of a commit"


def check(top):
    found, corpus = targets(top), top / "tests/fuzz/corpus"
    errors = list(check_built(top, found))
    for name in found:
        errors += check_folder(name, corpus / name)
    for folder in sorted(corpus.iterdir()) if corpus.is_dir() else []:
        if folder.name not in found:
            errors.append(f"{folder.name}: a corpus without a target")
    return errors + list(check_ignored(top))


def plant(top):
    """A tree that is right: one target that a pattern builds, one that is named."""
    files = {
        "tests/fuzz/fuzz_a.c": "int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)\n{\n}\n",
        "tests/fuzz/fuzz_seeds.h": "", "tests/model/fuzz_b.c": "int LLVMFuzzerTestOneInput(int x)\n{\n}\n",
        "cmake/a.cmake": "file(GLOB all tests/fuzz/fuzz_*.c)\nset(more model/fuzz_b)\n",
        "scripts/test.sh": 'seeds=("tests/fuzz/corpus/$name")\n',
        "tests/fuzz/corpus/fuzz_a/1": "x", "tests/fuzz/corpus/fuzz_b/1": "x",
    }
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


CORPUS = "tests/fuzz/corpus/"
# What is wrong, the files that make it so (None: removed), and the words of the error.
PLANTED = [
    ("nothing", {}, None),
    ("an empty corpus", {CORPUS + "fuzz_a/1": None}, "fuzz_a: no corpus"),
    ("a target without a corpus", {"tests/cli/fuzz_c.c": "int LLVMFuzzerTestOneInput(int x)\n{\n}\n"},
     "fuzz_c: no corpus"),
    ("a target that is not built", {"cmake/a.cmake": "file(GLOB all tests/fuzz/fuzz_*.c)\n"}, "builds model/fuzz_b.c"),
    ("no pattern", {"cmake/a.cmake": "set(more model/fuzz_b)\n"}, "the pattern"),
    ("a corpus without a target", {CORPUS + "fuzz_d/1": "x"}, "fuzz_d: a corpus without a target"),
    ("a large file", {CORPUS + "fuzz_a/2": "x" * (ONE + 1)}, "fuzz_a: its corpus has 2 files"),
    ("many files", {f"{CORPUS}fuzz_b/{i}": "x" for i in range(FILES + 1)}, "fuzz_b: its corpus has 41 files"),
    ("many bytes", {f"{CORPUS}fuzz_b/{i}": "x" * ONE for i in range(5)}, "fuzz_b: its corpus has 5 files"),
    ("a folder in a corpus", {CORPUS + "fuzz_a/more/1": "x"}, "something other than files"),
    ("a script that gives no corpus", {"scripts/test.sh": "true\n"}, "do not get"),
]


def check_planted():
    for what, files, words in PLANTED:
        with tempfile.TemporaryDirectory() as folder:
            top = pathlib.Path(folder)
            plant(top)
            for name, text in files.items():
                if text is None:
                    (top / name).unlink()
                else:
                    (top / name).parent.mkdir(parents=True, exist_ok=True)
                    (top / name).write_text(text)
            found = check(top)
            if not any(words in error for error in found) if words else found:
                yield f"planted {what}: expected {words or 'no error'}, found {found}"


def main():
    top = pathlib.Path(sys.argv[1]).resolve()
    errors = check(top) + list(check_planted())
    count = len(targets(top))
    if count < 10:
        errors.append(f"only {count} targets were found")
    print("\n".join(errors))
    print(f"{count} fuzz targets, {len(PLANTED)} planted trees: {len(errors)} error(s)")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
