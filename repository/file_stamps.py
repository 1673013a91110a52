"""Notice with one `stat` that a file was written or replaced."""

from __future__ import annotations

from pathlib import Path

Stamp = tuple[int, int, int, int]  # inode, bytes, times of the last change of content and of status


def read_stamp(path: Path) -> Stamp | None:
    """Return a stamp that changes whenever the file is written or replaced; None when it is gone."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
