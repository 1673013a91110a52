"""The SSD itself: what reading rows costs at least."""

from __future__ import annotations

import mmap
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

BLOCK_BYTES = 4096  # what RocksDB reads for one row
READ_BYTES = 8 << 20  # at once, of a whole file
THREADS = 16
BLOCKS_PER_TASK = 4  # handing fewer to a thread costs more than it saves


def read_through(folder: str) -> None:
    """Read every file once, past the page cache.

    What lies below a virtual disk keeps what was read, as a rule: a file of 200 MB since it was written, one of 4 GB in parts.
    Without this, growth of a table showed that: raw reads of its blocks took three times as long, in the first run only.
    """
    buffer = mmap.mmap(-1, READ_BYTES)
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while os.readv(file, [buffer]) == READ_BYTES:
                pass
        finally:
            os.close(file)


class RawDevice:
    """Random 4 KiB reads of a file past the page cache, by as many threads as RocksDB is read by."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._blocks = os.path.getsize(path) // BLOCK_BYTES
        self._buffers = threading.local()
        self._pool = ThreadPoolExecutor(THREADS)

    def read(self, blocks: np.ndarray) -> None:
        offsets = (blocks % self._blocks * BLOCK_BYTES).tolist()
        parts = [offsets[start : start + BLOCKS_PER_TASK] for start in range(0, len(offsets), BLOCKS_PER_TASK)]
        if len(parts) == 1:
            self._some(parts[0])
        else:
            list(self._pool.map(self._some, parts))

    def _some(self, offsets: list[int]) -> None:
        if not hasattr(self._buffers, "block"):
            self._buffers.block = mmap.mmap(-1, BLOCK_BYTES)
        for offset in offsets:
            os.preadv(self._file, [self._buffers.block], offset)

    def close(self) -> None:
        self._pool.shutdown()
        os.close(self._file)
