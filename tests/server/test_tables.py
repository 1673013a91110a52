"""The embedding tables behind a real server: what its metrics port tells of them, and rows that change while it serves."""

from __future__ import annotations

import json
import re
import shutil
import time
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from export.settings import RankerChoice, TableSettings
from export.tables import write_tables
from server import supervisor, updaters
from server.health import is_ready
from server.launcher import TritonServer
from serving.contract.artifacts import MANIFEST_FILE, write_manifest
from serving.contract.errors import ServerError
from serving.pipeline import Pipeline
from serving.tables.config import LevelsConfig, read_config
from serving.tables.store.table import shared_root
from serving.tables.updates.publisher import Publisher
from tests.server.requests import infer
from tests.unit.small_shops import export, shop
from tests.waiting import until
from training.models.cold_rows import ColdRows

USERS = list(range(8))
REPORT_EVERY_S = 1.0  # of serving/stages/adapter/triton.py, which only a server can import
VISIBLE_WITHIN_S = 30.0  # far more than it takes: this machine may be busy


def table_metrics(server: TritonServer) -> dict[tuple[str, ...], float]:
    """{(name, labels but instance and version, …): value}"""
    text, found = urllib.request.urlopen(server.metrics_url, timeout=5).read().decode(), {}
    for name, labels, value in re.findall(r"^recommender_table_(\w+){(.*)} (\S+)$", text, re.MULTILINE):
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert own.pop("instance") == "rank_0_0"
        assert own.pop("version")
        found[(name, *(own[label] for label in sorted(own)))] = float(value)
    return found


def settled(server: TritonServer) -> dict[tuple[str, ...], float]:
    """The metrics once they have caught up with what was asked so far."""
    until(lambda: bool(table_metrics(server)))
    while True:
        before = table_metrics(server)
        time.sleep(2.5 * REPORT_EVERY_S)
        if table_metrics(server) == before:
            return before


def test_the_metrics_port_tells_of_every_table(server, client, repository, info):
    names = [table.name for table in settings_of(repository, info.generation).tables]
    answered = {name: ("rows_total", "l2", name) for name in names}
    before = settled(server)
    infer(client, user_id=USERS)
    until(lambda: table_metrics(server).get(answered["user_0"], 0) - before.get(answered["user_0"], 0) == len(USERS))
    now = settled(server)  # a page may be read in the middle of a report
    new = {name: now[key] - before.get(key, 0) for name, key in answered.items()}
    assert {new[name] for name in names if name.startswith("user_")} == {len(USERS)}
    assert {new[name] for name in names if name.startswith("item_")} == {len(USERS) * info.axes.candidates}
    others = [("rows_total", answer, name) for answer in ("perhaps_old", "default_late", "default_unknown") for name in names]
    assert [now[key] - before.get(key, 0) for key in others] == [0] * len(others)
    assert 0.99 < now[("hit_rate_overall",)] <= 1  # requests may have come before memory was filled
    assert all(now["resident_rows", "l2", name] > 0 and now["resident_bytes", "l2", name] > 0 for name in names)
    assert now["level_down", "shared memory"] == 0


# --- live updates -------------------------------------------------------------------------------------------------------------
def settings_of(repository: Path, generation: int) -> LevelsConfig:
    return read_config(repository / "rank" / str(generation) / "tables" / "levels.json")


@pytest.fixture
def live(repository, info, tmp_path, broker) -> Path:
    """The same models, their tables with an update source, and rows that no other repository has."""
    copy = tmp_path / "live"
    shutil.copytree(repository, copy)
    tables = TableSettings(brokers=broker.address, state=str(tmp_path / "state"))
    return with_tables(copy, info.generation, tables, own_rows=True)


def with_tables(repository: Path, generation: int, tables: TableSettings, own_rows: bool = False) -> Path:
    """The same models behind other levels. own_rows: rows that no other repository has, so that nothing is shared with one."""
    folder = repository / "rank" / str(generation)
    if own_rows:
        padding = np.load(folder / "tables" / "user_0.npy")
        padding[0] = np.random.default_rng().random(padding.shape[1])
        np.save(folder / "tables" / "user_0.npy", padding)
    write_tables(folder / "tables", tables, 1, 1024)
    facts = json.loads((folder / MANIFEST_FILE).read_text())
    write_manifest(folder, stage="rank", generation=facts["generation"])
    return repository


