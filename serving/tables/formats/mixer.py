"""Mix keys as HPS does, to spread them over partitions: those of Redis, and the groups of updates.

The public-domain bit mixer "rrxmrrxmsx_0", modulo 2^64:
x ^= ror(x,25) ^ ror(x,50); x *= A; x ^= ror(x,24) ^ ror(x,49); x *= B; x ^ (x >> 28).
"""

from __future__ import annotations

import numpy as np

A, B = np.uint64(0xA24BAED4963EE407), np.uint64(0x9FB21C651E98DF25)


def _rotate_right(x: np.ndarray, bits: int) -> np.ndarray:
    """Return uint64 values rotated right."""
    return (x >> np.uint64(bits)) | (x << np.uint64(64 - bits))


def mix_keys(keys: np.ndarray) -> np.ndarray:
    """Return the mixed keys, uint64 in the shape of `keys`, which are int64 or uint64."""
    x = np.ascontiguousarray(keys)
    x = x.view(np.uint64) if x.dtype == np.int64 else x.astype(np.uint64)
    x = (x ^ _rotate_right(x, 25) ^ _rotate_right(x, 50)) * A
    x = (x ^ _rotate_right(x, 24) ^ _rotate_right(x, 49)) * B
    return x ^ (x >> np.uint64(28))


def compute_partitions(keys: np.ndarray, n_partitions: int) -> np.ndarray:
    """Return the partition of each key, int64 [N] in 0 … n_partitions - 1. keys: int64 [N]"""
    if n_partitions == 1:
        return np.zeros(np.shape(keys), np.int64)
    return (mix_keys(keys) % np.uint64(n_partitions)).astype(np.int64)
