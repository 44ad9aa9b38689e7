# SPDX-License-Identifier: Apache-2.0
"""The library's two steps as functions: `select` decides which key blocks matter, `attention` computes only those.

torch tensors (CPU and CUDA, on torch's current stream) and numpy arrays are used where they lie. `esa.sparse_attention`
is both steps in one call with MindIE-SD's arguments."""
from __future__ import annotations

import ctypes as C
import sys
from typing import Any

from . import structs as T
from . import tensor as X
from .config import EsaConfig
from .context import Context, shared_context
from .layout import Layout
from .library import load
from .mask import Mask
from .plan import attend
from .session import complete_layout, select_params


def refuse_gradients(*tensors: Any) -> None:
    """ValueError if torch would record a gradient: the library computes forward only."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.is_grad_enabled() and any(X.is_torch(t) and t.requires_grad for t in tensors):
        raise ValueError(
            "esa computes attention forward only, but an input requires gradients: call it under torch.no_grad(), or "
            "detach the inputs")


def context_of(array: Any) -> Context:
    """The shared context of the device an array lies on, and of torch's current stream there."""
    device = X.device_of(array)
    return shared_context(device.ordinal, device.stream)


def attention_params(tail: str, scale: float | None, causal: bool, kv_len: Any = None,
                     exact_rows: int = 0, precision: int = 16) -> T.AttentionParams:
    p = load().c.esa_attention_params_default()
    p.exact_rows, p.precision = T.exact_rows(exact_rows), T.precision(precision)
    p.tail, p.causal, p.scale = T.number(T.TAILS, tail, "tail"), int(causal), check_scale(scale)
    p.kv_len = None if kv_len is None else X.address(kv_len)
    return p


def check_scale(scale: float | None) -> float:
    """The library's 0 stands for D ** -0.5, which is None here."""
    if scale is None:
        return 0.0
    if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
        raise ValueError(f"scale must be a positive number or None (D ** -0.5), not {scale!r}")
    return float(scale)


def select(q: Any, k: Any, config: EsaConfig | None = None, *, v: Any = None, layout: Layout | None = None,
           input_layout: str = "BNSD", scale: float | None = None, causal: bool = False, kv_len: Any = None) -> Mask:
    """Runs a selector on q and k; returns the mask, on the device of q. The selector "error" also needs v, and with
    order "adaptive" it makes the orders too. config None: "error" with v, "entropy" without. The config says how much
    is kept by budget or sparsity (0.5); work, quality, preset and masks need a Session.

    >>> import numpy as np
    >>> q, k = np.random.default_rng(0).standard_normal((2, 1, 4, 1024, 64), dtype=np.float32)
    >>> mask = select(q, k, EsaConfig(selector="entropy", budget=0.25))
    >>> mask.shape, mask.density
    ((1, 4, 4, 8), 0.25)
    """
    X.check_same(q, k, k if v is None else v)
    q, k, v = X.dense(q), X.dense(k), None if v is None else X.dense(v)
    views = [X.view(x, input_layout, name) for x, name in ((q, "q"), (k, "k"), (v, "v")) if x is not None]
    config = EsaConfig(selector="entropy") if config is None and v is None else EsaConfig.check(config)
    given = [name for name in ("work", "quality", "preset", "masks") if getattr(config, name) is not None]
    if given:
        raise ValueError(f"{given[0]} is for a whole video (esa.Session, esa.apply): esa.select takes a budget or a "
                         "sparsity")
    params = select_params(config, complete_layout(layout or Layout(), config), scale=check_scale(scale), causal=causal)
    lengths = X.lengths(kv_len, q, views[0].dim[0])
    params.kv_len = None if lengths is None else X.address(lengths)
    context, ptr = context_of(q), C.c_void_p()
    values = C.byref(views[2]) if v is not None else None
    context.run(context.lib.c.esa_select_qkv, context.ptr, C.byref(ptr), C.byref(views[0]), C.byref(views[1]), values,
                C.byref(params))
    return Mask(context, ptr)


