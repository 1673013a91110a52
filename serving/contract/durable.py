"""Flush files and folders to the disk, so that what was written survives a power cut."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def make_durable(path: Path) -> None:
    """Write a file's contents, or the names in a folder, to the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replace_durably(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes the place of `path` as a whole, durable and readable by its owner alone, when the block ends.

    If the block fails, or a crash comes first, `path` stays as it was. Raises OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    make_durable(path.parent)


def append_durably(path: Path, text: str) -> None:
    """Add lines to a file that its owner alone may read; nothing of them if the disk is full. Raises OSError.

    They begin on a line of their own, also where a crash or an editor left the last one without its end.
    """
    with open(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "r+b", buffering=0) as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # otherwise a failure would cut off what another process appends meanwhile
        size, line = file.seek(0, os.SEEK_END), text.encode()
        if size and os.pread(file.fileno(), 1, size - 1) != b"\n":
            line = b"\n" + line
        try:
            if file.write(line) != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            os.fsync(file.fileno())
        except OSError:
            file.truncate(size)
            raise
    make_durable(path.parent)


def make_file_system_durable(folder: Path) -> None:
    """Write everything on a folder's file system to the disk. Raises OSError.

    A generation has about a thousand files: this takes some 30 ms, and `make_durable` for each of them 4.5 s.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor):  # not in Python's os
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(folder))
    finally:
        os.close(descriptor)
