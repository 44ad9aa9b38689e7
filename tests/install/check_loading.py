#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""No library is loaded from the current folder: check_loading.py ESA_COMMAND [LIBRARY...].

The current folder holds a decoy under the name of every library that the command and LIBRARY need, and of the CBLAS
that the command opens at run time. The decoy's constructor ends the process with a status of its own, so a command that
runs as usual has loaded none of them."""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

DECOY = "#include <unistd.h>\n__attribute__((constructor)) static void caught(void) { _exit(86); }\n"
CAUGHT = 86
OPENED = {"libopenblas.so.0", "libopenblas.so", "libcblas.so.3", "libcuda.so.1", "libesa_cuda.so",
          "libmicrohttpd.so.12", "libmicrohttpd.so"}
COMMANDS = (["--version"], ["doctor"], ["generate", "--check"],
            ["serve", "--insecure", "--host", "256.256.256.256"])      # it fails behind the library


def needed(path):
    text = subprocess.run(["readelf", "-W", "-d", path], capture_output=True, text=True, check=True).stdout
    return set(re.findall(r"\(NEEDED\).*\[(.*)\]", text))


def took(done):
    """1 if the process ran a decoy, or if its loader opened one: a decoy of libc lacks its functions."""
    words = r"error while loading shared libraries|version .* not found|symbol lookup error|undefined symbol"
    return done.returncode == CAUGHT or bool(re.search(words, done.stderr))


def main(command, libraries):
    names = set(OPENED)
    for path in (command, *libraries):
        names |= needed(path)
    hidden = ("LD_LIBRARY_PATH", "LD_PRELOAD", "ESA_LIB", "ESA_CUDA_LIB")
    environment = {n: v for n, v in os.environ.items() if n not in hidden}
    errors = []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "decoy.c").write_text(DECOY)
        subprocess.run(["cc", "-shared", "-fPIC", "decoy.c", "-o", "decoy.so"], cwd=folder, check=True)
        for name in names:
            shutil.copy(folder / "decoy.so", folder / name)

        def run(words, **more):
            return subprocess.run([command, *words], cwd=folder, env={**environment, **more}, capture_output=True,
                                  text=True, timeout=120)

        # A loader that is told to look here does take them, so the decoys work.
        if not took(run(["--version"], LD_LIBRARY_PATH=".")):
            errors.append("the decoys do nothing even where the loader is told to take them")
        for words in COMMANDS:
            done = run(words)
            if took(done):
                errors.append(f"esa {' '.join(words)} ran code of the current folder")
            elif done.returncode < 0 or not done.stdout + done.stderr:
                errors.append(f"esa {' '.join(words)} ended with {done.returncode}: {done.stderr[-300:]}")
    for error in errors:
        print(f"check_loading: {error}", file=sys.stderr)
    print(f"{len(names)} decoys, {len(COMMANDS)} commands")
    return 1 if errors else 0


if __name__ == "__main__":
    paths = [pathlib.Path(a).resolve() for a in sys.argv[1:]]
    sys.exit(main(paths[0], paths[1:]))
