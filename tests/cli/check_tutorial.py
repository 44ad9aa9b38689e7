#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""docs/tutorial.md and docs/masks.md as their readers follow them: check_tutorial.py SOURCE [BUILD]. Standard library
only.

Every fenced block marked `sh` of a page is run, in order, in one shell, in a scratch folder that holds a fresh copy of
the source as `esa`; the first line that fails ends it. The second page finds what the first one has built. With BUILD
(a folder with an esa in it) the lines that build are left out and BUILD is put into the PATH instead. Blocks marked
`python` are run by tests/python/test_docs.py."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time

SOURCE = os.path.abspath(sys.argv[1])
BUILD = os.path.abspath(sys.argv[2]) if len(sys.argv) > 2 else None
WORDS = 2200            # ten minutes at 220 words a minute
FIRST = ["dense.mp4", "sparse.mp4", "both.mp4", "balanced.json", "faithful.mp4", "fast.mp4"]
MADE = [
    "my-model", "first.mp4", "first-dense.mp4", "masks/my-model.safetensors", "masks/my-model-0.5.safetensors",
    "cached.mp4", "cached-0.4.mp4", "final.mp4", "metrics.json", "speed.json", "table.md", "report.html",
    "results/pooled/quality.json", "results/pooled/speed.json", "results/no-tail/quality.json"
]


def blocks(text):
    """(language, line, content) of every fenced block, and the text around them."""
    found, prose, inside = [], [], None
    for number, line in enumerate(text.splitlines(), 1):
        fence = re.match(r"```(\w*)\s*$", line)
        if fence and inside is None:
            inside = (fence.group(1), number + 1, [])
        elif fence:
            found.append((inside[0], inside[1], "\n".join(inside[2])))
            inside = None
        elif inside is not None:
            inside[2].append(line)
        else:
            prose.append(line)
    assert inside is None, "a block that does not end"
    return found, "\n".join(prose)


def script(commands):
    """One shell for all: what a block sets, the next one finds."""
    lines = ["set -euo pipefail"]
    for number, (line, content) in enumerate(commands, 1):
        lines += [f"echo '==== block {number}, line {line}' >&2", content]
    return "\n".join(lines + ["echo '==== the end' >&2", ""])


def copy_source(folder):
    if os.path.isdir(os.path.join(SOURCE, ".git")):
        subprocess.run(["git", "clone", "-q", SOURCE, folder], check=True)
    else:
        shutil.copytree(SOURCE, folder, ignore=shutil.ignore_patterns("build", "build-*", ".git"))


def read(name, languages, least):
    """The commands of a page, (line, content), its text and the number of its words."""
    with open(os.path.join(SOURCE, "docs", name), encoding="utf-8") as file:
        found, prose = blocks(file.read())
    unknown = {language for language, _, _ in found} - languages
    assert not unknown, f"{name}: blocks nobody runs: {unknown}"
    words = len(re.findall(r"\w[\w'.-]*", prose))
    assert words <= WORDS, f"{name}: {words} words are more than ten minutes of reading"
    commands = [(line, content) for language, line, content in found if language == "sh"]
    assert len(commands) >= least, f"{name} has lost its commands"
    return commands, prose, words


def built(content):
    """The block without the lines that build: BUILD is in the PATH."""
    builds = ("scripts/setup.sh", "make ", "export PATH")
    return "\n".join(line for line in content.splitlines() if not line.startswith(builds))


def run(commands, folder, env):
    done = subprocess.run(["bash", "-c", script(commands)], cwd=folder, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace")
    print(done.stdout)
    if done.returncode != 0:
        sys.exit(f"the tutorial ended with status {done.returncode} behind the last block named above")


def main():
    first, _, _ = read("tutorial.md", {"sh", "text", "python"}, 3)
    commands, prose, words = read("masks.md", {"sh", "text"}, 10)
    picture = re.search(r"!\[[^\]]+\]\((.+?)\)", prose).group(1)
    with open(os.path.join(SOURCE, "docs", picture), "rb") as file:
        head = file.read(24)
    assert head.startswith(b"\x89PNG") and struct.unpack(
        ">I", head[16:20])[0] >= 800, "docs/report.png is no picture of a page"
    assert os.path.getsize(os.path.join(SOURCE, "docs", picture)) < 400_000

    with tempfile.TemporaryDirectory() as scratch:
        env = {key: value for key, value in os.environ.items() if not key.startswith(("ESA_", "HF_"))}
        copy_source(os.path.join(scratch, "esa"))
        if BUILD:
            first, commands = ([(line, built(content)) for line, content in page] for page in (first, commands))
            env.update(PATH=BUILD + os.pathsep + env["PATH"], ESA_MODELS=os.path.join(SOURCE, "models"))
        start = time.monotonic()
        run(first, scratch, env)
        run(commands, scratch, env)
        missing = [name for name in FIRST if not os.path.exists(os.path.join(scratch, "first", name))]
        assert not missing, f"promised and not made: {missing}"
        folder = os.path.join(scratch, "tutorial")
        missing = [name for name in MADE if not os.path.exists(os.path.join(folder, name))]
        assert not missing, f"promised and not made: {missing}"
        full, kept = (os.path.getsize(os.path.join(folder, "masks", name))
                      for name in ("my-model.safetensors", "my-model-0.5.safetensors"))
        assert kept < full / 2, f"the file to keep has {kept} bytes, the full one {full}"
        with open(os.path.join(folder, "results/pooled/quality.json"), encoding="utf-8") as file:
            variants = json.load(file)["variants"]
        assert [v["budget"] for v in variants if v["method"] != "dense"] == [0.7, 0.5, 0.3]
        with open(os.path.join(folder, "report.html"), encoding="utf-8") as file:
            assert file.read().count("<video") == 2 * 4 + 2 * 2
        print(f"{len(first) + len(commands)} blocks, {words} words, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