def attention(q: Any, k: Any, v: Any, mask: Mask | None = None, *, tail: str = "none", input_layout: str = "BNSD",
              scale: float | None = None, causal: bool = False, kv_len: Any = None, return_lse: bool = False,
              exact_rows: int = 0, precision: int = 16, carry: Carry | None = None) -> Any:
    """softmax(scale q k^T) v over the blocks of a mask; mask None: over everything. With return_lse also the
    log-sum-exp, float32 [B, H, N]. exact_rows: so many queries of each query block (0 to 16) are computed exactly, and
    their mean error corrects the others; not with causal. precision: bits of the two products, 16 or 8
    (docs/precision.md). carry: an `esa.Carry` of an earlier call with this mask is added to the output.

    causal is bottom-right aligned: key j is visible to query i iff j <= i + Nk - Nq.

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 1024, 64), dtype=np.float32)
    >>> sparse = attention(q, k, v, select(q, k, EsaConfig(budget=0.5)), tail="pooled")
    >>> sparse.shape
    (1, 4, 1024, 64)
    """
    refuse_gradients(q, k, v)
    if carry is not None and not isinstance(carry, Carry):
        raise TypeError(f"carry must be an esa.Carry or None, not {type(carry).__name__}")
    X.check_same(q, k, v)
    q, k, v = X.dense(q), X.dense(k), X.dense(v)
    o = X.empty_like(q)
    views = [X.view(x, input_layout, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (o, "o"))]
    shape = X.shape_of(q, input_layout)
    lse = X.empty_float32(q, shape[:3]) if return_lse else None
    last = None if lse is None else X.lse_view(lse)
    lengths = X.lengths(kv_len, q, shape[0])        # alive until the call is over
    attend(context_of(q), views, mask, attention_params(tail, scale, causal, lengths, exact_rows, precision),
           lse=last, carry=None if carry is None else carry.view, use=T.CARRY_ADD)
    return (o, lse) if return_lse else o


class Carry:
    """What a sparse call leaves out, to be added to later calls with the same mask: dense output - sparse output.

    `esa.attention(..., carry=...)` adds it. It belongs to a mask and its tail.

    >>> import esa, numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 4, 1024, 64), dtype=np.float32)
    >>> mask, dense = esa.select(q, k, esa.EsaConfig(budget=0.5)), esa.attention(q, k, v)
    >>> carry = esa.Carry(q, k, v, dense, mask, tail="pooled")
    >>> o = esa.attention(q, k, v, mask, tail="pooled", carry=carry)
    >>> bool(abs(o - dense).max() < 0.05 * abs(dense).max())
    True
    """

    def __init__(self, q: Any, k: Any, v: Any, dense: Any, mask: Mask, *, tail: str = "none",
                 input_layout: str = "BNSD", scale: float | None = None, causal: bool = False, kv_len: Any = None,
                 precision: int = 16, format: str = "e4m3") -> None:
        """dense: the dense output for q, k and v. format: "e4m3", with a scale for each token and head, or "bf16". The
        others: as in `esa.attention`, whose calls must have the same."""
        number = T.number(T.CARRY_FORMATS, format, "format")
        refuse_gradients(q, k, v, dense)
        X.check_same(q, k, v, dense=dense)
        q, k, v, dense = map(X.dense, (q, k, v, dense))
        views = [X.view(x, input_layout, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (dense, "dense"))]
        self.shape, self.format = X.shape_of(dense, input_layout), format
        c = load().c
        self.bytes = int(c.esa_carry_bytes(number, *self.shape))
        if self.bytes < 0:
            raise ValueError(f"dense must have a head dimension of at most 256, it has {self.shape[3]}")
        self._memory = X.empty_float32(q, (-(-self.bytes // 4) + 16,))
        start = -(-X.address(self._memory) // 64) * 64
        self.view: T.Carry = c.esa_carry_view(start, number, *self.shape)
        self.view.device, self.view.device_index = views[3].device, views[3].device_index
        lengths = X.lengths(kv_len, q, self.shape[0])
        attend(context_of(q), views, mask, attention_params(tail, scale, causal, lengths, precision=precision),
               carry=self.view, use=T.CARRY_MAKE)

    def __repr__(self) -> str:
        return f"<esa.Carry {'x'.join(map(str, self.shape))}, {self.format}, {self.bytes} bytes>"
