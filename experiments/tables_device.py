"""Read the SSD itself, as a program in C would: native threads, 4 KiB blocks, past the page cache.

Compiled loops run on threads of the C library: each waits on a semaphore, reads its share of the blocks, and posts another one.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
from numba import carray, cfunc, njit

BLOCK_BYTES = 4096  # what RocksDB reads for one row
READ_BYTES = 8 << 20  # at once, of a whole file
THREADS = 16
MOST_BLOCKS = 64  # of one thread
FILE, BUFFER, START, DONE, COUNT, FAILED, OFFSETS = range(7)  # a thread's words; the last ones are offsets in bytes
WORDS, SEMAPHORE_WORDS = OFFSETS + MOST_BLOCKS, 4

_libc = ctypes.CDLL(None)
pread, sem_wait, sem_post = _libc.pread, _libc.sem_wait, _libc.sem_post
pread.argtypes, pread.restype = (ctypes.c_int64, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int64), ctypes.c_int64
for _call in (sem_wait, sem_post):  # addresses are plain integers here
    _call.argtypes, _call.restype = (ctypes.c_size_t,), ctypes.c_int


@njit(nogil=True)
def _read_share(words):
    for number in range(words[COUNT]):
        words[FAILED] += pread(words[FILE], words[BUFFER], BLOCK_BYTES, words[OFFSETS + number]) != BLOCK_BYTES


@cfunc("int64(CPointer(int64))")
def _run_thread(job):
    words = carray(job, (WORDS,))
    while True:
        sem_wait(words[START])
        if words[COUNT] < 0:
            return 0
        _read_share(words)
        sem_post(words[DONE])


@njit(nogil=True)
def _read(jobs, offsets):
    n_threads = min(len(jobs), len(offsets))
    for thread in range(n_threads):
        share = offsets[thread::n_threads]
        jobs[thread, COUNT] = len(share)
        jobs[thread, OFFSETS : OFFSETS + len(share)] = share
    if n_threads == 1:  # waking another thread takes longer than it saves
        _read_share(jobs[0])
        return
    for thread in range(n_threads):
        sem_post(jobs[thread, START])
    for _ in range(n_threads):
        sem_wait(jobs[0, DONE])


class RawDevice:
    """Random 4 KiB reads of a file past the page cache, with as many threads as RocksDB is read with."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._blocks = os.path.getsize(path) // BLOCK_BYTES
        self._buffers = np.frombuffer(mmap.mmap(-1, THREADS * BLOCK_BYTES), np.uint8)  # O_DIRECT wants them aligned
        self._semaphores = np.zeros((THREADS + 1, SEMAPHORE_WORDS), np.int64)  # zeroed: nothing posted, of this process
        self._jobs = np.zeros((THREADS, WORDS), np.int64)
        self._jobs[:, FILE] = self._file
        self._jobs[:, BUFFER] = self._buffers.ctypes.data + BLOCK_BYTES * np.arange(THREADS)
        starts = self._semaphores.ctypes.data + self._semaphores.strides[0] * np.arange(THREADS + 1)
        self._jobs[:, START], self._jobs[:, DONE] = starts[:-1], starts[-1]
        self._threads = [ctypes.c_size_t() for _ in range(THREADS)]
        for thread, job in zip(self._threads, self._jobs, strict=True):
            _libc.pthread_create(
                ctypes.byref(thread), None, ctypes.c_void_p(_run_thread.address), ctypes.c_void_p(job.ctypes.data)
            )
        for count in (1, 2):  # compiles, for one thread and for several
            self.read(np.arange(count))

    def read(self, blocks: np.ndarray) -> None:
        """Read int64 [N] blocks, at most 1,024. Raises OSError when one cannot be read."""
        _read(self._jobs, blocks % self._blocks * BLOCK_BYTES)
        if self._jobs[:, FAILED].any():
            raise OSError(f"{self._jobs[:, FAILED].sum()} of the raw reads failed")

    def close(self) -> None:
        self._jobs[:, COUNT] = -1
        for job, thread in zip(self._jobs, self._threads, strict=True):
            sem_post(int(job[START]))
            _libc.pthread_join(thread, None)
        os.close(self._file)


def read_through(folder: str) -> None:
    """Read every file once, past the page cache.

    The first read of a place on a virtual disk may take 50 times as long as later ones, because the host caches what was read.
    """
    buffer = mmap.mmap(-1, READ_BYTES)
    for path in sorted(path for path in Path(folder).rglob("*") if path.is_file()):
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            while os.readv(file, [buffer]) == READ_BYTES:
                pass
        finally:
            os.close(file)
