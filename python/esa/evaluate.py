# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.evaluate`; the program is esa/programs/evaluate.py."""
from .programs import program
from .programs.evaluate import main

if __name__ == "__main__":
    raise SystemExit(program.run("evaluate", main))
