# SPDX-License-Identifier: Apache-2.0
"""Memory of a GPU for carried differences, out of torch's allocator."""
from __future__ import annotations

import ctypes as C
import sys
from typing import Any

from . import structs as T

_ALIGN = 256
# Share of a GPU's memory that stays free where nobody said how much differences may take: the session asks for all of
# them before the model has needed its own memory for the first time. The first pieces may go into it, because what does
# not fit passes through them.
SPARE, _FIRST = 0.1, 3


class CarryMemory:
    """Where a session's differences lie: what is free in torch's allocator can serve both, and torch's statistics count
    them. `pointers` are carry_alloc and carry_free of esa_session_params, valid while this object lives. spare: share
    of the GPU's memory that it leaves free."""

    def __init__(self, device_index: int, spare: float = 0.0) -> None:
        self._torch: Any = sys.modules["torch"]
        self._device, self._spare = self._torch.device("cuda", device_index), spare
        self._kept: dict[int, Any] = {}
        self.bytes = self.most = 0      # given out now, and at most since `begin`
        self._functions = T.CarryAlloc(self._alloc), T.CarryFree(self._free)
        self.pointers = tuple(C.cast(function, C.c_void_p) for function in self._functions)

    def _alloc(self, user: int | None, size: int) -> int | None:
        """On the current stream, on which the session's calls are. No exception may pass through the library."""
        try:
            if self._spare and len(self._kept) >= _FIRST and self._left() < size:
                return None
            memory = self._torch.empty(size, dtype=self._torch.uint8, device=self._device)
        except RuntimeError:            # torch.cuda.OutOfMemoryError is one
            return None
        address = int(memory.data_ptr())
        if address % _ALIGN:
            return None
        self._kept[address] = memory
        self.bytes += size
        self.most = max(self.most, self.bytes)
        return address

    def _free(self, user: int | None, address: int | None, size: int) -> None:
        memory = self._kept.pop(address or 0, None)
        if memory is not None:          # calls on another stream than that of _alloc may still use it
            memory.record_stream(self._torch.cuda.current_stream(self._device))
            self.bytes -= size

    def begin(self) -> None:
        """A new video."""
        self.most = self.bytes

    def _left(self) -> float:
        """Bytes that may still be taken: what the driver has and what torch's allocator keeps unused, less the spare
        part."""
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info(self._device)
        unused = cuda.memory_reserved(self._device) - cuda.memory_allocated(self._device)
        return float(free + unused - self._spare * total)

    def __len__(self) -> int:
        """How many pieces the library has now."""
        return len(self._kept)

