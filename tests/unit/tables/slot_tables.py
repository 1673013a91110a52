"""Tables of rows in memory, complete or cached, for tests that read and write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.tables.store.cached_table import CachedTable
from serving.tables.store.complete_table import CompleteTable
from serving.tables.store.memory import PrivateBlock, SharedBlock
from serving.tables.store.row_formats import RowCodec

Table = CompleteTable | CachedTable


def make_table(kind: str, codec: RowCodec, size: int, path: Path | None = None) -> tuple[Table, dict[str, np.ndarray]]:
    """Return an empty table, and the arrays of its memory by name.

    size: the keys of a complete table, 0 … size - 1, or the capacity of a cached one; path: of memory that processes share
    """
    make: type[Table] = CompleteTable if kind == "complete" else CachedTable
    sections = make.make_sections(size, codec)

    def initialise(view: memoryview) -> None:
        if kind == "complete":
            CompleteTable.initialise(view, size, codec)
        else:
            CachedTable.initialise(view, sections)

    block: SharedBlock | PrivateBlock
    if path is not None:
        block = SharedBlock(path, sections.nbytes, initialise)
    else:
        block = PrivateBlock(sections.nbytes)
        initialise(block.view)
    return make(block, sections, codec, block.view), {name: sections.view_array(block.view, name) for name in sections.specs}
