# SPDX-License-Identifier: Apache-2.0
"""ESA's own module name; the code is in esa/diffusers/autoregressive.py."""
from .diffusers.autoregressive import AutoregressiveState, KVCache, SparseAttentionProcessor, autoregressive_mode

__all__ = ["AutoregressiveState", "KVCache", "SparseAttentionProcessor", "autoregressive_mode"]
