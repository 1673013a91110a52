"""Hashes of values as pandas computes them (`pandas.util.hash_array`), for serving without pandas.

Integers are mixed by splitmix64. Strings go through SipHash-2-4 with pandas' fixed key, then through the same mixing.
pandas' hash is the one NVTabular uses on a CPU; `tests/unit/test_encode.py` compares the two value by value.
"""

from __future__ import annotations

import numpy as np

KEY = b"0123456789123456"
MASK = 0xFFFFFFFFFFFFFFFF
FEW = 8  # up to here Python's own integers are faster than arrays of one element each


def hash_integers(values: np.ndarray) -> np.ndarray:
    """int64 [n] -> uint64 [n]."""
    mixed = values.astype(np.int64).view(np.uint64)  # astype copies: the caller's array stays as it is
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed


def hash_strings(values: np.ndarray) -> np.ndarray:
    """object [n] of str, bytes or None -> uint64 [n]. Missing (None) hashes as the empty string."""
    texts = [value if isinstance(value, bytes) else (value or "").encode() for value in values.tolist()]
    if len(texts) <= FEW:
        digests = np.array([siphash(_words(text)) for text in texts], np.uint64)
    else:
        digests = np.empty(len(texts), np.uint64)
        n_words = np.array([len(text) // 8 + 1 for text in texts])
        for length in np.unique(n_words):
            rows = np.flatnonzero(n_words == length)
            words = np.array([_words(texts[row]) for row in rows], np.uint64)
            digests[rows] = siphash(words.T)
    return hash_integers(digests.view(np.int64))


def _words(text: bytes) -> list[int]:
    """The message as SipHash reads it: little-endian 64-bit words, the last one ending in the length's low byte."""
    padded = text + bytes(7 - len(text) % 8) + bytes([len(text) & 0xFF])
    return np.frombuffer(padded, "<u8").tolist()


def siphash(words):
    """SipHash-2-4 of one message (a list of ints) or of n messages of W words (uint64 [W, n]) -> int or uint64 [n]."""
    k0, k1 = (int.from_bytes(KEY[i : i + 8], "little") for i in (0, 8))
    state = (k0 ^ 0x736F6D6570736575, k1 ^ 0x646F72616E646F6D, k0 ^ 0x6C7967656E657261, k1 ^ 0x7465646279746573)
    if isinstance(words, np.ndarray):
        state = tuple(np.full(words.shape[1], word, np.uint64) for word in state)
    for word in words:
        v0, v1, v2, v3 = state
        v0, v1, v2, v3 = _round(*_round(v0, v1, v2, v3 ^ word))
        state = (v0 ^ word, v1, v2, v3)
    v0, v1, v2, v3 = state
    v2 = v2 ^ 0xFF
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


def _round(v0, v1, v2, v3):
    """One SipRound, for Python ints and uint64 arrays alike: the mask is what makes ints wrap at 64 bits."""
    v0 = (v0 + v1) & MASK
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 = (v2 + v3) & MASK
    v3 = _rotate(v3, 16) ^ v2
    v0 = (v0 + v3) & MASK
    v3 = _rotate(v3, 21) ^ v0
    v2 = (v2 + v1) & MASK
    v1 = _rotate(v1, 17) ^ v2
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


def _rotate(value, bits: int):
    return ((value << bits) & MASK) | (value >> (64 - bits))
