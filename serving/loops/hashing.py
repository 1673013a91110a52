"""Hash values as pandas does (`pandas.util.hash_array`), without pandas.

Integers are mixed by splitmix64. Strings go through SipHash-2-4 with pandas' fixed key, then through the same mixing.
pandas' hash is the one NVTabular uses on a CPU; `tests/unit/serving/test_encode.py` compares the two value by value.
"""

from __future__ import annotations

import numpy as np

from serving.loops.compiled import compiled

KEY = b"0123456789123456"
_K0, _K1 = (np.uint64(int.from_bytes(KEY[i : i + 8], "little")) for i in (0, 8))
_START = tuple(np.uint64(int.from_bytes(text, "big")) for text in (b"somepseu", b"dorandom", b"lygenera", b"tedbytes"))


def hash_integers(values: np.ndarray) -> np.ndarray:
    """Return the hashes, uint64 [n], of int64 [n]."""
    return mix_all(values)


def hash_strings(values: np.ndarray) -> np.ndarray:
    """Return the hashes, uint64 [n], of object [n] of str, bytes or None; None hashes as the empty string."""
    texts = [value if isinstance(value, bytes) else (value or "").encode() for value in values.tolist()]
    ends = np.cumsum([len(text) for text in texts], dtype=np.int64)
    return _hash_texts(np.frombuffer(b"".join(texts), np.uint8), ends)


@compiled
def mix_all(values):
    """Return the hashes, uint64 [n], of integers, uint64 [n]."""
    hashes = np.empty(len(values), np.uint64)
    for row in range(len(values)):
        hashes[row] = _mix(np.uint64(values[row]))
    return hashes


@compiled
def _mix(x):
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled
def _hash_texts(text, ends):
    """Return the hashes, uint64 [n], of n texts, one after another in `text`, uint8. ends: int64 [n] where each ends"""
    hashes = np.empty(len(ends), np.uint64)
    start = 0
    for row in range(len(ends)):
        hashes[row] = _mix(_compute_siphash(text[start : ends[row]]))
        start = ends[row]
    return hashes


@compiled
def _compute_siphash(text):
    """Return SipHash-2-4 of uint8 [n], read as little-endian words. The top byte of the last word is the length's low byte."""
    v0, v1, v2, v3 = _K0 ^ _START[0], _K1 ^ _START[1], _K0 ^ _START[2], _K1 ^ _START[3]
    for start in range(0, len(text) + 1, 8):
        word = np.uint64(0)
        for i in range(start, min(start + 8, len(text))):
            word |= np.uint64(text[i]) << np.uint64(8 * (i - start))
        if start + 8 > len(text):
            word |= np.uint64(len(text)) << np.uint64(56)
        v0, v1, v2, v3 = _round(*_round(v0, v1, v2, v3 ^ word))
        v0 ^= word
    v2 ^= np.uint64(0xFF)
    for _ in range(4):
        v0, v1, v2, v3 = _round(v0, v1, v2, v3)
    return v0 ^ v1 ^ v2 ^ v3


@compiled
def _round(v0, v1, v2, v3):
    v0 += v1
    v1 = _rotate(v1, 13) ^ v0
    v0 = _rotate(v0, 32)
    v2 += v3
    v3 = _rotate(v3, 16) ^ v2
    v0 += v3
    v3 = _rotate(v3, 21) ^ v0
    v2 += v1
    v1 = _rotate(v1, 17) ^ v2
    v2 = _rotate(v2, 32)
    return v0, v1, v2, v3


@compiled
def _rotate(value, bits):
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))
