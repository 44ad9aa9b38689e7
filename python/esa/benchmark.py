# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.benchmark`; the program is esa/programs/benchmark.py."""
from .programs import program
from .programs.benchmark import main

if __name__ == "__main__":
    raise SystemExit(program.run("benchmark", main))
