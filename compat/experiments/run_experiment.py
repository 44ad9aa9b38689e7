#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.run_experiment`."""
from esa.programs import run_experiment, program

if __name__ == "__main__":
    raise SystemExit(program.run("run_experiment", run_experiment.main))
