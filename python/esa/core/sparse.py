# SPDX-License-Identifier: Apache-2.0
"""`sparse_attention`: MindIE-SD's call. What the original documents works as documented; what it crashes on or silently
gets wrong either works or is a ValueError."""
from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from . import structs as T
from . import tensor as X
from .config import EsaConfig, protects_first_frame, recommended
from .functional import attention_params, check_scale, context_of, refuse_gradients
from .layout import Layout
from .mask import Mask
from .plan import attend, select_and_attend
from .session import select_params

SPARSE_TYPES = (None, "rf_v2", "rf_v3", "ada_bsa", "entropy")
INNER_PRECISE = (0, 1, 4)
PRECISIONS = ("bf16", "fp8", "mix")
_KEYWORDS = {
    "order": None, "window": None, "tail": "none", "protect_first_frame": None, "cached_mask": None,
    "return_mask": False, "mode": None, "compat": None, "block_size_kv": None
}


class Settings(NamedTuple):
    """Everything of a call but the tensors and their layout, as numbers: the operator esa::attention carries them as
    a list of floats."""
    selector: int               # of T.SELECTORS; -1: dense
    mode: int
    block_q: int
    block_k: int
    budget: float
    cdf_threshold: float
    keep_sink: int
    keep_recent: int
    causal: int
    scale: float
    tail: int
    order: int
    window: tuple[int, int, int]
    protect_first_frame: int
    grid_q: tuple[int, int, int]
    grid_k: tuple[int, int, int]
    text: int
    release: int = 0            # of T.RELEASES; 0: the newest
    precision: int = 16
    spans: tuple[int, ...] = ()  # start, t, h, w of each clip

    def numbers(self) -> list[float]:
        return [float(n) for field in self for n in (field if isinstance(field, tuple) else (field,))]


def _shape(value: Sequence[int] | None, name: str) -> tuple[int, int, int]:
    if value is None:
        return (0, 0, 0)
    try:
        t, h, w = (int(n) for n in value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} must be [t, h, w], not {value!r}") from None
    if min(t, h, w) < 1:
        raise ValueError(f"{name} must be [t, h, w] of at least 1 each, not {value!r}")
    return (t, h, w)


def _spans(video_spans: Any) -> tuple[int, ...]:
    """Clips as start, t, h, w, start, t, ..."""
    if video_spans is None:
        return ()
    message = 'video_spans must be a list of {"start": int, "latent_shape": [t, h, w]}'
    if not isinstance(video_spans, Sequence) or isinstance(video_spans, (str, bytes)) or not video_spans:
        raise ValueError(f"{message}, not {video_spans!r}")
    numbers: list[int] = []
    for i, span in enumerate(video_spans):
        if not isinstance(span, Mapping) or not T.whole(span.get("start")) or span["start"] < 0:
            raise ValueError(f"{message}; entry {i} is {span!r}")
        numbers += (int(span["start"]), *_shape(span.get("latent_shape", ()), f"latent_shape of video_spans[{i}]"))
    return tuple(numbers)


def _mode(mode: str | None, compat: str | None) -> tuple[int, int]:
    """The library's numbers of mode and release. A release alone means mode "compat"."""
    if compat is None:
        return T.number(T.MODES, "fixed" if mode is None else mode, "mode"), 0
    release = T.number(T.RELEASES, compat, "compat")
    if mode == "fixed":
        raise ValueError(f"mode 'fixed' follows no release of the original, but compat is {compat!r}")
    return T.number(T.MODES, "compat" if mode is None else mode, "mode"), release


