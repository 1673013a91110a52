"""Users' and items' raw features, the NVTabular workflow of each side, and what it makes of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd

from training.dataset import Dataset
from training.features.quiet_nvtabular import Dataset as NvtDataset
from training.features.quiet_nvtabular import Workflow, ops


@dataclass(frozen=True)
class Side:
    """One side's columns. frame: the ids ascending, int64 codes (0 = missing), float32 numbers with gaps (NaN)."""

    id: str
    categorical: tuple[str, ...]  # without the id, which is categorical too
    continuous: tuple[str, ...]
    frame: pd.DataFrame

    @property
    def encoded(self) -> tuple[str, ...]:
        """Columns that NVTabular gives integers to: a table of embeddings each."""
        return (self.id, *self.categorical)

    @property
    def raw_id(self) -> str:
        return f"{self.id}_raw"


def read_sides(dataset: Dataset) -> tuple[Side, Side]:
    """-> users and items. Of synthetic data: 5 + 6 categorical columns with the ids, 3 + 2 continuous ones."""
    users, items = dataset.description.users, dataset.description.items
    return (
        _side("user_id", tuple(users.categorical), tuple(users.continuous), dataset.users),
        _side("item_id", tuple(items.categorical), tuple(items.continuous), dataset.items),
    )


def _side(id: str, categorical: tuple[str, ...], continuous: tuple[str, ...], frame: pd.DataFrame) -> Side:
    frame = frame.sort_values(id, ignore_index=True)
    columns = {id: frame[id].to_numpy(np.int64)}
    columns |= {name: pd.factorize(frame[name])[0].astype(np.int64) + 1 for name in categorical}
    columns |= {name: frame[name].to_numpy(np.float32) for name in continuous}
    return Side(id, categorical, continuous, pd.DataFrame(columns))


def fit_workflow(side: Side, folder: Path) -> Workflow:
    """Categorify per categorical column; FillMissing, LogOp, Normalize per number; the raw id is kept beside its code.

    folder: where Categorify keeps its vocabularies; must live as long as the workflow
    """
    output = list(side.encoded) >> ops.Categorify(out_path=str(folder))
    output += list(side.continuous) >> ops.FillMissing() >> ops.LogOp() >> ops.Normalize(out_dtype=np.float32)
    output += [side.id] >> ops.Rename(name=side.raw_id)
    workflow = Workflow(output)
    workflow.fit(NvtDataset(side.frame, cpu=True))
    return workflow


def encode(side: Side, workflow: Workflow) -> dict[str, np.ndarray]:
    """-> what the workflow makes of every row, by column, each [N]: int64 codes, float32 numbers, the raw ids."""
    frame = workflow.transform(NvtDataset(side.frame, cpu=True)).to_ddf().compute()
    columns = {name: frame[name].to_numpy(np.int64) for name in (*side.encoded, side.raw_id)}
    return columns | {name: frame[name].to_numpy(np.float32) for name in side.continuous}
