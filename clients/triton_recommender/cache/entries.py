"""Make keys from requests, and bytes from answers.

A key covers every tensor of a request, because each can change the answer. It does not cover `k`, which the client
applies to the answer of the server or of the cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from triton_recommender.models import ModelDescription

DIGEST_BYTES = 16
ITEM_BYTES = 8 + 4  # id and score
CACHED_OUTPUTS = ("item_ids", "scores", "degraded", "generation")
Row = dict[str, np.ndarray]  # the cached outputs for one user: name -> [1, …]


class Key(NamedTuple):
    user_id: int
    question: bytes  # [DIGEST_BYTES] of all input tensors and the sizes of the model


def make_keys(inputs: Mapping[str, np.ndarray], model: ModelDescription | None) -> list[Key]:
    """Return a key for each user of input tensors [B, …]. model: its description; another model has other keys"""
    names = sorted(inputs)
    sizes = repr((model, [(name, inputs[name].dtype.str) for name in names])).encode()
    seed = blake2b(sizes, digest_size=DIGEST_BYTES)
    keys = []
    for row, user_id in enumerate(inputs["user_id"][:, 0].tolist()):
        digest = seed.copy()
        for name in names:
            digest.update(_encode(inputs[name][row]))
        keys.append(Key(user_id, digest.digest()))
    return keys


def _encode(row: np.ndarray) -> bytes:
    """Return the bytes of an array; texts have their length first, so that two texts never equal a longer one."""
    if row.dtype != np.object_:
        return row.tobytes()
    return b"".join(len(text).to_bytes(4, "little") + text for text in row.ravel())


def pack_row(row: Row) -> bytes:
    """Return the bytes of a whole answer: int64 [K] item ids, then float32 [K] scores."""
    return row["item_ids"].astype("<i8").tobytes() + row["scores"].astype("<f4").tobytes()


def unpack_row(value: bytes, generation: int) -> Row | None:
    """Return the answer that `pack_row` packed; None for other bytes."""
    size, rest = divmod(len(value), ITEM_BYTES)
    if rest or not size:
        return None
    return {
        "item_ids": np.frombuffer(value, "<i8", size)[None],
        "scores": np.frombuffer(value, "<f4", size, 8 * size)[None],
        "degraded": np.zeros((1, 1), np.int32),
        "generation": np.array([[generation]], np.int64),
    }


def take_row(outputs: Mapping[str, np.ndarray], row: int) -> Row:
    """Return one row of outputs [B, …], reduced to the names of `unpack_row` so that `join_rows` can mix both."""
    return {name: outputs[name][row : row + 1] for name in CACHED_OUTPUTS}


def join_rows(rows: list[Row]) -> dict[str, np.ndarray]:
    """Concatenate rows [1, …] to tensors [B, …]."""
    return rows[0] if len(rows) == 1 else {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