def test_a_published_row_changes_what_is_served(live, launch, broker, info):
    config = settings_of(live, info.generation)
    items = next(table for table in config.tables if table.name == "item_0")
    publisher = Publisher(broker.address, config.model, {table.name: table.width for table in config.tables})
    server = launch(live)
    assert len(updaters.updaters(server.state.tag)) == 2  # with its supervisor
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        before = infer(client, user_id=USERS)
        rows = np.random.default_rng(0).standard_normal((items.rows, items.width), dtype=np.float32)
        publisher.publish("item_0", np.arange(items.rows), rows)
        publisher.flush()
        acknowledged_s = time.monotonic()
        until(lambda: not np.array_equal(infer(client, user_id=USERS)["scores"], before["scores"]), VISIBLE_WITHIN_S)
        visible_s = time.monotonic() - acknowledged_s
        until(lambda: table_metrics(server).get(("updates_applied", "item_0")) == items.rows)
        after = infer(client, user_id=USERS)
    assert (after["degraded"] == 0).all()
    assert visible_s < VISIBLE_WITHIN_S
    metrics = table_metrics(server)
    assert 0 < metrics["update_lag_seconds", "item_0"] < VISIBLE_WITHIN_S
    assert metrics["broker_down", "item_0"] == metrics["updates_rejected", "item_0"] == 0

    pipeline = Pipeline.load(live)  # another process of the machine sees the same rows
    np.testing.assert_allclose(pipeline.recommend(USERS)["scores"], after["scores"], atol=1e-5)
    pipeline.close()

    tag = server.state.tag
    server.stop()
    assert updaters.updaters(tag) == []
    assert not (shared_root(config) / f"embedding-tables-{config.arena}").exists()

    again = launch(live)  # what was acknowledged survives: it is in RocksDB
    with grpcclient.InferenceServerClient(again.grpc_url) as client:
        np.testing.assert_array_equal(infer(client, user_id=USERS)["scores"], after["scores"])


def test_a_killed_updater_is_started_again_and_loses_nothing(live, launch, broker, info):
    """Rows acknowledged before, while it was dead, and after."""
    config = settings_of(live, info.generation)
    items = next(table for table in config.tables if table.name == "item_0")
    publisher = Publisher(broker.address, config.model, {table.name: table.width for table in config.tables})
    server = launch(live)

    def publish(part: int) -> None:
        keys = np.arange(part, items.rows, 3)
        publisher.publish("item_0", keys, rows[keys])
        publisher.flush()

    def served() -> bool:
        return np.array_equal(pipeline.stages["rank"].tables.lookup("item_0", np.arange(items.rows)), rows)

    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        before = infer(client, user_id=USERS)
        pipeline = Pipeline.load(live)  # another process of the machine
        rows = np.random.default_rng(0).standard_normal((items.rows, items.width), dtype=np.float32)
        publish(0)
        (updater,) = (p for p in updaters.updaters(server.state.tag) if supervisor.__name__ not in p.cmdline())
        updater.kill()
        publish(1)
        seen_s = time.time()
        until(lambda: table_metrics(server).get(("updater_seen_timestamp_seconds", "item_0"), 0) > seen_s)
        publish(2)
        until(served)
        after = infer(client, user_id=USERS)
        np.testing.assert_allclose(pipeline.recommend(USERS)["scores"], after["scores"], atol=1e-5)
    assert not np.array_equal(after["scores"], before["scores"])
    assert (after["degraded"] == 0).all()
    pipeline.close()


def test_narrow_rows_are_served_and_updated(launch, broker, tmp_path, monkeypatch):
    """A shop whose cold rows are 3 wide: the server answers as a pipeline in process, also after an update of these rows."""
    monkeypatch.setattr(RankerChoice, "cold", ColdRows(3, 0.4, least_rows=10))
    tables = {"brokers": broker.address, "state": str(tmp_path / "state")}
    repository = export(tmp_path, shop(tmp_path / "data", users=12, items=30, events=60), tables=tables)
    config = settings_of(repository, 1)
    cold = next(table for table in config.tables if table.name == "item_0-cold")
    assert cold.width == 3
    publisher = Publisher(broker.address, config.model, {table.name: table.width for table in config.tables})
    server, pipeline = launch(repository), Pipeline.load(repository)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        before = infer(client, user_id=USERS)
        np.testing.assert_allclose(before["scores"], pipeline.recommend(USERS)["scores"], atol=1e-5)
        publisher.publish(cold.name, np.arange(cold.rows), np.full((cold.rows, 3), 5, np.float32))
        publisher.flush()
        until(lambda: table_metrics(server).get(("updates_applied", cold.name)) == cold.rows)
        after = infer(client, user_id=USERS)
        np.testing.assert_allclose(after["scores"], pipeline.recommend(USERS)["scores"], atol=1e-5)
    pipeline.close()
    assert not np.array_equal(after["scores"], before["scores"])
    assert (after["degraded"] == 0).all()


def test_a_source_that_cannot_be_followed_is_told_and_costs_no_answer(live, run_dir, info):
    (live / "rank" / str(info.generation) / "serving" / "tables" / "updates" / "updater.py").write_text(
        "raise RuntimeError('cut short')"
    )
    write_manifest(live / "rank" / str(info.generation), stage="rank", generation=info.generation)
    server = TritonServer(live, run_dir=run_dir)
    try:
        with pytest.raises(ServerError, match=r"RuntimeError: cut short The server answers without updates.*tried again"):
            server.start()
        assert is_ready(server.grpc_url)
        assert updaters.updaters(server.state.tag)  # the supervisor, at least
    finally:
        server.stop()


def test_without_a_source_there_is_no_updater(server):
    assert updaters.updaters(server.state.tag) == []
