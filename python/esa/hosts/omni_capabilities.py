# SPDX-License-Identifier: Apache-2.0
"""What esa's backend declares to vLLM-Omni (vllm_omni.diffusion.attention.capabilities, since 0.31). Older versions do
not ask, so nothing is imported before a question."""
from __future__ import annotations

from typing import Any

# Ways to spread a sequence over GPUs in which a rank has all keys of its heads.
_WHOLE = ("none", "ulysses")


def is_cross(computation: Any) -> bool:
    """True for the word or the enum that says cross-attention."""
    return getattr(computation, "value", computation) == "cross"


def limit(name: str, context: Any) -> str | None:
    """Why self-attention in this context cannot be sparse, None if it can."""
    strategy = context.parallel_strategy.value
    if strategy not in _WHOLE:
        return f"{name} on esa needs all keys of a head in one place, which {strategy} does not give: use Ulysses"
    if context.causal:
        return f"{name} on esa is for bidirectional attention: select another backend for causal roles"
    if context.paged_kv:
        return f"{name} on esa has no paged KV: select another backend for roles with it"
    if context.head_dim is not None and context.head_dim > 256:
        return f"{name} on esa takes heads of up to 256 channels, not {context.head_dim}"
    return None


def path(name: str, context: Any, why_not: str | None) -> Any:
    """The ExecutionPathResult of a sparse call. It is a break in a compiled graph."""
    from vllm_omni.diffusion.attention import capabilities as words
    support = (words.CapabilityResult.unsupported(why_not) if why_not else words.CapabilityResult.supported())
    return words.ExecutionPathResult(
        backend=name, path="esa_block_sparse", support=support, compilation_mode=words.CompilationMode.EAGER_ONLY,
        platform=context.platform, kernel_variant=None, parallel_strategy=context.parallel_strategy)