def settings_of(sparse_type: str | None, sparsity: float, cdf_threshold: float, keep_sink: bool, keep_recent: bool,
                block_size: Any, is_causal: bool, scale: float | None, txt_len: int,
                latent_shape_q: Sequence[int] | None, latent_shape_k: Sequence[int] | None, order: str | None,
                window: Sequence[int] | None, tail: str, protect_first_frame: bool | None, mode: str | None,
                compat: str | None = None, block_size_kv: Any = None, video_spans: Any = None,
                precision: str = "bf16") -> Settings:
    """Checks the words of a call and turns them into numbers. Parameters that belong to another sparse_type have no
    effect."""
    if sparse_type not in SPARSE_TYPES:
        raise ValueError(f"sparse_type must be one of {', '.join(map(repr, SPARSE_TYPES))}, not {sparse_type!r}")
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity must lie between 0 and 1, not {sparsity!r}")
    if order is not None and order not in T.ORDERS:
        raise ValueError(f"order must be one of {', '.join(map(repr, T.ORDERS))}, not {order!r}")
    if window is not None and order != "tile3d":
        raise ValueError(f"window belongs to order='tile3d', the order is {order!r}")
    if isinstance(txt_len, bool) or not isinstance(txt_len, int) or txt_len < 0:
        raise ValueError(f"txt_len must be an integer of at least 0, not {txt_len!r}")
    if isinstance(cdf_threshold, bool) or not isinstance(cdf_threshold, (int, float)) or cdf_threshold != cdf_threshold:
        raise ValueError(f"cdf_threshold must be a number, not {cdf_threshold!r}")
    if video_spans is not None and sparse_type not in ("rf_v2", "rf_v3", "entropy"):
        raise ValueError(f"video_spans is for sparse_type 'rf_v2', 'rf_v3' and 'entropy', not for {sparse_type!r}")
    if video_spans is not None and (txt_len or latent_shape_q is not None or latent_shape_k is not None):
        raise ValueError("video_spans says where everything is: txt_len must be 0, latent_shape_q and latent_shape_k "
                         "None")
    ada = sparse_type == "ada_bsa"
    # latent shapes and txt_len are rf_v2's; ada_bsa looks at them only where one of our own keywords asks for a grid.
    geometric = sparse_type is not None and not (ada and order is None and protect_first_frame is None)
    number, release = _mode(mode, compat)
    return Settings(
        selector=-1 if sparse_type is None else T.SELECTORS["rf_v2" if sparse_type == "rf_v3" else sparse_type],
        mode=number, block_q=0 if sparse_type == "entropy" and block_size == 128 else _block(block_size, "block_size"),
        block_k=_block(block_size, "block_size") if block_size_kv is None else _block(block_size_kv, "block_size_kv"),
        budget=1.0 - float(sparsity), cdf_threshold=float(cdf_threshold) if ada else 1.0,
        keep_sink=int(keep_sink) if ada else 1, keep_recent=int(keep_recent) if ada else 1, causal=int(bool(is_causal)),
        scale=check_scale(scale), tail=T.number(T.TAILS, tail, "tail"),
        order=T.ORDER_DEFAULT if order is None else T.ORDERS[order], window=_shape(window, "window"),
        protect_first_frame=-1 if protect_first_frame is None else int(bool(protect_first_frame)),
        grid_q=_shape(latent_shape_q, "latent_shape_q") if geometric else (0, 0, 0),
        grid_k=_shape(latent_shape_k, "latent_shape_k") if geometric else (0, 0, 0), text=txt_len if geometric else 0,
        release=release, precision=_precision(precision), spans=_spans(video_spans))


def _precision(precision: str) -> int:
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(map(repr, PRECISIONS))}, not {precision!r}")
    return 16 if precision == "bf16" else 8


def _block(block_size: Any, name: str) -> int:
    if isinstance(block_size,
                  bool) or not isinstance(block_size, int) or not 16 <= block_size <= 256 or block_size % 16:
        raise ValueError(
            f"{name} is {block_size!r}; kernels exist for multiples of 16 between 16 and 256 (128 is the usual one)"
        )
    return block_size


@functools.lru_cache(maxsize=256)
def structs_of(numbers: tuple[float, ...]) -> tuple[T.SelectParams | None, T.AttentionParams]:
    """The library's parameters for the numbers of a Settings."""
    n = [int(x) for x in numbers]
    s = Settings(n[0], n[1], n[2], n[3], numbers[4], numbers[5], n[6], n[7], n[8], numbers[9], n[10], n[11],
                 (n[12], n[13], n[14]), n[15], (n[16], n[17], n[18]), (n[19], n[20], n[21]), n[22], n[23], n[24],
                 tuple(n[25:]))
    attention = attention_params(T.word(T.TAILS, s.tail), s.scale or None, bool(s.causal), precision=s.precision)
    # Nothing is dropped: dense, whatever the selector would say.
    everything = s.budget >= 1 and s.cdf_threshold >= 1 and s.mode == T.MODES["fixed"]
    if s.selector < 0 or everything:
        return None, attention
    return _select_params(s), attention


