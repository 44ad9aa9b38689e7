#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.calibrate`."""
from esa.programs import calibrate, program

if __name__ == "__main__":
    raise SystemExit(program.run("calibrate", calibrate.main))
