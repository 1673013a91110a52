"""The loops of `hits.py` and `placing.py` as passes of numpy. What they write is returned."""

from __future__ import annotations

import numpy as np

from serving.tables.store.hits import MIX, MOST_USES, NO_KEY, THIRTY_TWO, WAYS
from serving.tables.store.row_formats import RowCodec


def find_cached(owner: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return slots int64 [N], -1 where missing."""
    sets = (((keys.view(np.uint64) * MIX) >> THIRTY_TWO) * np.uint64(len(owner) // WAYS) >> THIRTY_TWO).view(np.int64)
    matches = (owner.reshape(-1, WAYS)[sets] == keys[:, None]) & (keys != NO_KEY)[:, None]
    return np.where(matches.any(axis=1), sets * WAYS + matches.argmax(axis=1), -1)


def decode_rows(codec: RowCodec, stored: np.ndarray, slots: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return vectors, with the rows that are there."""
    return np.where((slots >= 0)[:, None], codec.decode(stored[np.maximum(slots, 0)]), vectors)


def count_uses(uses: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Return uses."""
    uses, slots = uses.copy(), slots[slots >= 0]
    before = uses[slots]
    uses[slots] = before + (before < MOST_USES)
    return uses


def place(sets: np.ndarray, uses: np.ndarray, empty: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return (placed, slots)"""
    rank = np.arange(len(sets)) - np.searchsorted(sets, sets)  # of several new rows of one set: first, second, …
    placed = np.flatnonzero(rank < WAYS)
    sets, rank = sets[placed], rank[placed]
    is_empty = np.unpackbits(empty[sets][:, None], axis=1, bitorder="little").astype(bool)
    used = np.where(is_empty, -1, uses.reshape(-1, WAYS)[sets].astype(np.int16))
    ways = np.argsort(used, axis=1, kind="stable")
    return placed, sets * WAYS + ways[np.arange(len(sets)), rank]
