#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.benchmark_cached`."""
from esa.programs import benchmark_cached, program

if __name__ == "__main__":
    raise SystemExit(program.run("benchmark_cached", benchmark_cached.main))
