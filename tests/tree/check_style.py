#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The style of every file: check_style.py SOURCE.

C and CUDA are as clang-format 18.1.8 writes them (.clang-format). No line is longer than .editorconfig says: 100
columns in C, CUDA and Markdown, 120 elsewhere (in Python, ruff checks it). Rows of Markdown tables and lines with a
link may be longer. Files end with a newline, and no line ends with a blank. C says `if (status)`, never `== ESA_OK`
(CONTRIBUTING.md). clang-format leaves the lines of a comment alone, because a comment may hold a table.

The library formats and reads floating-point numbers through src/base/number.h, which has a decimal point in every
locale; the command needs no such care, because it never calls setlocale.

Then wrong files are planted, and each must be found."""
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

VERSION = "18.1.8"
C_FILES = (".c", ".h", ".cu", ".cuh", ".def")
WIDTH = {**dict.fromkeys(C_FILES, 100), ".md": 100, ".py": 10**6, ".sh": 120, ".cmake": 120, ".txt": 120, ".toml": 120,
         ".yml": 120}
NAMES = ("Makefile", ".editorconfig", ".clang-format", ".gitignore")
# Other projects' files, data, and pages that programs write.
NOT_OURS = ("third_party/", "models/", "tests/golden/", "docs/results/", "tests/fuzz/corpus/")
# Where no status is compared with ESA_OK or CLI_OK.
PLAIN_STATUS = ("src/", "cli/")
COMPARED = re.compile(r"[!=]=\s*(ESA|CLI)_OK\b|\b(ESA|CLI)_OK\s*[!=]=")
# file: why its lines may be longer
LONG = {}


# Calls that follow the locale of the program: reading a number, and writing one of these formats.
READS = re.compile(r"\b(?:strto(?:d|f|ld)|atof)\s*\(")
WRITES = re.compile(r"\bsn?printf\([^;]*?%[-+#0]*[\d*]*(?:\.[\d*]+)?[aefgAEFG]")
ALLOWED = ("src/base/number.h",)


def tracked(top):
    done = subprocess.run(["git", "ls-files", "-z"], cwd=top, capture_output=True, text=True, check=True)
    for name in done.stdout.split("\0"):
        path = pathlib.PurePath(name)
        if (path.suffix in WIDTH or path.name in NAMES) and not any(part in name for part in NOT_OURS):
            if (top / name).is_file() and not (top / name).is_symlink():
                yield name


def check_lines(top, name):
    suffix = pathlib.PurePath(name).suffix
    text = (top / name).read_text()
    if text and not text.endswith("\n"):
        yield f"{name}: no newline at the end"
    for number, line in enumerate(text.splitlines(), 1):
        if line != line.rstrip():
            yield f"{name}:{number}: a blank at the end of the line"
        if len(line) <= WIDTH.get(suffix, 120) or name in LONG:
            continue
        if suffix == ".md" and (line.lstrip().startswith("|") or re.search(r"\]\(|https?://", line)):
            continue
        yield f"{name}:{number}: {len(line)} columns, {WIDTH.get(suffix, 120)} are allowed"


def check_status(top, name):
    if not name.endswith(C_FILES) or not name.startswith(PLAIN_STATUS):
        return
    for number, line in enumerate((top / name).read_text().splitlines(), 1):
        found = COMPARED.search(line)
        if found:
            yield f"{name}:{number}: '{found.group()}': write if (status) and if (!status)"


def check_locale(top, name):
    text = (top / name).read_text()
    if name.startswith(("src/", "cli/")) and re.search(r"\bsetlocale\s*\(", text):
        yield f"{name}: calls setlocale"
    if name.startswith("src/") and name not in ALLOWED:
        for pattern in (READS, WRITES):
            for found in pattern.finditer(text):
                line = text.count("\n", 0, found.start()) + 1
                yield f"{name}:{line}: a number that follows the locale: call base/number.h"


def clang_format():
    """The program of the right version: beside this interpreter, or on the PATH."""
    beside = pathlib.Path(sys.executable).parent / "clang-format"
    for program in (str(beside), shutil.which("clang-format")):
        if program and shutil.which(program):
            done = subprocess.run([program, "--version"], capture_output=True, text=True)
            if VERSION in done.stdout:
                return program
    sys.exit(f"clang-format {VERSION} is needed: pip install clang-format=={VERSION}")


def check_format(program, top, names):
    done = subprocess.run([program, "--dry-run", "-Werror", "--style=file", *names], cwd=top, capture_output=True,
                          text=True)
    wrong = dict.fromkeys(re.findall(r"^([^:\n]+):\d+:\d+: error:", done.stderr, re.M))
    return [f"{name}: not as clang-format writes it: run clang-format -i {name}" for name in wrong]


def check(program, top, names):
    errors = check_format(program, top, [name for name in names if name.endswith(C_FILES)])
    for name in names:
        errors += check_lines(top, name)
        errors += check_status(top, name)
        if name.endswith(C_FILES):
            errors += check_locale(top, name)
    return errors


PLANTED = [
    ("a.c", "int  a;\n", "not as clang-format writes it"),
    ("b.c", "/* " + "x" * 100 + " */\n", "106 columns"),
    ("c.md", "word " * 21 + "word\n", "109 columns"),
    ("d.sh", "# " + "x" * 120 + "\n", "122 columns"),
    ("e.py", "a = 1 \n", "a blank at the end"),
    ("f.md", "no newline", "no newline at the end"),
    ("src/g.c", "int g(int s) { return s == ESA_OK; }\n", "write if (status)"),
    ("cli/report/h.c", "int h(int s) { return CLI_OK != s; }\n", "write if (status)"),
    ("cli/cmd_bench_i.c", "int i(int s) { return s !=ESA_OK; }\n", "write if (status)"),
    ("src/j.c", "double f(const char *s) { return strtod(s, 0); }\n", "follows the locale"),
    ("src/h.c", 'int f(char *o, double x) { return snprintf(o, 9, "%s is %.2f", "x", x); }\n', "follows the locale"),
    ("cli/i.c", 'void f(void) { setlocale(LC_ALL, ""); }\n', "calls setlocale"),
]


# A comment with a row that is too long. If clang-format broke it, the rows behind it would run together.
TABLE = f"""/* The shapes:
 *
 *     name     {"shape":{70}} remarks, in a column
 *     panel_q  {"[ceil(rows/nr)][D'][nr]":{70}} pairs along D interleaved
 *     rows_k   [rows][D']
 *     rows_v   [rows][D]
 */
int32_t a;
"""


def check_planted(program, top):
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder)
        shutil.copy(top / ".clang-format", copy)
        for name, text, words in PLANTED:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_text(text)
            found = check(program, copy, [name])
            if not any(words in error for error in found):
                errors.append(f"planted {name}: expected an error with '{words}', found {found}")
        (copy / "table.c").write_text(TABLE)
        done = subprocess.run([program, "--style=file", "table.c"], cwd=copy, capture_output=True, text=True)
        if done.stdout != TABLE:
            errors.append(f"planted table.c: clang-format changes its comment: {done.stdout}")
        if not any("table.c:4: 112 columns" in error for error in check(program, copy, ["table.c"])):
            errors.append("planted table.c: its row of 112 columns was not found")
    return errors


def main():
    top = pathlib.Path(sys.argv[1]).resolve()
    program = clang_format()
    names = list(tracked(top))
    if len(names) < 300:
        sys.exit(f"only {len(names)} files were found")
    errors = check(program, top, names) + check_planted(program, top)
    print("\n".join(errors))
    print(f"{len(names)} files, {len(PLANTED)} planted errors: {len(errors)} error(s)")
    sys.exit(bool(errors))


if __name__ == "__main__":
    main()
