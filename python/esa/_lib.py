# SPDX-License-Identifier: Apache-2.0
"""Finding and opening the C libraries; contexts; statuses become exceptions with the library's own sentence.

libesa is looked for in this order: $ESA_LIB (a file), the installed package (esa/lib), the build folders of a source
tree. libesa_video (frames and metrics) lies beside it and is opened when first needed. Both are refused unless their
API version and the sizes of all public structs are the ones this package was written for."""
from __future__ import annotations

import ctypes as C
import os
import pathlib
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from . import _types as T

API_VERSION = 1

# ---------------------------------------------------------------- errors


class EsaError(RuntimeError):
    """A call of the library failed. `status` is the negative esa_status, `status_name` its name; the text is the
    library's sentence."""

    def __init__(self, text: str, status: int = 0, status_name: str = "") -> None:
        super().__init__(text)
        self.status, self.status_name = status, status_name


class EsaValueError(EsaError, ValueError):
    """What was given does not fit: a value, a shape, a dtype, a mask or a file made for something else."""


class EsaMemoryError(EsaError, MemoryError):
    """The library could not get memory."""


class EsaFileError(EsaError, OSError):
    """The operating system refused a read or a write."""


_CLASS = {
    -1: EsaValueError, -2: EsaValueError, -3: EsaValueError, -4: EsaValueError, -5: EsaMemoryError, -7: EsaFileError,
    -8: EsaValueError, -9: EsaValueError
}

# ---------------------------------------------------------------- prototypes

