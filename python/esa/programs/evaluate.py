# SPDX-License-Identifier: Apache-2.0
"""How near generated videos are to their references: `esa evaluate` under the original's name.

    python -m esa.evaluate --reference results/dense --generated results/sparse-0.5 --output metrics.json

Options, pairing and JSON are those of the native command (docs/evaluate.md)."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from . import native


def main(arguments: Sequence[str] | None = None) -> None:
    native.run("evaluate", *(sys.argv[1:] if arguments is None else arguments))
