# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.run_experiment`; the program is esa/programs/run_experiment.py."""
from .programs import program
from .programs.run_experiment import main

if __name__ == "__main__":
    raise SystemExit(program.run("run_experiment", main))
