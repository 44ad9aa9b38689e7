# SPDX-License-Identifier: Apache-2.0
"""Whole files in and out, by the library's rules (esa_tensors.h): pipes and devices are not waited for, and readers see
an old file or the new one."""
from __future__ import annotations

import errno
import os
import stat
from typing import BinaryIO

from .context import shared_context


def open_file(path: str | os.PathLike[str]) -> BinaryIO:
    """Opens a file to read its bytes. A folder, a pipe and a device are refused with an OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    try:
        mode = os.fstat(fd).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, expected a file", os.fspath(path))
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def read_text(path: str | os.PathLike[str]) -> str:
    """A whole text file in UTF-8."""
    with open_file(path) as file:
        return file.read().decode("utf-8")


def write_file(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes a whole file, which replaces an older one at the end and keeps its permissions. Links are followed."""
    context = shared_context()
    context.run(context.lib.c.esa_file_write, context.ptr, os.fsencode(path), data, len(data))
