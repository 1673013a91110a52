"""A catalogue far larger than the repository's own: the candidates' item ids become keys of a large table.

Copied beside a rank stage by `large.py`, so it imports nothing but the stages.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from serving.stages.rank import Rank
from serving.tables.store.tiers import Tiers

TABLE = "items"  # the large one


class ItemRows:
    """`RankInputs.item_rows` of a larger catalogue: every request's candidates have the next keys of the large table."""

    def __init__(self, rows: np.ndarray, keys: np.ndarray) -> None:
        """rows: int [n_items + 1, S] of the repository; keys: int64 [R, C]."""
        self.shape, self._rows, self._keys, self._next = rows.shape, rows, keys, 0

    def take(self, candidates: np.ndarray, axis: int) -> np.ndarray:
        """int [B, C] -> int64 [B, C, S]"""
        rows = self._rows.take(candidates, axis=axis).astype(np.int64)
        requests = np.arange(self._next, self._next + len(rows))
        rows[..., 0] = self._keys.take(requests, axis=0, mode="wrap")
        self._next += len(rows)
        return rows


def over(rank: Rank, tiers: Tiers, keys: np.ndarray) -> Rank:
    """The same stage, its first item table the large one."""
    inputs = rank.inputs
    named = replace(inputs.settings, item_tables=(TABLE, *inputs.settings.item_tables[1:]))
    inputs = replace(inputs, settings=named, item_rows=ItemRows(inputs.item_rows, keys))
    return replace(rank, inputs=inputs, rows=replace(rank.rows, settings=named, tables=tiers))
