"""Choose the narrow rows of a table. Ids are numbered by falling frequency, so cold rows are the last ones."""

from __future__ import annotations

from dataclasses import dataclass

from serving.contract.tensors import OOV_ROW


@dataclass(frozen=True)
class ColdRows:
    """Rarely used rows of large tables, stored narrow and widened by a projection that is learned per table."""

    width: int = 4  # W
    hot_share: float = 0.1  # share of a table's rows that have the network's width
    least_rows: int = 1_000  # a smaller table has no cold rows

    def find_first(self, rows: int) -> int:
        """Return the first cold row of a table, or `rows` without any. Reserved rows are always hot."""
        return rows if rows < self.least_rows else max(round(self.hot_share * rows), OOV_ROW + 1)
