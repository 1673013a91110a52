"""The loops of `stages/embeddings/hits.py` as passes of numpy over all keys. Same arguments; what they write is returned."""

from __future__ import annotations

import numpy as np

from stages.embeddings.hits import MIX, MOST_USES, NO_KEY, THIRTY_TWO, WAYS
from stages.embeddings.row_formats import RowCodec


def find_hashed(owner: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """-> slots int64 [N], -1 where missing."""
    sets = (((keys.view(np.uint64) * MIX) >> THIRTY_TWO) * np.uint64(len(owner) // WAYS) >> THIRTY_TWO).view(np.int64)
    matches = (owner.reshape(-1, WAYS)[sets] == keys[:, None]) & (keys != NO_KEY)[:, None]
    return np.where(matches.any(axis=1), sets * WAYS + matches.argmax(axis=1), -1)


def find_indexed(slot_of_key: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """-> slots int64 [N], -1 where missing."""
    inside = (keys >= 0) & (keys < len(slot_of_key))
    return np.where(inside, slot_of_key[np.where(inside, keys, 0)], -1)


def decode_rows(codec: RowCodec, stored: np.ndarray, slots: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """-> vectors, with the rows that are there."""
    return np.where((slots >= 0)[:, None], codec.decode(stored[np.maximum(slots, 0)]), vectors)


def count_uses(uses: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """-> uses."""
    uses, slots = uses.copy(), slots[slots >= 0]
    before = uses[slots]
    uses[slots] = before + (before < MOST_USES)
    return uses
