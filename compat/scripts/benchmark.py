#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.benchmark`."""
from esa.programs import benchmark, program

if __name__ == "__main__":
    raise SystemExit(program.run("benchmark", benchmark.main))
