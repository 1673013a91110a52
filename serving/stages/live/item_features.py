"""Features of new and changed items: `upsert`'s columns encoded as the exported catalogue was, by the same plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.contract.artifacts import writable
from serving.contract.tensors import MISSING_INT
from serving.stages.features.encode import CategoryColumn, NumberColumn, Plan
from serving.stages.features.user_state import raw_name
from serving.stages.live.users import parse_whole_number

FOLDER = "item_plan"
FIRST_SLOT = 1  # slot 0 is the item's own id
NEVER_SOLD = {"item_event_count": 0.0}  # statistics of an item without sales; others are missing


@dataclass(frozen=True)
class ItemFeatures:
    """rows: int32 [n_items + 1, Si]; numbers: float32 [n_items + 1, Gi], whose first columns are those of the plan"""

    plan: Plan
    rows: np.ndarray
    numbers: np.ndarray

    @cached_property
    def _columns(self) -> list[tuple[np.ndarray, int, str, Plan]]:
        """Return each column's array, place in it, source, and a plan of it alone."""
        return [*self._categories(), *self._numbers()]

    def _categories(self) -> Iterator[tuple[np.ndarray, int, str, Plan]]:
        for slot, column in enumerate(self.plan.categorical):
            if slot >= FIRST_SLOT and column.kind != "hash":
                vocabularies = {name: own for name, own in self.plan.vocabularies.items() if name == column.name}
                yield writable(self.rows), slot, column.source, Plan((column,), (), (), vocabularies)

    def _numbers(self) -> Iterator[tuple[np.ndarray, int, str, Plan]]:
        for place, column in enumerate(self.plan.continuous):
            yield writable(self.numbers), place, column.source, Plan((), (column,))

    def begin(self, position: int) -> None:
        """Describe a new item of which nothing is known, and which was never sold."""
        for array, place, source, plan in self._columns:
            array[position, place] = encoded(plan, source, NEVER_SOLD.get(source))

    def change(self, position: int, columns: Mapping[str, object]) -> None:
        """Let columns of an item take effect; those that are no feature are ignored. Lists stay as they were exported."""
        sources = {raw_name("catalogue", name): value for name, value in columns.items()}
        for array, place, source, plan in self._columns:
            if source in sources:
                array[position, place] = encoded(plan, source, sources[source])


def encoded(plan: Plan, source: str, value: object) -> np.ndarray:
    """Return one value as the plan of its column encodes it, [1]; None is missing."""
    read: tuple[CategoryColumn | NumberColumn, ...] = (*plan.categorical, *plan.continuous)
    kind = getattr(read[0], "kind", "number")
    if kind == "strings":
        column = np.array([value], object)
    elif kind == "integers":
        column = np.array([MISSING_INT if value is None else parse_whole_number(value)])
    else:
        column = np.array([value if isinstance(value, int | float) else np.nan], np.float64)
    done = plan({source: column})
    return (done.categorical if plan.categorical else done.continuous)[0, 0]
