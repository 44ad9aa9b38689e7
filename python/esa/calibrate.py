# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.calibrate`; the program is esa/programs/calibrate.py."""
from .programs import program
from .programs.calibrate import main

if __name__ == "__main__":
    raise SystemExit(program.run("calibrate", main))
