# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.benchmark_cached`; the program is esa/programs/benchmark_cached.py."""
from .programs import program
from .programs.benchmark_cached import main

if __name__ == "__main__":
    raise SystemExit(program.run("benchmark_cached", main))
