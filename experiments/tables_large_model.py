"""The rank stage of a catalogue far larger than the repository's: `tables_large.py` publishes this file as its `model.py`.

Every candidate of a request gets the next key of one sequence in the large table; all else is the repository's own. This file
imports the published code beside it. large/: levels.json, and keys.npy, int32 [R, C]
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

sys.path.insert(0, str(Path(__file__).resolve().parent))

import numpy as np

from serving.stages.adapter.triton import make_triton_model
from serving.stages.rank import Rank
from serving.tables.leveled import LeveledTables

TABLE = "items"  # the large one


class ItemRows:
    """`RankInputs.item_rows` with the keys of the large table in place of the first table's."""

    def __init__(self, rows, keys):
        """rows: int [n_items + 1, S] of the repository; keys: int32 [R, C]."""
        self.shape, self._rows, self._keys, self._next = rows.shape, rows, keys, 0

    def take(self, candidates, axis):
        """Return the keys of candidates, int [B, C], as int64 [B, C, S]."""
        rows = self._rows.take(candidates, axis=axis).astype(np.int64)
        requests = np.arange(self._next, self._next + len(rows))
        rows[..., 0] = self._keys.take(requests, axis=0, mode="wrap")
        self._next += len(rows)
        return rows


class LargeRank:
    @staticmethod
    def load(folder):
        rank = Rank.load(folder)
        rank.close()  # its own tables: those of large/ replace them
        inputs, keys = rank.inputs, np.load(folder / "large" / "keys.npy", mmap_mode="r")
        settings = replace(inputs.settings, item_tables=(TABLE, *inputs.settings.item_tables[1:]))
        item_rows = cast(np.ndarray, ItemRows(inputs.item_rows, keys))  # the stage needs its shape and `take` alone
        inputs = replace(inputs, settings=settings, item_rows=item_rows)
        return replace(
            rank, inputs=inputs, rows=replace(rank.rows, settings=settings, tables=LeveledTables.load(folder / "large"))
        )


TritonPythonModel = make_triton_model(LargeRank)
