# SPDX-License-Identifier: Apache-2.0
"""Mask files of the original (DecartAI's entropy-sparse-attn): a torch file with averaged importance [L, T, H, nq, nk]
and, per budget, full_block_cnt [L, T, H, nq] and full_block_idx [L, T, H, nq, nk].

The original does not document the layout, so tensors are found by fragments of their names and by their shapes. Such a
file holds the number of blocks but not of tokens. It becomes one of our mask files at the model's first forward, which
tells the tokens. torch opens it with weights_only, so no code in it is executed."""
from __future__ import annotations

import ctypes as C
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from ..core import structs as T
from ..core.context import shared_context
from ..core.files import open_file
from ..core.layout import Layout
from ..core.mask import MaskFile, build_mask_file
from . import K_BLOCK, Q_BLOCK

_FILE_I32, _FILE_U32 = 5, 11        # ESA_FILE_* of esa_tensors.h


def is_original(path: str | os.PathLike[str]) -> bool:
    """True if a file is torch's (a zip archive or a pickle), by its first bytes. Ours are safetensors, whatever
    their name."""
    try:
        with open_file(path) as file:
            head = file.read(4)
    except OSError:
        return False                # opening it next reports what is wrong
    return head == b"PK\x03\x04" or head[:1] == b"\x80"


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of nested dicts and lists, with a name made of the keys that lead to it."""
    if isinstance(value, torch.Tensor):
        yield name, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(inner, f"{name}/{key}")
    elif isinstance(value, (list, tuple)):
        for i, inner in enumerate(value):
            yield from _walk(inner, f"{name}/[{i}]")


def _squeeze(x: torch.Tensor, rank: int) -> torch.Tensor | None:
    """x with `rank` dimensions, without a batch of one between steps and heads; None if that does not fit."""
    if x.ndim == rank + 1 and x.shape[2] == 1:
        x = x.squeeze(2)
    return x if x.ndim == rank else None


def _budget(name: str) -> float | None:
    """The budget in a name such as /masks/0.5/full_block_cnt."""
    numbers = [float(n) for n in re.findall(r"(?<![\d.])(?:0?\.\d+|1\.0+)(?![\d.])", name)]
    return numbers[0] if len(numbers) == 1 else None


class OriginalMasks:
    """The tensors of one such file. ValueError if they cannot be identified."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:          # torch raises a dozen kinds here
            raise ValueError(
                f"{self.path} is a torch file that cannot be read without executing code from it "
                f"({type(error).__name__}): only tensors, numbers, strings, dicts and lists are taken") from error
        self.importance: torch.Tensor | None = None
        self.lists: dict[float | None, dict[str, torch.Tensor]] = {}
        for name, tensor in _walk(content):
            self._sort(name.lower(), tensor)
        self.lists = {
            b: x
            for b, x in self.lists.items() if "cnt" in x and "idx" in x and x["idx"].shape[:-1] == x["cnt"].shape
        }
        first = next(iter(self.lists.values()))["idx"] if self.lists else self.importance
        if first is None:
            raise ValueError(
                f"{self.path} is a torch file without masks: neither importance [layers, steps, heads, nq, nk] nor "
                "full_block_cnt and full_block_idx of fitting shapes were found in it")
        self.shape = tuple(int(n) for n in first.shape)
        if self.importance is not None and tuple(self.importance.shape) != self.shape:
            raise ValueError(
                f"{self.path} holds masks of shape {self.shape} and importance of shape {tuple(self.importance.shape)}")
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def _sort(self, name: str, x: torch.Tensor) -> None:
        whole = not x.dtype.is_floating_point and x.dtype != torch.bool
        if whole and any(part in name for part in ("cnt", "count")):
            kind, found = "cnt", _squeeze(x, 4)
        elif whole and any(part in name for part in ("idx", "index", "indices")):
            kind, found = "idx", _squeeze(x, 5)
        elif x.dtype.is_floating_point and any(part in name for part in ("importance", "score")):
            self.importance = _squeeze(x, 5) if self.importance is None else self.importance
            return
        else:
            return
        if found is not None:
            self.lists.setdefault(_budget(name), {})[kind] = found

    def convert(self, tokens: int, layout: Layout, budget: float) -> tuple[str, float]:
        """One of our mask files for a model of so many tokens, and the budget it is listed under. It lives as long
        as this object."""
        nq, nk = self.shape[3:]
        if (nq, nk) != (-(-tokens // Q_BLOCK), -(-tokens // K_BLOCK)):
            raise ValueError(
                f"{self.path} was made for {nq} x {nk} blocks of {Q_BLOCK} x {K_BLOCK} tokens, this video has "
                f"{tokens} tokens, which are {-(-tokens // Q_BLOCK)} x {-(-tokens // K_BLOCK)}")
        self._folder = tempfile.TemporaryDirectory(prefix="esa-masks-")
        output = os.path.join(self._folder.name, "masks")
        lists = next(
            (x for b, x in self.lists.items() if abs(self._named(b) - budget) < (5e-4 if b is not None else 0.01)),
            None)
        if lists is not None:
            self._import_lists(output, lists, tokens, layout)
            return output, MaskFile(output).budgets[0]
        if self.importance is None:
            known = ", ".join(f"{self._named(b):.3g}" for b in self.lists)
            raise ValueError(f"{self.path} has no importance, and masks for budget {known} only, not {budget:g}")
        recording = os.path.join(self._folder.name, "recording")
        self._write_recording(recording, tokens, layout)
        build_mask_file(output, [recording], budgets=(budget,), importance="none", store_dense=True)
        os.unlink(recording)
        return output, budget

    def _named(self, budget: float | None) -> float:
        """The budget in the name, or the mean density of lists without one."""
        return budget if budget is not None else float(self.lists[None]["cnt"].double().mean()) / self.shape[4]

    def _import_lists(self, output: str, lists: dict[str, torch.Tensor], tokens: int, layout: Layout) -> None:
        exchange = output + ".fa4"
        with TensorWriter(exchange) as writer:
            for name, x in (("full_block_cnt", lists["cnt"]), ("full_block_idx", lists["idx"])):
                writer.declare(name, _FILE_I32, tuple(x.shape))
            for x in (lists["cnt"], lists["idx"]):
                for layer in x:
                    writer.write(layer.to(torch.int32))
        context = shared_context()
        info = T.MaskInfo(struct_size=C.sizeof(T.MaskInfo), block_q=Q_BLOCK, block_k=K_BLOCK, B=1, H=self.shape[2],
                          Nq=tokens, Nk=tokens)
        info.layout = layout.struct()
        info.layout.order = T.ORDERS["raster"]          # the original does not reorder
        context.run(context.lib.c.esa_mask_file_import_fa4, context.ptr, os.fsencode(output), os.fsencode(exchange),
                    C.byref(info), None)
        os.unlink(exchange)

    def _write_recording(self, path: str, tokens: int, layout: Layout) -> None:
        """The importance as a recording of one contribution per cell: docs/mask-files.md, "Recordings"."""
        assert self.importance is not None
        L, steps, heads, nq, nk = self.shape
        grid = ",".join(str(n) for n in (layout.grid or (0, 0, 0)))
        text = f"{layout.text_front},{layout.text_back}"
        about = {
            "format": "esa.recording", "format_version": "1", "model": "", "config_hash": "", "selector": "entropy",
            "mode": "fixed", "layers": L, "steps": steps, "groups": steps, "branches": 1, "heads": heads,
            "tokens_q": tokens, "tokens_k": tokens, "block": f"{Q_BLOCK},{K_BLOCK}", "causal": 0, "samples": 4,
            "scale": 0, "order": "raster", "window": "0,0,0", "protect_first_frame": 0, "grid_q": grid, "grid_k": grid,
            "text_q": text, "text_k": text, "prompts": 1, "warmup_frac": "0.2", "dense_first_layer": 1,
            "importance": "none"
        }
        with TensorWriter(path) as writer:
            for key, value in about.items():
                writer.metadata(key, str(value))
            writer.declare("dense_layers", _FILE_I32, (0,))
            writer.declare("count", _FILE_I32, (1, L, steps))
            writer.declare("sums", _FILE_U32, (L * steps, heads, nq, nk))
            writer.write(torch.ones(1, L, steps, dtype=torch.int32))
            for layer in self.importance:
                # below 2^31: the same bytes as unsigned
                writer.write((layer.double().clamp(0, 1) * 2**24).round().to(torch.int32))


class TensorWriter:
    """The library's writer of tensor files. Declare all tensors, then write their data in the same order. A failure
    leaves no file."""

    def __init__(self, path: str) -> None:
        self._context = shared_context()
        self._c = self._context.lib.c
        self._ptr = C.c_void_p()
        self._context.run(self._c.esa_tensors_writer_create, self._context.ptr, C.byref(self._ptr), os.fsencode(path))

    def metadata(self, key: str, value: str) -> None:
        self._context.run(self._c.esa_tensors_writer_metadata, self._ptr, key.encode(), value.encode())

    def declare(self, name: str, dtype: int, shape: tuple[int, ...]) -> None:
        dims = (C.c_int64 * max(1, len(shape)))(*shape)
        self._context.run(self._c.esa_tensors_writer_declare, self._ptr, name.encode(), dtype, len(shape), dims)

    def write(self, x: torch.Tensor) -> None:
        x = x.contiguous()
        self._context.run(self._c.esa_tensors_writer_data, self._ptr, x.data_ptr(), x.numel() * x.element_size())

    def __enter__(self) -> TensorWriter:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self._context.run(self._c.esa_tensors_writer_finish, self._ptr)
        finally:
            self._c.esa_tensors_writer_free(self._ptr)
