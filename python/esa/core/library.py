# SPDX-License-Identifier: Apache-2.0
"""Finds and opens the C libraries. A status other than 0 becomes an exception with the library's own message.

libesa is looked for in this order: $ESA_LIB (a file), the installed package (esa/lib), the build folders of a source
tree. libesa_video (frames and metrics) lies beside it and is opened on first use. A library is refused unless its API
version and the sizes of all its public structs are the ones this package was written for; an installed package works
only with a library of its own build."""
from __future__ import annotations

import ctypes as C
import os
import pathlib
import sys
import threading
from collections.abc import Iterable
from typing import Any

from . import prototypes
from . import structs as T

API_VERSION = 2

# ---------------------------------------------------------------- errors


class EsaError(RuntimeError):
    """A call of the library failed. `status` is the negative esa_status, `status_name` its name; the text is the
    library's message."""

    def __init__(self, text: str, status: int = 0, status_name: str = "") -> None:
        super().__init__(text)
        self.status, self.status_name = status, status_name


class EsaValueError(EsaError, ValueError):
    """An argument does not fit: a value, a shape, a dtype, or a mask or file made for something else."""


class EsaMemoryError(EsaError, MemoryError):
    """The library could not get memory."""


class EsaFileError(EsaError, OSError):
    """The operating system refused a read or a write."""


# esa_status: exception. Any other status is a plain EsaError.
_CLASS = {
    -1: EsaValueError, -2: EsaValueError, -3: EsaValueError, -4: EsaValueError, -5: EsaMemoryError, -7: EsaFileError,
    -8: EsaValueError, -9: EsaValueError
}


def package_folders() -> list[pathlib.Path]:
    """The folders of the installed package; an editable install has two, one of them in the source tree."""
    own = pathlib.Path(__file__).parent.parent
    return [pathlib.Path(p) for p in getattr(sys.modules.get("esa"), "__path__", [own])]


def own_build() -> str | None:
    """The build that this package was installed with; None in a source tree, whose Python files belong to no build."""
    for folder in package_folders():
        note = folder / "lib" / "esa_build.h"
        if note.is_file():
            return note.read_text(encoding="utf-8").split('"')[1]
    return None


def tree_folders() -> Iterable[pathlib.Path]:
    """Where a source tree builds, and the top of a bundle, which has the libraries beside python/."""
    root = pathlib.Path(__file__).resolve().parents[3]
    if (root / "include" / "esa" / "esa.h").exists():
        yield root / "build-cuda"
        yield root / "build"
    yield root


def _places(name: str) -> Iterable[pathlib.Path]:
    for folder in package_folders():
        for version in (f"{name}.{API_VERSION}", name):
            yield folder / "lib" / version
    for folder in tree_folders():
        yield folder / name


def find_library(name: str = "libesa.so") -> pathlib.Path:
    """The file of a library. The ImportError lists the places that were searched."""
    given = os.environ.get("ESA_LIB")
    if given and name == "libesa.so":
        path = pathlib.Path(given).absolute()   # of the current folder now, not when a GPU is first used
        if not path.is_file():
            raise ImportError(f"ESA_LIB names {given}, which is no file")
        return path
    places = list(_places(name))
    if name != "libesa.so":     # beside libesa first: both must come from one build
        places = [load().path.parent / n for n in (f"{name}.{API_VERSION}", name)] + places
    for place in places:
        if place.is_file():
            return place
    looked = f"{name} was not found (looked at {', '.join(map(str, places))})"
    if name != "libesa.so":
        raise ImportError(f"{looked}: wheels do not have it, so install the package from its source")
    raise ImportError(f"{looked}: reinstall the package, build the library (make), or set ESA_LIB to the file of "
                      "libesa")


class Library:
    """libesa, opened and checked. Its functions are the attributes of `c`."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path
        self.c = self._open(path, prototypes.LIBESA)
        version = self.c.esa_api_version()
        if version != API_VERSION:
            raise ImportError(f"{path} has API version {version}, this package was written for {API_VERSION}")
        self._compare(self.c.esa_abi(), dict(enumerate(T.ABI)), path)
        self.build: str = self.c.esa_build_id().decode()
        self._same_build("this package", own_build(), path)
        self._video: C.CDLL | None = None

    @staticmethod
    def _open(path: pathlib.Path, functions: dict[str, tuple[Any, list[Any]]]) -> C.CDLL:
        try:
            c = C.CDLL(str(path))
            for name, (result, arguments) in functions.items():
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
                    f"{path}: {struct.__name__} has {sizes[i]} bytes there and {C.sizeof(struct)} in this package: "
                    "they are not of one version")

    def _same_build(self, name: str, build: str | None, libesa: pathlib.Path) -> None:
        if build is not None and build != self.build:
            raise ImportError(
                f"{name} is build {build}, {libesa} is build {self.build}: install both from one build")

    @property
    def video(self) -> C.CDLL:
        """libesa_video, opened at the first use. ImportError where it was not built."""
        if self._video is None:
            path = find_library("libesa_video.so")
            library = self._open(path, prototypes.LIBESA_VIDEO)
            self._same_build(str(path), library.esa_video_build_id().decode(), self.path)
            self._compare(library.esa_video_abi(), T.VIDEO_ABI, path)
            self._video = library
        return self._video

    def version(self) -> str:
        return str(self.c.esa_version().decode())

    def status_name(self, status: int) -> str:
        return str(self.c.esa_status_name(status).decode())

    def error(self, status: int, text: str) -> EsaError:
        """The exception for a status; text is the library's message ("" where there is none)."""
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
