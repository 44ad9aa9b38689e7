# SPDX-License-Identifier: Apache-2.0
"""ESA's own module name; the code is in esa/compat/cached_processor.py."""
from .compat.cached_processor import cached_processor_mode

__all__ = ["cached_processor_mode"]
