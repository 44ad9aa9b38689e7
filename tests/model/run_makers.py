# SPDX-License-Identifier: Apache-2.0
"""Runs makers of goldens: run_makers.py FOLDER, and a JSON list of [script, argument, ...] on standard input.

Importing torch, diffusers and transformers takes longer than most makers do. This process imports them once and forks
a child for each maker, so that no maker sees what another one set. Ends at the first that fails."""
import json
import os
import runpy
import sys
import traceback

# Both packages load their parts when they are first named.
import diffusers  # noqa: F401
import numpy  # noqa: F401
import safetensors.torch  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401
from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel  # noqa: F401
from transformers import PreTrainedTokenizerFast, T5TokenizerFast, UMT5EncoderModel  # noqa: F401


def run(folder, maker):
    """In a child: the script as if it had been called by itself. Returns its exit status."""
    path = os.path.join(folder, maker[0])
    sys.path.insert(0, folder)
    sys.argv = [path, *maker[1:]]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def main():
    folder = os.path.abspath(sys.argv[1])
    for maker in json.load(sys.stdin):
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = run(folder, maker)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(status)
        status = os.waitpid(child, 0)[1]
        if status:
            print(f"run_makers: {' '.join(maker)} failed ({os.waitstatus_to_exitcode(status)})", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
