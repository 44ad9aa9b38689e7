# SPDX-License-Identifier: Apache-2.0
"""Contexts: one esa_ctx each, shared by calls that belong to no session, and owned by sessions on a GPU."""
from __future__ import annotations

import ctypes as C
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from .library import EsaError, load

_threads = 0


def set_num_threads(threads: int) -> None:
    """Sets the threads of contexts made from now on. 0: as many as torch uses if torch is imported, else one per CPU.
    Sessions keep the context they have."""
    global _threads
    if not isinstance(threads, int) or not 0 <= threads <= 256:
        raise ValueError(f"threads must be 0 to 256, not {threads!r}")
    _threads = threads
    with _contexts_lock:
        _contexts.clear()


def get_num_threads() -> int:
    """Threads that a call on the CPU uses."""
    return int(load().c.esa_ctx_threads(shared_context().ptr))


def _default_threads() -> int:
    torch = sys.modules.get("torch")
    return _threads or (min(256, torch.get_num_threads()) if torch is not None else 0)


def usable(process: int, getpid: Callable[[], int] = os.getpid,
           finalizing: Callable[[], bool] = sys.is_finalizing) -> bool:
    """False in a forked child and while the interpreter shuts down: then the library's objects are not freed. The
    defaults bind the functions, because globals may be gone by then."""
    return getpid() == process and not finalizing()


class Context:
    """One esa_ctx: threads, scratch memory, and for GPU work one device and one stream. Takes one call at a time:
    `run` holds its lock."""

    def __init__(self, device_index: int = 0, stream: int = 0, threads: int | None = None) -> None:
        self.lib = load()
        self.ptr = C.c_void_p()
        self.lock = threading.RLock()
        # plan.py keeps its plans here; they are freed before the context
        self.plans: OrderedDict[bytes, Any] = OrderedDict()
        # what else must go before it: own()
        self.owned: dict[int, tuple[C.c_void_p, Callable[[C.c_void_p], None]]] = {}
        self._calls = 0             # that run now: more than 0 while a call has come back into Python (carry.py)
        self._late: list[tuple[C.c_void_p, Callable[[C.c_void_p], None]]] = []
        self.process, self.stream = os.getpid(), stream
        params = self.lib.c.esa_ctx_params_default()
        params.threads = _default_threads() if threads is None else threads
        params.cuda_stream, params.cuda_device = stream or None, device_index
        status = self.lib.c.esa_ctx_create(C.byref(self.ptr), C.byref(params))
        if status:
            raise self.lib.error(status, f"a context could not be made ({self.lib.status_name(status)}; ESA_CPU is "
                                         f"{os.environ.get('ESA_CPU', 'not set')})")

    def run(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls a function that returns a status; a failure becomes an exception with this context's message."""
        if self.process != os.getpid():
            raise EsaError(
                "this context was made before fork(): its threads do not exist in the child process; make it there")
        with self.lock:
            self._calls += 1
            try:
                status = function(*arguments)
                if status:
                    raise self.lib.error(status, self.lib.c.esa_ctx_error(self.ptr).decode(errors="replace"))
            finally:
                self._calls -= 1
                self._free_late()

    def own(self, ptr: C.c_void_p, free: Callable[[C.c_void_p], None]) -> None:
        """Registers an object that must be freed before this context. Python may call __del__ of the object and of the
        context in any order: the first of `release` and the context's end frees it, the second finds NULL."""
        self.owned[id(ptr)] = ptr, free

    def release(self, ptr: C.c_void_p) -> None:
        """Frees an object registered with `own`. Calling it again does nothing. While a call runs, which Python's
        garbage collection may interrupt, it is freed after the call."""
        _, free = self.owned.pop(id(ptr), (None, None))
        if free is not None and ptr:
            with self.lock:
                self._late.append((ptr, free))
                self._free_late()

    def _free_late(self) -> None:
        while self._late and not self._calls:
            ptr, free = self._late.pop(0)
            self._calls += 1                # freeing a session comes back into Python, too
            try:
                free(ptr)
            finally:
                self._calls -= 1
            ptr.value = None

    def set_stream(self, stream: int) -> None:
        """Sends later GPU work to this stream (a cudaStream_t as an integer). A change waits for the previous one."""
        if stream != self.stream:
            self.run(self.lib.c.esa_ctx_set_stream, self.ptr, C.c_void_p(stream or None))
            self.stream = stream

    def __del__(self, usable: Callable[[int], bool] = usable) -> None:
        if getattr(self, "ptr", None) and usable(self.process):
            for ptr, _ in reversed(list(self.owned.values())):      # the newest first: sessions use mask files
                self.release(ptr)
            for plan in self.plans.values():
                plan.free()
            self.lib.c.esa_ctx_free(self.ptr)
            self.ptr = C.c_void_p()


# Contexts of calls that belong to no session, by (GPU, stream); (-1, 0) is the CPU's. Few: each holds scratch memory.
_MAX_CONTEXTS = 16
_contexts: OrderedDict[tuple[int, int], Context] = OrderedDict()
_contexts_lock = threading.Lock()


def shared_context(device_index: int = -1, stream: int = 0) -> Context:
    """The context of the CPU (device_index -1) or of a GPU and a stream handle, made at the first use."""
    key = (device_index, stream)
    with _contexts_lock:
        context = _contexts.get(key)
        if context is None:
            context = _contexts[key] = Context(max(device_index, 0), stream)
            while len(_contexts) > _MAX_CONTEXTS:
                _contexts.popitem(last=False)
        _contexts.move_to_end(key)
        return context


def _forget_contexts() -> None:
    """Drops all contexts in a forked child: their threads are gone, and locks may be held by threads that are gone."""
    global _contexts, _contexts_lock
    _contexts, _contexts_lock = OrderedDict(), threading.Lock()


os.register_at_fork(after_in_child=_forget_contexts)
