#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The section "How to add a selector" of docs/selectors.md is true: check_new_selector.py SOURCE BUILD CC.

Puts the code of the section into a copy of the sources, at the places that it names, compiles the rooms that see the
rows, and links them before the other objects of BUILD's libesa.a. new_selector.c uses the result. So does BUILD's
command, which was compiled without the selector and offers it by its name. Where there is an nvcc, the file for the GPU
is compiled."""
import multiprocessing.pool
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

SOURCE, BUILD = (pathlib.Path(path).resolve() for path in sys.argv[1:3])
CC = [sys.argv[3], "-std=c11", "-D_POSIX_C_SOURCE=200809L", "-O0", "-Wall", "-Wextra", "-Wpedantic", "-Werror"]
ROOMS = ("mask", "select", "attn", "workplan", "maskfile", "session")   # with src/rules in tests/tree/check_rooms.py


def section():
    """The code blocks of the section, in order, without their indentation."""
    page = (SOURCE / "docs/selectors.md").read_text().split("\n## How to add a selector\n")[1].split("\n## ")[0]
    blocks = re.findall(r"^   ```\w+\n(.*?)^   ```$", page, re.M | re.S)
    return [re.sub("^   ", "", code, flags=re.M) for code in blocks]


def put(path, pattern, code):
    """Replaces the last match of the pattern by code, in which {} stands for the match."""
    text = path.read_text()
    last = list(re.finditer(pattern, text, re.M))[-1]
    path.write_text(text[:last.start()] + code.replace("{}", last[0]) + text[last.end():])


def run(*command):
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(str(word) for word in command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def follow_the_steps(top):
    number, traits, row, cpu, gpu = section()
    rows = top / "src/rules/selectors.h"
    put(top / "include/esa/esa.h", r"ESA_SELECT_\w+ = \d+", "{},\n    " + number.split("/*")[0])
    put(rows, r"/\* clang-format off \*/", traits + "{}")
    put(rows, r"^    ROW\(.*$", "{} \\\n    " + row.rstrip())
    (top / "src/select/nearest.c").write_text(cpu)
    (top / "src/cuda/selection/nearest.cu").write_text(gpu)


def build(top, folder):
    """The library with the selector, as folder/libesa.so.2."""
    include = [f"-I{top}/include", f"-I{top}/src", f"-I{BUILD}/generated"]

    def compiled(source):
        made = folder / f"{source.parent.name}_{source.stem}.o"
        run(*CC, *include, "-fPIC", "-fvisibility=hidden", "-c", source, "-o", made)
        return made

    sources = [source for room in ROOMS for source in sorted((top / "src" / room).glob("*.c"))]
    with multiprocessing.pool.ThreadPool(2) as pool:
        objects = pool.map(compiled, sources)
    library = folder / "libesa.so.2"
    run(sys.argv[3], "-shared", "-o", library, *objects, "-Wl,--allow-multiple-definition", "-Wl,--whole-archive",
        BUILD / "libesa.a", "-Wl,--no-whole-archive", f"-Wl,--version-script={BUILD}/generated/esa.map",
        "-Wl,-soname,libesa.so.2", "-lm", "-ldl", "-lpthread")
    run(*CC, *include, SOURCE / "tests/tree/new_selector.c", "-o", folder / "new_selector", library,
        f"-Wl,-rpath,{folder}")


def main():
    with tempfile.TemporaryDirectory() as name:
        folder, top = pathlib.Path(name), pathlib.Path(name) / "tree"
        for part in ("include", "src"):
            shutil.copytree(SOURCE / part, top / part)
        follow_the_steps(top)
        build(top, folder)
        run(folder / "new_selector", folder / "masks")
        shutil.copy(BUILD / "esa", folder)              # it looks for its library beside itself
        says = run(folder / "esa", "masks", "select", "--help") + run(folder / "esa", "masks", "info", folder / "masks")
        if "random|error|nearest" not in says or "selector    nearest" not in says:
            sys.exit(f"the command does not know the selector:\n{says}")
        if nvcc := shutil.which("nvcc"):
            run(nvcc, "-std=c++17", "-arch=sm_80", "-Xcompiler=-Werror=missing-declarations", f"-I{top}/include",
                f"-I{top}/src", "-c", top / "src/cuda/selection/nearest.cu", "-o", folder / "nearest.o")
    print("nearest: selects, is saved, runs in a session, and the command offers it")


if __name__ == "__main__":
    main()
