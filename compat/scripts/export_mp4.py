#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The original's name for `python -m esa.export_mp4`."""
from esa.programs import export_mp4, program

if __name__ == "__main__":
    raise SystemExit(program.run("export_mp4", export_mp4.main))
