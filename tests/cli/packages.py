# SPDX-License-Identifier: Apache-2.0
"""Packages that a check needs beside the standard library.

    packages.need("requirements-cli.txt", "jsonschema")

Returns if they can be imported. Otherwise starts the program again in an environment of that file, which
scripts/python-env.sh makes once."""
import fcntl
import importlib.util
import os
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))


def need(requirements, *names):
    if all(importlib.util.find_spec(name) for name in names):
        return
    path = os.path.join(HERE, requirements)
    with open(path, "rb") as file:                      # one check at a time makes it
        fcntl.flock(file, fcntl.LOCK_EX)
        python = subprocess.run([os.path.join(HERE, "..", "..", "scripts", "python-env.sh"), path], check=True,
                                stdout=subprocess.PIPE, text=True).stdout.strip()
    if os.path.realpath(os.path.dirname(python)) == os.path.realpath(os.path.dirname(sys.executable)):
        raise SystemExit(f"{python} has no {' or no '.join(names)}, although {requirements} names it")
    os.execv(python, [python, *sys.orig_argv[1:]])
