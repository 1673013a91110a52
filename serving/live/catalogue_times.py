"""Choose between a generation's catalogue and what `upsert` set: of each column, the later value counts.

The item file says when its rows were changed (`[items] updated_at`). Each generation publishes these times. So an older
generation that is served again still uses what was set after its own catalogue.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_checked_array, read_json
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Change

FILE = "item_updates"


@dataclass(frozen=True)
class CatalogueTimes:
    """When the rows of a catalogue were last changed.

    item_ids   int64 [N], of the rows that say so, ascending
    updated_s  int64 [N], unix seconds
    columns    names under which `upsert` sets what the rows hold; others, it alone sets
    """

    item_ids: np.ndarray
    updated_s: np.ndarray
    columns: frozenset[str]

    def drop_older(self, changes: Iterable[Change]) -> list[Change]:
        """Return changes without what the catalogue's rows replace, and without items of which nothing is left.

        A column counts that was set in the second of the row's change, or later.
        """
        newer_changes = (self._drop_older(change) if change.type == ITEM_CHANGED else change for change in changes)
        return [change for change in newer_changes if change.columns]

    def _drop_older(self, change: Change) -> Change:
        row = int(np.searchsorted(self.item_ids, change.id))
        if row == len(self.item_ids) or self.item_ids[row] != change.id:
            return change
        replaced = self.columns.intersection(change.find_older(1_000 * int(self.updated_s[row])))
        return change._replace(columns={name: value for name, value in change.columns.items() if name not in replaced})

    def save(self, folder: Path) -> None:
        """Write the times into a stage's folder."""
        np.save(folder / f"{FILE}.npy", np.stack([self.item_ids, self.updated_s]))
        (folder / f"{FILE}.json").write_text(json.dumps({"columns": sorted(self.columns)}))

    @classmethod
    def load(cls, folder: Path) -> CatalogueTimes | None:
        """Read the times from a stage's folder; None where the catalogue has none. Raises ArtifactError."""
        if not (folder / f"{FILE}.json").exists():
            return None
        columns = read_json(folder, f"{FILE}.json")["columns"]
        item_ids, updated_s = open_checked_array(folder, FILE, "int64", 2, None)
        return cls(item_ids, updated_s, frozenset(columns))
