"""Hold temporary folders that do not outlive a kill for long: the next holder removes what killed processes left.

They may hold gigabytes, and what users did. A process holds a lock on its folder, which the kernel releases when it dies.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from serving.contract.locks import try_lock

PREFIX = "recommender-scratch-"


@contextmanager
def hold_scratch() -> Iterator[Path]:
    """Yield a new folder in the system's folder for temporary files, and remove it when the block ends."""
    remove_left_scratch()
    while True:
        with tempfile.TemporaryDirectory(prefix=PREFIX, ignore_cleanup_errors=True) as name:
            try:
                descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:  # another process took it for a left one before it was locked
                continue
            try:
                with suppress(OSError):  # a network file system without such locks: nobody takes the folder for a left one
                    fcntl.flock(descriptor, fcntl.LOCK_EX)
                if os.path.exists(name):  # likewise
                    yield Path(name)
                    return
            finally:
                os.close(descriptor)


def remove_left_scratch() -> int:
    """Remove the folders of `hold_scratch` that killed processes left, as far as this user may. Return their number."""
    count = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):  # of another user, or just removed
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if try_lock(descriptor):
                    shutil.rmtree(folder)
                    count += 1
            finally:
                os.close(descriptor)
    return count
