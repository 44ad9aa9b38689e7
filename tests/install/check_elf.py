#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Where programs and libraries look for others, and how they are hardened.

    check_elf.py [--packed] [--foreign NAME] FOLDER...

Looks at every program and shared library below the folders. No part of a search path is empty or relative, because the
loader takes both for the current folder. Programs load anywhere, functions are bound before the program runs and their
tables are read-only then, no stack is executable, and esa's own libraries and command check their stacks and calls of
libc (FORTIFY). Descriptions of wrong files are planted first, and each must be found.

    --packed        the files run elsewhere: every part of a search path is relative to the file ($ORIGIN)
    --foreign NAME  a file that others built (a library that a bundle brings along): only its search path is checked;
                    NAME is its folder, relative to FOLDER"""
import argparse
import os
import pathlib
import re
import struct
import subprocess
import sys

OWN = re.compile(r"libesa(_video|_cuda)?\.so(\.\d+)*|esa")
# Instructions of x86-64 that read the canary, %fs:0x28. esa's files have 369 and more; without stack protection only a
# runtime that is linked statically has some.
CANARY = re.compile(rb"\x64[\x48\x4c][\x2b\x33\x3b\x8b].\x25\x28\x00\x00\x00", re.S)
CANARIES = 100


def is_linked(path):
    """A program or shared library: not an object file, not an archive, and no link to one."""
    if path.is_symlink() or not path.is_file():
        return False
    with open(path, "rb") as file:
        head = file.read(18)
    return head[:4] == b"\x7fELF" and len(head) == 18 and struct.unpack("<H", head[16:])[0] in (2, 3)


def linked_files(folder):
    for parent, folders, files in os.walk(folder):
        if "CMakeFiles" in folders:     # what CMake tried out while it configured
            folders.remove("CMakeFiles")
        yield from (p for p in (pathlib.Path(parent, f) for f in sorted(files)) if is_linked(p))


def readelf(path):
    done = subprocess.run(["readelf", "-W", "-h", "-l", "-d", "--dyn-syms", path], capture_output=True, text=True,
                          check=True, env={**os.environ, "LC_ALL": "C"})
    return done.stdout


def search_paths(text):
    return re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text)


def path_faults(text, packed):
    for whole in search_paths(text):
        for part in whole.split(":"):
            if not part:
                yield f"its search path {whole!r} has an empty part"
            elif part != "$ORIGIN" and not part.startswith(("$ORIGIN/", "/")):
                yield f"its search path {whole!r} has a relative part"
            elif packed and part.startswith("/"):
                yield f"its search path {whole!r} names a folder of the machine that built it"


def hardening_faults(name, text, canaries):
    if not re.search(r"Type:\s+DYN", text):
        yield "it loads at a fixed address (no PIE)"
    if "GNU_RELRO" not in text:
        yield "it has no PT_GNU_RELRO"
    if not re.search(r"BIND_NOW|\bFlags:.*\bNOW\b", text):
        yield "its functions are bound late (no BIND_NOW)"
    stack = re.search(r"GNU_STACK.*", text)
    if not stack or re.search(r"\sRWE\s", stack.group()):
        yield "its stack is executable"
    # Zig links __stack_chk_fail statically into a library: then only the code tells.
    if OWN.fullmatch(name) and "__stack_chk_fail" not in text and canaries < CANARIES:
        yield f"it does not check its stack (no __stack_chk_fail, and {canaries} reads of a canary)"
    if OWN.fullmatch(name) and not re.search(r" __(?!stack_)\w+_chk\b", text):
        yield "it does not check its calls of libc (FORTIFY: no __..._chk)"


# What readelf says of a sound file of ours; then what is replaced, by what, and words of the error.
SOUND = """Type: DYN (Shared object file)
  GNU_STACK 0x0 0x0 0x0 0x0 0x0 RW 0x10
  GNU_RELRO 0x0 0x0 0x0 0x0 0x0 R 0x1
 0x1d (RUNPATH) Library runpath: [$ORIGIN:$ORIGIN/../lib]
 0x1e (FLAGS) BIND_NOW
  1: 0 0 FUNC GLOBAL DEFAULT UND __snprintf_chk@GLIBC_2.3.4 (5)
  2: 0 0 FUNC GLOBAL DEFAULT UND __stack_chk_fail@GLIBC_2.4 (6)
"""
PLANTED = [
    ("[$ORIGIN:$ORIGIN/../lib]", "[$ORIGIN::::]", "an empty part"),
    ("[$ORIGIN:$ORIGIN/../lib]", "[/opt/lib:]", "an empty part"),
    ("[$ORIGIN:$ORIGIN/../lib]", "[:/opt/lib]", "an empty part"),
    ("(RUNPATH) Library runpath: [$ORIGIN:$ORIGIN/../lib]", "(RPATH) Library rpath: [/opt/lib]", "names a folder"),
    ("$ORIGIN/../lib", "../lib", "a relative part"),
    ("$ORIGIN/../lib", "$ORIGINAL/lib", "a relative part"),
    ("$ORIGIN/../lib", "/opt/lib", "names a folder"),
    ("DYN (Shared object file)", "EXEC (Executable file)", "no PIE"),
    ("GNU_RELRO", "GNU_PROPERTY", "no PT_GNU_RELRO"),
    ("BIND_NOW", "SYMBOLIC", "no BIND_NOW"),
    (" RW ", " RWE ", "its stack is executable"),
    ("GNU_STACK", "GNU_OTHER", "its stack is executable"),
    ("__stack_chk_fail", "abort", "does not check its stack"),
    ("__snprintf_chk", "snprintf", "does not check its calls"),
]


def check_planted():
    for old, new, words in [("Type", "Type", ""), *PLANTED]:
        text = SOUND.replace(old, new)
        found = [*path_faults(text, True), *hardening_faults("libesa.so.2", text, CANARIES - 1)]
        if not words and found or words and not any(words in fault for fault in found):
            yield f"planted {new!r}: expected {words or 'no fault'}, found {found}"
    reads = b"\x64\x48\x8b\x04\x25\x28\0\0\0 \x64\x4c\x2b\x0c\x25\x28\0\0\0 \x64\x48\x8b\x04\x25\x10\0\0\0"
    if len(CANARY.findall(reads)) != 2:
        yield f"planted: {len(CANARY.findall(reads))} of 2 reads of a canary were found"
    if list(hardening_faults("libesa.so.2", SOUND.replace("__stack_chk_fail", "abort"), CANARIES)):
        yield "planted: a library with its own __stack_chk_fail was refused"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--packed", action="store_true")
    parser.add_argument("--foreign")
    parser.add_argument("folders", nargs="+", type=pathlib.Path)
    arguments = parser.parse_args()
    faults, count, own = list(check_planted()), 0, 0
    for folder in arguments.folders:
        for path in linked_files(folder):
            text = readelf(path)
            count += 1
            faults += [f"{path}: {fault}" for fault in path_faults(text, arguments.packed)]
            if arguments.foreign and path.is_relative_to(folder / arguments.foreign):
                continue
            own += OWN.fullmatch(path.name) is not None
            canaries = len(CANARY.findall(path.read_bytes())) if OWN.fullmatch(path.name) else 0
            faults += [f"{path}: {fault}" for fault in hardening_faults(path.name, text, canaries)]
    if own < 2:
        faults.append(f"{own} of esa's own files were found among {count}, expected libesa and the command at least")
    for fault in sorted(set(faults)):
        print(f"check_elf: {fault}", file=sys.stderr)
    print(f"{count} programs and libraries")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
