"""Lay out an entity's record. `loops.py` reads its cells by an integer program; its dtype names the fields for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from serving.live.aggregations import loops
from serving.live.aggregations.spec import FUNCTIONS, VALUES, Aggregation

ALL_EVENTS = -1  # every bit is set
KINDS = {
    "window": loops.RING_CELL,
    "half_life": loops.DECAY_CELL,
    "session_gap": loops.SESSION_CELL,
}


class Cell(NamedTuple):
    """The state of one value over one span. Aggregations that differ only in their function share a cell.

    events: bit mask of the event names that count; length: number of latest events that a "last" cell holds
    """

    kind: int
    value: int
    events: int
    span_ms: int
    length: int = 0

    @classmethod
    def of(cls, aggregation: Aggregation, event_names: Sequence[str]) -> Cell:
        """Return the cell that an aggregation reads. event_names: number -> name"""
        bits = sum(1 << event_names.index(name) for name in aggregation.events) if aggregation.events else ALL_EVENTS
        value = VALUES.index(aggregation.value)
        key, length_ms = aggregation.span
        span_ms = length_ms // loops.RING if key == "window" else length_ms
        if aggregation.function == "last":
            return cls(loops.LAST_CELL, value, bits, span_ms, aggregation.n)
        return cls(loops.SKETCH_CELL if aggregation.function == "distinct" else KINDS[key], value, bits, span_ms)

    def list_fields(self, with_sums: bool) -> list[tuple[str, str, int]]:
        """Return (name, type, count) of each field. Every field fills whole words of 8 bytes."""
        if self.kind == loops.RING_CELL:
            return [("newest", "i8", 1), ("counts", "i4", loops.RING), *([("sums", "f8", loops.RING)] if with_sums else [])]
        if self.kind == loops.DECAY_CELL:
            return [("time_ms", "i8", 1), ("count", "f8", 1), ("sum", "f8", 1)]
        if self.kind == loops.SESSION_CELL:
            return [("first_ms", "i8", 1), ("latest_ms", "i8", 1), ("count", "i8", 1), ("sum", "f8", 1)]
        if self.kind == loops.LAST_CELL:
            return [("n_held", "i8", 1), ("times_ms", "i8", self.length), ("values", "f8", self.length)]
        return [("buckets", "i4", loops.SLOTS)]


class Layout(NamedTuple):
    """dtype: of a record; cells, reads: the program of `loops.py`, int64 [n_cells, CELL_WIDTH] and int64 [F, 3]"""

    dtype: np.dtype
    cells: np.ndarray
    reads: np.ndarray


def lay_out(aggregations: Sequence[Aggregation], event_names: Sequence[str]) -> Layout:
    """Return the layout for the aggregations of one entity."""
    wanted = [Cell.of(aggregation, event_names) for aggregation in aggregations]
    cells = list(dict.fromkeys(wanted))
    summed = {cell for cell, aggregation in zip(wanted, aggregations, strict=True) if aggregation.function in ("sum", "mean")}
    fields: list[tuple[str, np.dtype, int]] = [("newest_ms", np.dtype("i8"), 0)]
    program, word = [], 1
    for number, cell in enumerate(cells):
        starts = {}
        for name, kind, count in cell.list_fields(cell in summed):
            dtype = np.dtype((kind, (count,))) if count > 1 else np.dtype(kind)
            fields.append((f"cell{number}_{name}", dtype, 8 * word))
            starts[name] = word
            word += -(-dtype.itemsize // 8)
        first_words = (min(starts.values()), starts.get("sums", -1))
        program.append((cell.kind, cell.value, cell.events, cell.span_ms, *first_words, cell.length))
    names, formats, offsets = zip(*fields, strict=True)
    dtype = np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": 8 * word})
    reads = [
        (cells.index(cell), FUNCTIONS.index(aggregation.function), place)
        for cell, aggregation in zip(wanted, aggregations, strict=True)
        for place in range(len(aggregation.feature_names))
    ]
    return Layout(dtype, np.array(program, np.int64), np.array(reads, np.int64))
