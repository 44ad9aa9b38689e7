#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The engine's parity tests with goldens made now by the diffusers that is installed, every element kept.

    check_live.py SOURCE_DIR TEST_PROGRAMS_DIR

Exit 77 (skipped) where one of its packages is missing. $ESA_PYTHON may name another interpreter that has them.
$ESA_LIVE_LONG=1 (in `make test-all`) draws more strings for the tokenizers, and makes the tables of characters anew."""
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time

SKIP = 77


def tables_differ(source, python):
    """Whether unicode_tables.c is another one than `tokenizers` gives now. Only for the version that it was made with:
    others have other versions of Unicode."""
    table = os.path.join(source, "src", "model", "text", "unicode_tables.c")
    with open(table) as file:
        stored = file.read()
    made_with = re.search(r"As in tokenizers (\d+\.\d+)\.", stored)[1]
    probe = "import tokenizers; print(tokenizers.__version__)"
    now = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=True).stdout
    if not now.startswith(made_with + "."):
        print(f"tokenizers {now.strip()}: the tables are those of {made_with}, not compared")
        return 0
    tool = os.path.join(source, "tools", "tables", "unicode_text.py")
    fresh = subprocess.run([python, tool], capture_output=True, text=True, check=True).stdout

    def numbers(text):
        return text.split("*/", 1)[1]                   # without the version in the first lines

    print("tables of characters:", "the same" if numbers(fresh) == numbers(stored) else "DIFFERENT")
    return int(numbers(fresh) != numbers(stored))


def main():
    source, programs = sys.argv[1], sys.argv[2]
    python = os.environ.get("ESA_PYTHON", sys.executable)
    probe = "import torch, safetensors, diffusers, transformers, sentencepiece; print(diffusers.__version__)"
    found = subprocess.run([python, "-c", probe], capture_output=True, text=True)
    if found.returncode != 0:
        print("torch, safetensors, diffusers, transformers or sentencepiece is not installed: skipped")
        return SKIP
    version = found.stdout.split()[-1]
    newer = tuple(int(n) for n in version.split(".")[:2]) >= (0, 37)
    long = os.environ.get("ESA_LIVE_LONG") == "1"
    golden = os.path.join(source, "tests", "golden")
    tools = os.path.join(source, "tools", "golden")
    with tempfile.TemporaryDirectory(prefix="esa-live-") as folder:
        for name in os.listdir(golden):                 # what is not made anew stays as it is
            path = os.path.join(golden, name)
            shutil.copytree(path, os.path.join(folder, name)) if os.path.isdir(path) else shutil.copy(path, folder)

        def at(name):
            return os.path.join(folder, name)

        strings = "50000" if long else "3000"           # for test_bpe
        rule = "unipc" if newer else "unipc_036"
        masks = at("masks.safetensors")
        model = os.path.join(source, "models", "wan-tiny")
        environment = dict(os.environ, ESA_TEST_GOLDEN=folder, ESA_TEST_MODELS=os.path.join(source, "models"))
        subprocess.run([os.path.join(programs, "test_wan_sparse")], env=dict(environment, ESA_TEST_DUMP=masks),
                       check=True, stdout=subprocess.DEVNULL)
        makers = [
            ["wan_sched.py", "--rule", rule, "--out", at(f"sched_{rule}.safetensors")],
            ["wan_sched.py", "--rule", "euler", "--out", at("sched_euler.safetensors")],
            ["wan_dit.py", "--every", "1", "--out", at("wan_dit.safetensors")],
            ["wan_sparse.py", "--every", "1", "--masks", masks, "--out", at("wan_sparse.safetensors")],
            ["wan_tiny_dit.py", "--model", model, "--out", at("wan_tiny_dit.safetensors")],
            ["wan_vae.py", "--every", "1", "--model", model, "--out", at("wan_vae.safetensors")],
            ["cog.py", "--every", "1", "--out", at("cog.safetensors")],
            ["umt5.py", "--every", "1", "--model", model, "--out", at("umt5.safetensors")],
            ["tokens.py", "--keep", "--model", model, "--out", folder],
            ["hunyuan.py", "--every", "1", "--out", folder],
            ["bpe.py", "--keep", "--random", strings, "--seed", str(int(time.time())), "--out", folder],
        ]
        programs_run = ["test_sched", "test_wan_dit", "test_wan_sparse", "test_wan_vae", "test_umt5", "test_tokenizer",
                        "test_bpe", "test_cog", "test_hunyuan_text", "test_hunyuan_dit", "test_hunyuan_vae"]
        if newer:                                       # from prompt to pixels; older versions have other sigmas
            makers.append(["pipeline.py", model, at("pipeline.safetensors")])
            programs_run.append("test_pipeline")
        subprocess.run([python, os.path.join(source, "tests", "model", "run_makers.py"), tools],
                       input=json.dumps(makers), text=True, check=True, env=dict(os.environ, OMP_NUM_THREADS="1"))
        print(f"diffusers {version}")
        failed = tables_differ(source, python) if long else 0
        for program in programs_run:
            failed += subprocess.run([os.path.join(programs, program)], env=environment).returncode != 0
        return failed


if __name__ == "__main__":
    sys.exit(main())
