#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.evaluate`."""
from esa.programs import evaluate, program

if __name__ == "__main__":
    raise SystemExit(program.run("evaluate", evaluate.main))
