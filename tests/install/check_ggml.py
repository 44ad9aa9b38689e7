#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""examples/06_ggml.c with a real ggml: check_ggml.py SOURCE BUILD_DIR.

Fetches the source package of stable-diffusion-cpp-python from the package index, which carries the ggml of
stable-diffusion.cpp, builds that ggml for the CPU, builds the example against it, and runs it. Exit status 77: the
package could not be fetched."""
import os
import pathlib
import re
import subprocess
import sys
import tarfile
import tempfile

PACKAGE = "stable-diffusion-cpp-python==0.4.7"


def fetch(folder):
    """The folder of ggml, or None."""
    done = subprocess.run([sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", ":all:", "--dest",
                           str(folder), PACKAGE], capture_output=True, text=True)
    archives = list(folder.glob("*.tar.gz"))
    if done.returncode or not archives:
        print(f"{PACKAGE} could not be fetched: {done.stderr[-300:]}")
        return None
    safe = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}      # older Pythons do not know it
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, [m for m in archive.getmembers() if "/ggml/" in m.name], **safe)
    return next(folder.glob("*/vendor/stable-diffusion.cpp/ggml"))


def run(*words, **named):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, **named)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main(source, build):
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        ggml = fetch(scratch)
        if ggml is None:
            return 77
        version = dict(re.findall(r"set\(GGML_VERSION_(\w+) (\d+)\)", (ggml / "CMakeLists.txt").read_text()))
        made = scratch / "made"
        run("cmake", "-S", ggml, "-B", made, "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=OFF",
            "-DGGML_OPENMP=OFF", "-DGGML_NATIVE=OFF", "-DGGML_BUILD_TESTS=OFF", "-DGGML_BUILD_EXAMPLES=OFF",
            "-DGGML_CCACHE=OFF")
        run("cmake", "--build", made, "-j", os.cpu_count() or 1)
        libraries = [next(made.rglob(f"lib{name}.a")) for name in ("ggml", "ggml-cpu", "ggml-base")]
        program = scratch / "example"
        run("cc", "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", f"-I{source / 'include'}", "-isystem",
            ggml / "include", source / "examples" / "06_ggml.c", "-o", program, f"-L{build}", f"-Wl,-rpath,{build}",
            "-lesa", *libraries, "-lstdc++", "-lpthread", "-ldl", "-lm")
        print(f"ggml {version['MAJOR']}.{version['MINOR']}.{version['PATCH']} of {PACKAGE}")
        print(run(program, timeout=300), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()))