_p, _i32, _i64, _f64, _s = C.c_void_p, C.c_int32, C.c_int64, C.c_double, C.c_char_p
_STATUS = C.c_int32
# name: (result, arguments). Pointers are c_void_p: byref() of any struct, an address, or None.
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "esa_version": (_s, []), "esa_api_version": (_i32, []), "esa_abi": (C.POINTER(C.c_uint32), []),
    "esa_status_name": (_s, [_i32]), "esa_ctx_params_default": (T.CtxParams, []), "esa_layout_default": (T.Layout, []),
    "esa_shapes_default": (T.Shapes, []), "esa_select_params_default":
        (T.SelectParams, [_i32]), "esa_attention_params_default": (T.AttentionParams, []), "esa_session_params_default":
            (T.SessionParams, []), "esa_mask_build_default": (T.MaskBuild, []), "esa_ctx_create": (_STATUS, [_p, _p]),
    "esa_ctx_free": (None, [_p]), "esa_ctx_error": (_s, [_p]), "esa_ctx_threads": (_i32, [_p]), "esa_ctx_cpu":
        (_s, [_p]), "esa_ctx_memory": (None, [_p, _p, _p]), "esa_ctx_trim": (None, [_p]), "esa_device_count":
            (_STATUS, [_p, _p]), "esa_device_get_info": (_STATUS, [_p, _p]), "esa_device_memory": (None, [_p, _p, _p]),
    "esa_device_sync": (_STATUS, [_p]), "esa_order": (_STATUS, [_p, _p, _i64, _p, _i32, _i32]), "esa_select":
        (_STATUS, [_p, _p, _p, _p, _p]), "esa_attention": (_STATUS, [_p] * 7), "esa_plan_create": (_STATUS, [_p] * 5),
    "esa_plan_free": (None, [_p]), "esa_plan_workspace": (_STATUS, [_p, _p]), "esa_mask_create":
        (_STATUS, [_p, _p]), "esa_plan_select": (_STATUS, [_p] * 5), "esa_plan_attention":
            (_STATUS, [_p] * 8), "esa_plan_kernel": (_s, [_p] * 6), "esa_mask_free": (None, [_p]), "esa_mask_get_info":
                (_STATUS, [_p, _p]), "esa_mask_to_device": (_STATUS, [_p, _p, _p, _i32]), "esa_mask_from_lists":
                    (_STATUS, [_p, _p, _p, _p, _p, _i64]), "esa_mask_from_bits": (_STATUS, [_p, _p, _p, _p]),
    "esa_mask_from_fa4": (_STATUS, [_p] * 5), "esa_mask_to_lists": (_STATUS, [_p, _p, _p, _i64]), "esa_mask_to_bits":
        (_STATUS, [_p, _p]), "esa_mask_to_fa4": (_STATUS, [_p, _p, _p]), "esa_importance":
            (_STATUS, [_p] * 6), "esa_mask_mass": (_STATUS, [_p, _p, _p, _p, _p, _p, _i32]), "esa_entropy_budgets":
                (_STATUS, [_p, _p, _p, _i64, _i64,
                           _f64]), "esa_session_create": (_STATUS, [_p, _p, _p]), "esa_session_free":
                               (None, [_p]), "esa_session_begin": (_STATUS, [_p]), "esa_session_step":
                                   (_STATUS, [_p, _i32, _i32]), "esa_session_set_kv_len": (_STATUS, [_p, _p]),
    "esa_session_attention": (_STATUS, [_p, _i32, _i32, _p, _p, _p, _p, _p]), "esa_session_get_stats":
        (_STATUS, [_p, _p, _i32, _i32]), "esa_session_save_recording":
            (_STATUS, [_p, _s]), "esa_session_load_recording": (_STATUS, [_p, _s]), "esa_mask_file_open":
                (_STATUS, [_p, _p, _s]), "esa_mask_file_free": (None, [_p]), "esa_mask_file_get_info":
                    (_STATUS, [_p, _p]), "esa_mask_file_require": (_STATUS, [_p, _f64]), "esa_mask_file_get":
                        (_STATUS, [_p, _p, _i32, _i32, _i32,
                                   _f64]), "esa_mask_file_stored": (_i32, [_p, _i32, _i32]), "esa_mask_file_heads":
                                       (_STATUS, [_p, _p, _p, _p, _i32, _i32, _i32, _f64]), "esa_mask_file_importance":
                                           (_STATUS, [_p, _p, _i32, _i32,
                                                      _i32]), "esa_recording_merge": (_STATUS, [_p, _s, _p, _i32]),
    "esa_mask_file_build": (_STATUS, [_p, _s, _p, _i32, _p]), "esa_mask_file_derive":
        (_STATUS, [_p, _s, _p, _p]), "esa_mask_file_save": (_STATUS, [_p, _s, _p]), "esa_mask_file_export_fa4":
            (_STATUS, [_p, _s, _p, _f64]), "esa_mask_file_import_fa4":
                (_STATUS, [_p, _s, _s, _p, _s]), "esa_tensors_open": (_STATUS, [_p, _p, _s]), "esa_tensors_free":
                    (None, [_p]), "esa_tensors_count": (_i64, [_p]), "esa_tensors_at":
                        (_STATUS, [_p, _i64, _p]), "esa_tensors_metadata": (_s, [_p, _s]), "esa_tensors_metadata_count":
                            (_i64, [_p]), "esa_tensors_metadata_at":
                                (_STATUS, [_p, _i64, _p, _p]), "esa_tensors_writer_create":
                                    (_STATUS, [_p, _p, _s]), "esa_tensors_writer_metadata":
                                        (_STATUS, [_p, _s, _s]), "esa_tensors_writer_declare":
                                            (_STATUS, [_p, _s, _i32, _i32, _p]), "esa_tensors_writer_data":
                                                (_STATUS, [_p, _p, _i64]), "esa_tensors_writer_finish":
                                                    (_STATUS, [_p]), "esa_tensors_writer_free": (None, [_p]),
}
_VIDEO_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "esa_video_abi": (C.POINTER(C.c_uint32), []), "esa_save_params_default": (T.SaveParams, []),
    "esa_frames_create": (_STATUS, [_p, _p, _p, _i32, _i32, _i32, _f64]), "esa_frames_free": (None, [_p]),
    "esa_frames_get_info": (_STATUS, [_p, _p]), "esa_frames_save": (_STATUS, [_p, _p, _s, _p]), "esa_frames_compare":
        (_STATUS, [_p, _p, _p, _p]), "esa_load_params_default": (T.LoadParams, []), "esa_frames_load":
            (_STATUS, [_p, _p, _s, _p]), "esa_frames_peek": (_STATUS, [_p, _p, _s, _p]), "esa_frames_measure":
                (_STATUS, [_p] * 8), "esa_lpips_open": (_STATUS, [_p, _p, _s]), "esa_lpips_free": (None, [_p]),
    "esa_lpips_net": (_s, [_p]), "esa_lpips_least": (_i32, [_p]), "esa_model_config_hash": (_STATUS, [_p, _p, _s]),
}


def _places(name: str) -> Iterable[pathlib.Path]:
    """Where a library may lie: in the installed package (also when its Python files are read from a source tree), in
    a build folder."""
    package = sys.modules.get(__package__ or "esa")
    folders = [pathlib.Path(p) for p in getattr(package, "__path__", [pathlib.Path(__file__).parent])]
    for folder in folders:
        for version in (f"{name}.{API_VERSION}", name):
            yield folder / "lib" / version
    root = pathlib.Path(__file__).resolve().parent.parent.parent
    if (root / "include" / "esa" / "esa.h").exists():
        for build in ("build-cuda", "build"):
            yield root / build / name
    yield root / name           # the bundle: python/ stands beside the library


def find_library(name: str = "libesa.so") -> pathlib.Path:
    """The file of a library, or an ImportError that says where it was looked for."""
    given = os.environ.get("ESA_LIB")
    if given and name == "libesa.so":
        path = pathlib.Path(given)
        if not path.is_file():
            raise ImportError(f"ESA_LIB names {given}, which is no file")
        return path
    places = list(_places(name))
    if name != "libesa.so":     # beside libesa first: both must come from one build
        places = [load().path.parent / n for n in (f"{name}.{API_VERSION}", name)] + places
    for place in places:
        if place.is_file():
            return place
    raise ImportError(
        f"{name} was not found (looked at {', '.join(map(str, places))}): reinstall the package, build the library (make), "
        "or set ESA_LIB to the file of libesa")


