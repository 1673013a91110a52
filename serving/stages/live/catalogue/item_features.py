"""Encode the features of new and changed items from `upsert`'s columns, with the plan that encoded the exported catalogue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.contract.artifacts import view_writable
from serving.contract.tensors import MISSING_INT
from serving.stages.features.encode import CategoryColumn, NumberColumn, Plan
from serving.stages.features.user_state import name_raw_column
from serving.stages.live.content import get_text
from serving.stages.live.users.live_users import parse_whole_number

FOLDER = "item_plan"
FIRST_SLOT = 1  # slot 0 is the item's own id
NEVER_SOLD = {"item_event_count": 0.0}  # statistics of an item without sales; all others are missing


@dataclass(frozen=True)
class ItemFeatures:
    """Writes items' features into the ranker's arrays.

    rows: int32 [n_items + 1, Si] category rows; numbers: float32 [n_items + 1, Gi], whose first columns are the plan's
    """

    plan: Plan
    rows: np.ndarray
    numbers: np.ndarray

    @cached_property
    def _columns(self) -> list[tuple[np.ndarray, int, str, Plan]]:
        """(array, column in it, name of the source column, plan of this column alone) of each feature column."""
        return [*self._list_categories(), *self._list_numbers()]

    def compile_loops(self) -> ItemFeatures:
        """Run the compiled loops once, so that no request waits for them to be compiled. Return itself."""
        for _, _, source, plan in self._columns:
            encode_value(plan, source, None)
        return self

    def _list_categories(self) -> Iterator[tuple[np.ndarray, int, str, Plan]]:
        for slot, column in enumerate(self.plan.categorical):
            if slot >= FIRST_SLOT and column.kind != "hash":
                vocabularies = {name: values for name, values in self.plan.vocabularies.items() if name == column.name}
                yield view_writable(self.rows), slot, column.source, Plan((column,), (), (), vocabularies)

    def _list_numbers(self) -> Iterator[tuple[np.ndarray, int, str, Plan]]:
        for place, column in enumerate(self.plan.continuous):
            yield view_writable(self.numbers), place, column.source, Plan((), (column,))

    def begin(self, position: int) -> None:
        """Write the features of a new item without known columns and without sales. position: of the item"""
        for array, place, source, plan in self._columns:
            array[position, place] = encode_value(plan, source, NEVER_SOLD.get(source))

    def change(self, position: int, columns: Mapping[str, object]) -> None:
        """Write the features of an item's changed columns; others are ignored. Lists keep their exported values."""
        sources = {name_raw_column("catalogue", name): value for name, value in columns.items()}
        for array, place, source, plan in self._columns:
            if source in sources:
                array[position, place] = encode_value(plan, source, sources[source])


def encode_value(plan: Plan, source: str, value: object) -> np.ndarray:
    """Return one value as its column's plan encodes it, a scalar. plan: of one column

    A value that is None or of another type than the column is missing.
    """
    columns: tuple[CategoryColumn | NumberColumn, ...] = (*plan.categorical, *plan.continuous)
    kind = getattr(columns[0], "kind", "number")
    if kind == "strings":
        column = np.array([get_text(value)], object)
    elif kind == "integers":
        column = np.array([MISSING_INT if value is None else parse_whole_number(value)])
    else:
        column = np.array([value if isinstance(value, int | float) else np.nan], np.float64)
    features = plan({source: column})
    return (features.categorical if plan.categorical else features.continuous)[0, 0]
