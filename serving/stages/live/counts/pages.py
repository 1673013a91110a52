"""Memory for arrays that grow: each in pages of its own, which the system gets back when the array is freed.

The C library would not return them. Once it has freed a large array, it allocates the next ones in its heap, and a growing
array leaves gaps there, one for each earlier size.
"""

from __future__ import annotations

import mmap

import numpy as np


def allocate_zeros(count: int, dtype: np.dtype | type) -> np.ndarray:
    """Return zeros [count], count at least 1."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype)
