# SPDX-License-Identifier: Apache-2.0
"""`python -m esa.export_mp4`; the program is esa/programs/export_mp4.py."""
from .programs import program
from .programs.export_mp4 import main

if __name__ == "__main__":
    raise SystemExit(program.run("export_mp4", main))
