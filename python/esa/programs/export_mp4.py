# SPDX-License-Identifier: Apache-2.0
"""Video tensors (what python -m esa.generate writes) as MP4: `esa export` under the original's name.

    python -m esa.export_mp4 results/dense                  every video in the folder, 000.safetensors -> 000.mp4
    python -m esa.export_mp4 results/dense/000.safetensors --out cat.mp4

Options are those of the native command (docs/evaluate.md). The tensors stay."""
from __future__ import annotations

import sys
from collections.abc import Sequence

from . import native


def main(arguments: Sequence[str] | None = None) -> None:
    native.run("export", *(sys.argv[1:] if arguments is None else arguments))
