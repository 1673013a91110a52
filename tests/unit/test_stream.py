"""Rows learned from new events: only what they touch moves, what they show becomes likelier, and the servers' rows follow."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from export.build import build_repository
from export.settings import RankerChoice, Settings
from export.stream import RESERVED_ROWS, LatestRows, StreamSettings, batch_of, learn, network_of, source_of, stream_updates
from serving.contract.errors import ConfigError, ExportError
from serving.pipeline import Pipeline
from serving.stages.rank import TABLES_FOLDER
from serving.tables.store.mixed_widths import cold_table
from serving.tables.store.tables import EmbeddingTables
from tests.unit.tables.kafka_broker import MockBroker
from tests.unit.tables.updating import updating
from training.dataset import load_dataset, split_by_time
from training.models.cold_rows import ColdRows

STEPS = StreamSettings()


@pytest.fixture(scope="module", params=[0, 3], ids=["rows of one width", "of two widths"])
def exported(request, tmp_path_factory) -> Iterator[SimpleNamespace]:
    """A repository of the earlier part of a log, with an update source; the later part; the pipeline and its network."""
    folder, broker = tmp_path_factory.mktemp("stream"), MockBroker()
    dataset = load_dataset("synthetic:users=120,items=80,events=3000,seed=5")
    train, later = split_by_time(dataset.interactions)
    tables = {"brokers": broker.address, "state": str(folder / "state")}
    sections = {"ranker": {"width": 16, "cold_width": request.param}, "pipeline": {"candidates": 64, "recorded_requests": 64}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankerChoice, "cold", ColdRows(request.param, 0.3, least_rows=50) if request.param else None)
        settings = Settings.model_validate({"tables": tables, **sections})
        build_repository(replace(dataset, interactions=train), folder / "repository", settings, Console(quiet=True))
    pipeline = Pipeline.load(folder / "repository")
    yield SimpleNamespace(
        repository=folder / "repository",
        later=later,
        pipeline=pipeline,
        network=network_of(pipeline, folder / "repository"),
        batch=batch_of(pipeline, later, later["user_id"].unique()),
        published=EmbeddingTables.load(folder / "repository" / "rank" / "1" / TABLES_FOLDER).tables,
    )
    pipeline.close()
    broker.stop()


def test_the_published_layers_are_the_network_that_serves(exported):
    rank, batch = exported.pipeline.stages["rank"], exported.batch
    user_keys, item_keys = (
        np.stack([batch.keys[name] for name in names], axis=-1)
        for names in (rank.settings.user_tables, rank.settings.item_tables)
    )
    wanted = (rank.settings.user_tables, user_keys), (rank.settings.item_tables, item_keys)
    user_rows, item_rows = rank.widths.gather(rank.tables, *wanted)
    feeds = {
        "user_numbers": batch.user_numbers.numpy(),
        "user_rows": user_rows,
        "pair_numbers": batch.pair_numbers.numpy(),
        "item_rows": item_rows,
    }
    (served,) = rank.network.run(["logits"], feeds)
    with torch.no_grad():
        logits = exported.network(*(torch.from_numpy(values) for values in feeds.values()))
    np.testing.assert_allclose(logits.numpy(), served, atol=1e-4)


def learned_from(exported, batch, settings=STEPS, latest=None):
    rank = exported.pipeline.stages["rank"]
    return learn(rank, exported.network, batch, latest or LatestRows(rank.tables), settings)


def test_rows_on_their_way_are_learned_on(exported):
    """A second batch with the same items begins where the first one ended, whether or not that is visible yet."""
    latest = LatestRows(exported.pipeline.stages["rank"].tables)
    first, (_, ended) = learned_from(exported, exported.batch, latest=latest)
    for name, (keys, rows) in first.items():
        latest.set(name, keys, rows)
    _, (began, _) = learned_from(exported, exported.batch, latest=latest)
    assert began == pytest.approx(ended)


def test_only_rows_of_the_requests_move_and_what_was_taken_becomes_likelier(exported):
    learned, (before, after) = learned_from(exported, exported.batch)
    first_cold = exported.pipeline.stages["rank"].settings.first_cold
    assert after < before
    assert any(name.startswith("user_") for name in learned)
    assert any(name.startswith("item_") for name in learned)
    assert any(name in map(cold_table, first_cold) for name in learned) == bool(first_cold)
    firsts = dict.fromkeys(exported.published, 0) | {cold_table(name): first for name, first in first_cold.items()}
    for name, (keys, rows) in learned.items():
        whole = keys + firsts[name]
        assert whole.min() >= RESERVED_ROWS
        assert np.isin(whole, exported.batch.keys[name.removesuffix("-cold")]).all()
        assert rows.shape[1] == exported.published[name].shape[1]
        assert (rows != exported.published[name][keys]).any(axis=1).all()


def test_nothing_is_published_of_steps_that_diverge(exported):
    with pytest.raises(ExportError, match="Lower the learning rate"):
        learned_from(exported, exported.batch, replace(STEPS, learning_rate=1e30))


def test_a_generation_without_an_update_source_is_refused():
    with pytest.raises(ConfigError, match="no update source"):
        source_of(None)


def test_from_events_to_served_rows(exported):
    tables = exported.pipeline.stages["rank"].tables
    users = exported.later["user_id"].unique()[:20]
    before = exported.pipeline.recommend(users)["scores"]
    with updating(tables.config):
        streamed = stream_updates(exported.repository, exported.later, 0, STEPS, lambda text: None)
        applied = sum(streamed.rows.values())
        deadline = time.monotonic() + 30
        while sum(t.updater.rows_applied for t in tables.metrics().tables.values()) < applied:
            assert time.monotonic() < deadline, "did not happen in time"
            time.sleep(0.01)
    assert streamed.requests == len(exported.batch.taken)
    assert streamed.loss[1] < streamed.loss[0]
    assert streamed.last_event_s == exported.later.loc[exported.later["positive"], "timestamp"].max()
    moved = {
        name: (tables.lookup(name, np.arange(len(rows))) != rows).any(axis=1).sum() for name, rows in exported.published.items()
    }
    assert moved == streamed.rows
    after = exported.pipeline.recommend(users)
    assert (after["scores"] != before).any()
    assert (after["degraded"] == 0).all()

    again = stream_updates(exported.repository, exported.later, streamed.last_event_s, STEPS, lambda text: None)
    assert (again.events, again.requests, sum(again.rows.values())) == (0, 0, 0)
    assert again.last_event_s == streamed.last_event_s
