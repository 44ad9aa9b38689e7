# SPDX-License-Identifier: Apache-2.0
"""MindIE-SD's `sparse_attention`, computed by esa: `from mindiesd import sparse_attention` in code written for
MindIE-SD runs unchanged.

This package stands in for one function and refuses to stand beside the real MindIE-SD."""
from importlib import metadata as _metadata

PROVIDED_BY = "esa-mindiesd"

for _name in ("mindiesd", "mindie-sd", "mindie_sd"):
    try:
        _found = _metadata.version(_name)
    except _metadata.PackageNotFoundError:
        continue
    raise ImportError(
        f"MindIE-SD {_found} is installed, and {PROVIDED_BY} has taken its place: pip uninstall {PROVIDED_BY}, "
        "then install MindIE-SD again")

from esa import sparse_attention  # noqa: E402

__all__ = ["sparse_attention"]
