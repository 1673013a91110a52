"""Which rows of a table are narrow: ids are numbered by falling frequency, so the cold ones are those from some row on."""

from __future__ import annotations

from dataclasses import dataclass

from serving.contract.tensors import OOV_ROW


@dataclass(frozen=True)
class ColdRows:
    """Rows of large tables that few requests ask for. They are stored narrow, and widened by a projection learned per table."""

    width: int = 4  # W
    hot_share: float = 0.1  # of a table's rows that are as wide as the network reads them
    least_rows: int = 1_000  # a table with fewer has no cold rows: there is nothing to gain

    def first(self, rows: int) -> int:
        """The first cold row of a table, or `rows` where it has none. What speaks for many values is hot."""
        return rows if rows < self.least_rows else max(round(self.hot_share * rows), OOV_ROW + 1)
