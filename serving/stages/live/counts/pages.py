"""Memory for arrays that grow: each in pages of its own, which the system gets back when the array is freed.

The C library would keep them: once it has freed a large array, it takes the next ones from its heap, where a growing array
leaves behind the place of every smaller one.
"""

from __future__ import annotations

import mmap

import numpy as np


def allocate_zeros(count: int, dtype: np.dtype | type) -> np.ndarray:
    """Return zeros [count], count at least 1."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)