class Library:
    """libesa, opened and checked. Its functions are the attributes of `c`."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.c = self._open(path, _PROTOTYPES)
        version = self.c.esa_api_version()
        if version != API_VERSION:
            raise ImportError(f"{path} has API version {version}, this package was written for {API_VERSION}")
        self._compare(self.c.esa_abi(), dict(enumerate(T.ABI)), path)
        self._video: C.CDLL | None = None

    @staticmethod
    def _open(path: pathlib.Path, prototypes: dict[str, tuple[Any, list[Any]]]) -> C.CDLL:
        try:
            c = C.CDLL(str(path))
            for name, (result, arguments) in prototypes.items():
                function = getattr(c, name)
                function.restype, function.argtypes = result, arguments
        except (OSError, AttributeError) as error:
            raise ImportError(f"{path} could not be used: {error}") from error
        return c

    @staticmethod
    def _compare(sizes: Any, structs: dict[int, type[C.Structure]], path: pathlib.Path) -> None:
        for i, struct in structs.items():
            if sizes[i] != C.sizeof(struct):
                raise ImportError(
                    f"{path}: {struct.__name__} has {sizes[i]} bytes there and {C.sizeof(struct)} in this package: they are "
                    "not of one version")

    @property
    def video(self) -> C.CDLL:
        """libesa_video, opened at the first use. ImportError where it was not built."""
        if self._video is None:
            path = find_library("libesa_video.so")
            library = self._open(path, _VIDEO_PROTOTYPES)
            self._compare(library.esa_video_abi(), T.VIDEO_ABI, path)
            self._video = library
        return self._video

    def version(self) -> str:
        return str(self.c.esa_version().decode())

    def status_name(self, status: int) -> str:
        return str(self.c.esa_status_name(status).decode())

    def error(self, status: int, text: str) -> EsaError:
        """The exception for a status; text is the library's sentence ("" where there is none)."""
        name = self.status_name(status)
        return _CLASS.get(status, EsaError)(text or f"the library answered {name}", status, name)


_library: Library | None = None
_library_lock = threading.Lock()


def load() -> Library:
    """The library of this process, opened at the first call."""
    global _library
    if _library is None:
        with _library_lock:
            if _library is None:
                _library = Library(find_library())
    return _library


# ---------------------------------------------------------------- contexts

_threads = 0


def set_num_threads(threads: int) -> None:
    """Threads of contexts made from now on; 0: as many as torch uses where torch is imported, else one per CPU.
    Contexts in use by sessions keep theirs."""
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


def usable(process: int, getpid: Callable[[], int] = os.getpid, finalizing: Callable[[],
                                                                                     bool] = sys.is_finalizing) -> bool:
    """False in a forked child, and while the interpreter goes down: then nothing of the library's is freed. Defaults
    are bound because globals may be gone by then."""
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
        self.process, self.stream = os.getpid(), stream
        params = self.lib.c.esa_ctx_params_default()
        params.threads = _default_threads() if threads is None else threads
        params.cuda_stream, params.cuda_device = stream or None, device_index
        status = self.lib.c.esa_ctx_create(C.byref(self.ptr), C.byref(params))
        if status:
            raise self.lib.error(status, f"a context could not be made ({self.lib.status_name(status)}; ESA_CPU is "
                                         f"{os.environ.get('ESA_CPU', 'not set')})")

    def run(self, function: Callable[..., int], *arguments: Any) -> None:
        """Calls a function that returns a status; a failure becomes an exception with this context's sentence."""
        if self.process != os.getpid():
            raise EsaError(
                "this context was made before fork(): its threads do not exist in the child process; make it there")
        with self.lock:
            status = function(*arguments)
            if status:
                raise self.lib.error(status, self.lib.c.esa_ctx_error(self.ptr).decode(errors="replace"))

    def own(self, ptr: C.c_void_p, free: Callable[[C.c_void_p], None]) -> None:
        """Something was made with this context and must be freed before it. Objects that hold each other die together,
        and Python then calls their __del__ in any order: whichever comes first, `release` or the end of the context,
        frees it, and the other finds NULL."""
        self.owned[id(ptr)] = ptr, free

    def release(self, ptr: C.c_void_p) -> None:
        """Frees what `own` was told of; again is harmless."""
        _, free = self.owned.pop(id(ptr), (None, None))
        if free is not None and ptr:
            with self.lock:
                free(ptr)
            ptr.value = None

    def set_stream(self, stream: int) -> None:
        """GPU work that follows goes to this stream (a cudaStream_t as an integer); a change waits for the one
        before."""
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
    """In a forked child the threads of all contexts are gone, and locks may be held by threads that are not there."""
    global _contexts, _contexts_lock
    _contexts, _contexts_lock = OrderedDict(), threading.Lock()


os.register_at_fork(after_in_child=_forget_contexts)
