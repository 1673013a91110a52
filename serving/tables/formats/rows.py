"""Encode and decode rows of a database: key = 8 little-endian bytes of an int64, value = D little-endian float32.

Redis fields and values and RocksDB keys and values are exactly these bytes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from serving.contract.errors import DataError

KEY_BYTES = 8
KEY, INT64, FLOAT32 = map(np.dtype, (f"V{KEY_BYTES}", "<i8", "<f4"))  # made once, because NumPy parses type names slowly


def encode_keys(keys: np.ndarray) -> list[bytes]:
    """Return int64 [N] as N byte strings of 8."""
    return np.ascontiguousarray(keys, INT64).view(KEY).tolist()


def encode_vectors(vectors: np.ndarray) -> list[bytes]:
    """Return float32 [N, D] as N byte strings of 4·D."""
    return np.ascontiguousarray(vectors, "<f4").view(f"V{4 * vectors.shape[1]}").ravel().tolist()


def decode_vectors(values: Sequence[bytes | None], width: int) -> tuple[np.ndarray, np.ndarray | None]:
    """Return vectors float32 [N, D], zeros where missing, and bool [N] is_found (None: all are).

    values: N stored values, None where missing. Raises DataError for a value of another width.
    """
    if None not in values and set(map(len, values)) == {4 * width}:  # type: ignore[arg-type]
        joined = b"".join(values)  # type: ignore[arg-type]
        return np.frombuffer(joined, FLOAT32).reshape(-1, width), None
    is_found = np.fromiter((value is not None for value in values), bool, len(values))
    wrong = next((value for value in values if value is not None and len(value) != 4 * width), None)
    if wrong is not None:
        raise DataError(
            f"a stored vector has {len(wrong)} bytes. Expected {4 * width} for width {width}. "
            "The table was written with another width: load it again from its sparse files."
        )
    vectors = np.zeros((len(values), width), np.float32)
    vectors[is_found] = np.frombuffer(b"".join(value for value in values if value is not None), "<f4").reshape(-1, width)
    return vectors, is_found
