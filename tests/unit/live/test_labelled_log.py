"""Aggregations of a log with labels: training, the export's records and live events count the same rows, the positive ones."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pandas as pd
import pytest

from export.continuous.prequential import make_event_inputs
from export.steps.live import make_event_kinds
from serving.live.admission import EventAdmission
from serving.live.aggregations import parse_aggregations
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import scale_aggregates
from serving.stages.live.counts.trends import ItemTrends
from tests.present import present
from training.dataset import Dataset, load_dataset
from training.features.aggregates import LogAggregates
from training.features.trends import write_trends

N_ITEMS, N_EVENTS, N_KNOWN, START_S = 12, 400, 300, 1_600_000_000
SOLD: dict[str, object] = {"entity": "item", "value": "count", "function": "count", "window": "90d"}
TOML = """
name = "labelled"
[interactions]
path = "events.csv"
user_id = "user"
item_id = "item"
timestamp = "time"
label = "label"
[events.view]
weight = 0.1
[events.purchase]
positive = true
"""


@pytest.fixture
def dataset(tmp_path) -> Dataset:
    """Return a log of an event an hour, of which four fifths are views: their label is 0, that of purchases 1."""
    rng, folder = np.random.default_rng(5), tmp_path / "data"
    folder.mkdir()
    columns = {"user": rng.integers(0, 20, N_EVENTS), "item": rng.integers(0, N_ITEMS, N_EVENTS)}
    columns |= {"time": START_S + 3_600 * np.arange(N_EVENTS), "label": (rng.random(N_EVENTS) < 0.2).astype(int)}
    pd.DataFrame(columns).to_csv(folder / "events.csv", index=False)
    (folder / "dataset.toml").write_text(TOML)
    return load_dataset(folder)


def count_purchases(log: pd.DataFrame) -> np.ndarray:
    """Return int64 [N_ITEMS]."""
    return np.bincount(log["item_id"][log["label"] == 1], minlength=N_ITEMS)


def test_training_records_and_live_events_count_purchases_alone(dataset, tmp_path):
    log, folder = dataset.interactions, tmp_path / "rank"
    tables = (SOLD | {"name": "of_purchases", "events": ["purchase"]}, SOLD | {"name": "of_all"})
    declared = parse_aggregations(tables, [], dataset.description.event_names)
    known, whole = (LogAggregates.of(dataset, part, declared) for part in (log.iloc[:N_KNOWN], log))
    folder.mkdir()
    write_trends(folder, dataset, known, 0)
    items, as_of_s = ItemIndex(whole.item_ids[:-1]), int(log["timestamp"].iloc[N_KNOWN - 1])
    trends = present(ItemTrends.load(folder, items, np.zeros((N_ITEMS + 1, 2), np.float32), as_of_s))
    (followed,) = trends.entities
    positions = np.arange(N_ITEMS)

    def check(part: pd.DataFrame) -> None:
        last_s, expected = int(part["timestamp"].iloc[-1]), np.stack([count_purchases(part)] * 2, axis=1)
        np.testing.assert_array_equal(followed.read(positions, 1_000 * last_s), expected)
        (trained,) = whole.compute_for_items(positions[None], np.array([last_s]), np.array([len(part)]))
        np.testing.assert_array_equal(trained, scale_aggregates(expected.astype(np.float32)))

    check(log.iloc[:N_KNOWN])
    kinds = make_event_kinds(dataset.description)
    inputs = make_event_inputs(dataset, np.arange(N_KNOWN, N_EVENTS))
    inputs["event"] = np.where(inputs["value"] == 1, b"purchase", b"view").astype(object)
    with closing(Writer(tmp_path / "live", Layout(), kinds.names)) as writer, closing(Reader(tmp_path / "live")) as reader:
        writer.append(EventAdmission(kinds).make_events(inputs, writer.codes, writer.now_ms()))
        with reader.snapshot() as snapshot:
            trends.follow(snapshot, snapshot.read_progress(), snapshot.read_headers_since(0), 0)
    check(log)
    at_end = whole.compute_for_catalogue(int(log["timestamp"].iloc[-1]))[:N_ITEMS]
    np.testing.assert_array_equal(at_end, scale_aggregates(followed.read(positions, 1_000 * int(log["timestamp"].iloc[-1]))))