def _select_params(s: Settings) -> T.SelectParams:
    config = EsaConfig(selector=T.word(T.SELECTORS, s.selector), budget=s.budget, cdf_threshold=s.cdf_threshold,
                       keep_sink=bool(s.keep_sink), keep_recent=bool(s.keep_recent), mode=T.word(T.MODES, s.mode))
    params = select_params(config, _layout(s), scale=s.scale or None, causal=bool(s.causal))
    params.block_q, params.block_k, params.release = s.block_q, s.block_k, s.release
    return params


def _layout(s: Settings) -> Layout:
    # A shape of the queries alone stands for both sides: then the library copies it, text included.
    queries, keys = any(s.grid_q), any(s.grid_k)
    return Layout(grid=s.grid_q if queries else None, text_front=s.text, grid_k=s.grid_k if keys else None,
                  text_front_k=0 if queries and not keys else s.text,
                  order=None if s.order < 0 else T.word(T.ORDERS, s.order), window=s.window if any(s.window) else None,
                  protect_first_frame=None if s.protect_first_frame < 0 else bool(s.protect_first_frame),
                  spans=[(s.spans[i], s.spans[i + 1:i + 4]) for i in range(0, len(s.spans), 4)])


def check_tensors(q: Any, k: Any, v: Any, head_num: int, input_layout: str) -> None:
    """What can be said of the tensors before the library looks at them."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        X.check_array(x, name)
    X.check_same(q, k, v)
    heads = X.shape_of(q, input_layout)[1]
    # 1 is the default of the original, where it fails unless set: it stands for "as many as q has".
    if head_num not in (1, heads):
        raise ValueError(f"head_num is {head_num!r}, but q has {heads} heads in layout {input_layout}")


def check_shapes(settings: Settings, q: Any, k: Any, input_layout: str) -> None:
    """Latent shapes against the lengths of the sequences, whether or not anything is dropped."""
    queries, keys = X.shape_of(q, input_layout)[2], X.shape_of(k, input_layout)[2]
    if settings.spans:
        start, t, h, w = settings.spans[-4:]
        if not queries == keys >= start + t * h * w:
            raise ValueError(f"the last of video_spans ends at token {start + t * h * w}, but q has {queries} tokens "
                             f"and k has {keys}")
    if not settings.grid_q[0]:
        if settings.grid_k[0]:
            raise ValueError("latent_shape_k was given without latent_shape_q")
        if settings.text > min(queries, keys):
            raise ValueError(f"txt_len is {settings.text}, but there are {queries} query and {keys} key tokens")
        return
    if not settings.grid_k[0] and queries != keys:
        raise ValueError(f"latent_shape_k is needed: q has {queries} tokens and k has {keys}")
    for name, grid, tokens in (("q", settings.grid_q, queries), ("k", settings.grid_k, keys)):
        if grid[0] and grid[0] * grid[1] * grid[2] + settings.text != tokens:
            raise ValueError(
                f"latent_shape_{name} {list(grid)} and txt_len {settings.text} make "
                f"{grid[0] * grid[1] * grid[2] + settings.text} tokens, but {name} has {tokens}")


def run(q: Any, k: Any, v: Any, numbers: tuple[float, ...], input_layout: str) -> Any:
    """The call itself, for tensors that were checked: what esa::attention does."""
    select, attention = structs_of(numbers)
    q, k, v = X.dense(q), X.dense(k), X.dense(v)
    o = X.empty_like(q)
    views = [X.view(x, input_layout, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (o, "o"))]
    select_and_attend(context_of(q), views, select, attention)
    return o


def run_with_mask(q: Any, k: Any, v: Any, settings: Settings, input_layout: str, cached_mask: Any,
                  return_mask: bool) -> Any:
    """The same with a mask given or wanted."""
    if settings.selector < 0:
        raise ValueError("cached_mask and return_mask need a sparse_type: dense attention has no mask")
    attention = structs_of(tuple(settings.numbers()))[1]
    q, k, v = X.dense(q), X.dense(k), X.dense(v)
    o = X.empty_like(q)
    views = [X.view(x, input_layout, name) for x, name in ((q, "q"), (k, "k"), (v, "v"), (o, "o"))]
    if cached_mask is None:
        mask: Mask | None = select_and_attend(context_of(q), views, _select_params(settings), attention, own_mask=True)
    else:
        mask = cached_mask if isinstance(cached_mask, Mask) else _given_mask(cached_mask, views, settings)
        attend(context_of(q), views, mask, attention)
    return (o, mask) if return_mask else o


def _given_mask(blocks: Any, views: Sequence[T.Tensor], settings: Settings) -> Mask:
    """A mask from an array [B, heads, query blocks, key blocks], as rf_v3 hands it out."""
    import numpy
    if X.is_torch(blocks):
        blocks = blocks.detach().cpu().numpy()
    if not isinstance(blocks, numpy.ndarray):
        raise ValueError(
            f"cached_mask must be an esa.Mask (return_mask=True gives one) or an array, not {type(blocks).__name__}")
    layout = _layout(settings)
    rf = settings.selector == T.SELECTORS["rf_v2"]
    if layout.order is None and rf and (layout.grid is not None or layout.spans):
        order = T.word(T.ORDERS, recommended("online", "rf_v2").select.layout.order)
        protect = layout.protect_first_frame
        layout = dataclasses.replace(
            layout, order=order,
            protect_first_frame=protects_first_frame("online", "rf_v2") if protect is None else protect)
    rows, columns = settings.block_q or 256, settings.block_k
    # A mask of square blocks serves longer key blocks too: one is kept if any of its parts is, as rf_v3 does it.
    square, merged = -(-views[1].dim[2] // rows), columns // rows
    if blocks.ndim == 4 and columns > rows and columns % rows == 0 and blocks.shape[3] == square:
        padded = numpy.pad(blocks != 0, ((0, 0), (0, 0), (0, 0), (0, -square % merged)))
        blocks = padded.reshape(*blocks.shape[:3], -1, merged).any(-1)
    return Mask.from_blocks(blocks, views[0].dim[2], views[1].dim[2], block=(rows, columns), layout=layout)


def sparse_attention(q: Any, k: Any, v: Any, attn_mask: Any = None, scale: float | None = None, is_causal: bool = False,
                     head_num: int = 1, input_layout: str = "BNSD", inner_precise: int = 0,
                     sparse_type: str | None = None, txt_len: int = 0, block_size: int = 128,
                     latent_shape_q: Sequence[int] | None = None, latent_shape_k: Sequence[int] | None = None,
                     video_spans: Sequence[Mapping[str, Any]] | None = None, keep_sink: bool = True,
                     keep_recent: bool = True, cdf_threshold: float = 1.0, sparsity: float = 0.0,
                     precision: str = "bf16", **kwargs: Any) -> Any:
    """Sparse attention in one call, with the arguments of MindIE-SD 3.1. Forward only. Returns a tensor like q, tokens
    in the caller's order.

    q, k, v
        Four dimensions as input_layout says, one dtype (float32, float16, bfloat16), torch on CPU or CUDA, or numpy. k
        and v may have another length than q, and fewer heads (a divisor).
    attn_mask
        Must be None.
    scale
        None: D ** -0.5.
    is_causal
        Key j is visible to query i iff j <= i + Nk - Nq. With rf_v2 and latent shapes the order must be "raster".
    head_num
        Heads of q; checked. 1, the default, stands for what q has.
    input_layout
        "BNSD" [batch, heads, tokens, D] or "BSND" [batch, tokens, heads, D].
    inner_precise
        0, 1 or 4; without effect, sums are always float32.
    sparse_type
        None (dense), "rf_v2", "rf_v3" (the same rule), "ada_bsa", or "entropy".
    txt_len, latent_shape_q, latent_shape_k
        rf_v2, rf_v3 and entropy: the first txt_len tokens are text, the others t*h*w video tokens. Without shapes
        nothing is reordered and no frame is protected. latent_shape_k None: as q's, where the lengths agree.
    video_spans
        rf_v2, rf_v3 and entropy: several clips in one sequence, [{"start": token, "latent_shape": [t, h, w]}, ...],
        instead of txt_len and shapes. Blocks never cross a clip; the first frame of each clip and every token outside
        the clips are kept whole.
    block_size
        128, or another multiple of 16 up to 256. entropy with 128 takes query blocks of 256.
    keep_sink, keep_recent, cdf_threshold
        ada_bsa only.
    sparsity
        Share of key blocks to drop, 0 to 1.
    precision
        "bf16": the tensors' own dtype. "mix" and "fp8": 8 bits, int8 for q and k and E4M3 for P and v. That is the
        original's "mix"; its "fp8" rounds q and k to E4M3 after a Hadamard transform, which is less accurate.

    Further keywords; any other is a TypeError:

    order, window
        "tile" (rf_v2's own), "tile3d" with window=[t, h, w], "hilbert", "raster". Needs latent shapes.
    tail
        What stands in for dropped blocks: "none", "pooled", "centroid".
    protect_first_frame
        Keep frame 0's rows and columns whole; None: yes for rf_v2.
    return_mask
        Return (out, mask); the mask is an `esa.Mask`.
    cached_mask
        Such a mask, or an array [B, heads, query blocks, key blocks]: selection is skipped.
    block_size_kv
        Block size of the keys; None: block_size.
    mode
        "fixed", "compat" or "compat-round": the rules a user expects, or the originals' with their quirks.
    compat
        "3.1" or "3.0": mode "compat" as that release of MindIE-SD chooses blocks. 3.0 pools video and text of rf_v2
        apart, 3.1 pools them as one sequence.

    An image model, then a video model with text in front:

    >>> import numpy as np
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 2, 24, 1024, 32), dtype=np.float32)
    >>> out = sparse_attention(q, k, v, head_num=24, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.6)
    >>> out.shape
    (2, 24, 1024, 32)
    >>> out, mask = sparse_attention(q, k, v, head_num=24, sparse_type="rf_v2", sparsity=0.8, txt_len=64,
    ...                              latent_shape_q=[3, 16, 20], latent_shape_k=[3, 16, 20], order="hilbert",
    ...                              tail="pooled", return_mask=True)
    >>> again = sparse_attention(q, k, v, sparse_type="rf_v2", tail="pooled", cached_mask=mask)
    >>> bool((out == again).all())
    True
    """
    unknown = [name for name in kwargs if name not in _KEYWORDS]
    if unknown:
        raise TypeError(
            f"sparse_attention() got an unexpected keyword argument {unknown[0]!r}; beside MindIE-SD's arguments it "
            f"takes {', '.join(_KEYWORDS)}")
    words = {**_KEYWORDS, **kwargs}
    if attn_mask is not None:
        raise ValueError(
            "attn_mask is not supported: it must be None (sparse_type and its parameters choose the blocks)")
    if inner_precise not in INNER_PRECISE:
        raise ValueError(f"inner_precise must be 0, 1 or 4, not {inner_precise!r}")
    if X.is_torch(q):
        from . import torch_op
        if X.is_torch(k) and X.is_torch(v):
            q, k, v = torch_op.autocast(q, k, v)
    check_tensors(q, k, v, head_num, input_layout)
    chosen = settings_of(sparse_type, sparsity, cdf_threshold, keep_sink, keep_recent, block_size, is_causal, scale,
                         txt_len, latent_shape_q, latent_shape_k, words["order"], words["window"], words["tail"],
                         words["protect_first_frame"], words["mode"], words["compat"], words["block_size_kv"],
                         video_spans, precision)
    check_shapes(chosen, q, k, input_layout)
    refuse_gradients(q, k, v)
    if words["cached_mask"] is not None or words["return_mask"]:
        return run_with_mask(q, k, v, chosen, input_layout, words["cached_mask"], bool(words["return_mask"]))
    if X.is_torch(q):
        return torch_op.attention(q, k, v, chosen.numbers(), input_layout)
    return run(q, k, v, tuple(chosen.numbers()), input_layout)
