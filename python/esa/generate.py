# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.generate`; the program is esa/programs/generate.py."""
from .programs import program
from .programs.generate import main

if __name__ == "__main__":
    raise SystemExit(program.run("generate", main))
