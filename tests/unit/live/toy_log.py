"""A small log, of which a part comes as live events after the export."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd

from serving.live.events import HEADER, ITEM_CHANGED, EventBatch, Flags
from serving.live.layout import Layout
from serving.live.writer import Writer, WriterSettings
from tests.unit.live.batches import change
from training.dataset import Dataset, load_dataset

HOUR_S, START_S, N_ITEMS, N_EVENTS = 3_600, 1_600_000_000, 40, 600
N_KNOWN = 400  # events before the export
DAY_S = 24 * HOUR_S
USERS = np.arange(22)  # 20 before the export; one comes after it (`add_newcomer`), the last one never
TOML = """
name = "toy"
[interactions]
path = "events.csv"
user_id = "user"
item_id = "item"
timestamp = "time"
weight = "quantity"
[items]
path = "items.csv"
item_id = "item"
category = "kind"
price = "price"
"""


def load_toy(folder: Path) -> Dataset:
    """Return a log with an event an hour. Item i * 10 costs i and is of one of three kinds, the last item of none."""
    rng = np.random.default_rng(3)
    folder.mkdir()
    (folder / "dataset.toml").write_text(TOML)
    events = {"user": rng.integers(0, 20, N_EVENTS), "item": 10 * rng.integers(0, N_ITEMS, N_EVENTS)}
    events |= {"time": START_S + HOUR_S * np.arange(N_EVENTS), "quantity": rng.integers(1, 5, N_EVENTS)}
    pd.DataFrame(events).to_csv(folder / "events.csv", index=False)
    items = {"item": 10 * np.arange(N_ITEMS), "kind": [f"kind {item % 3}" for item in range(N_ITEMS - 1)] + [None]}
    pd.DataFrame(items | {"price": np.arange(N_ITEMS)}).to_csv(folder / "items.csv", index=False)
    return load_dataset(folder)


def add_newcomer(log: pd.DataFrame) -> pd.DataFrame:
    """Return a copy of the log in which user 20 has events, all after the export."""
    log = log.copy()
    log.loc[log.index[N_KNOWN::9], "user_id"] = 20
    return log


def write(folder: Path, log: pd.DataFrame, flags: Flags | np.ndarray = Flags.POSITIVE | Flags.COUNTED) -> None:
    """Append rows of a log to the live store as it appends events. flags: one for all, or one for each"""
    headers = np.zeros(len(log), HEADER)
    headers["flags"], headers["label"] = flags, np.nan
    headers["user_id"], headers["item_id"], headers["weight"] = log["user_id"], log["item_id"], log["weight"]
    headers["time_ms"] = log["timestamp"] * 1_000
    nothing = [b""] * len(headers)
    append(folder, EventBatch(headers, nothing, nothing, nothing))


def change_item(folder: Path, item: int, **columns: object) -> None:
    """Append a change of an item as `upsert` does."""
    append(folder, change(ITEM_CHANGED, item, **columns))


def append(folder: Path, batch: EventBatch) -> None:
    with closing(Writer(folder, Layout(), ("purchase",), settings=WriterSettings(lateness_s=0))) as writer:
        writer.append(batch)
