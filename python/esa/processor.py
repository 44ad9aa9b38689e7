# SPDX-License-Identifier: Apache-2.0
"""ESA's own module name; the code is in esa/compat/processor.py."""
from .compat.processor import K_BLOCK, Q_BLOCK, _make_step_callback, sparse_processor_mode

__all__ = ["K_BLOCK", "Q_BLOCK", "_make_step_callback", "sparse_processor_mode"]
