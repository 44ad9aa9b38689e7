#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.generate`."""
from esa.programs import generate, program

if __name__ == "__main__":
    raise SystemExit(program.run("generate", generate.main))
