"""The embedding tables behind a real server: what its metrics port tells of them, and rows that change while it serves."""

from __future__ import annotations

import re
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from export.settings import TableSettings
from export.tables import write_tables
from perf.tune.variant import seal_again
from server import supervisor
from server.helpers.generation_helpers import UPDATER_MODULE
from server.launcher import TritonServer
from server.processes import find_running
from server.status.health import is_ready
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.tables.config import LevelsConfig, TableConfig, read_config
from serving.tables.store.table import choose_shared_root
from serving.tables.updates.publisher import Publisher
from tests.repositories import copy_small_fused_repository
from tests.server.support.requests import infer
from tests.unit.tables.kafka_broker import MockBroker
from tests.waiting import until

USERS = list(range(8))
REPORT_EVERY_S = 1.0  # of serving/stages/adapter/triton.py, which only a server can import


def table_metrics(server: TritonServer) -> dict[tuple[str, ...], float]:
    """{(name, labels but instance and version, …): value}"""
    text, found = urllib.request.urlopen(server.metrics_url, timeout=5).read().decode(), {}
    for name, labels, value in re.findall(r"^recommender_table_(\w+){(.*)} (\S+)$", text, re.MULTILINE):
        own = dict(re.findall(r'(\w+)="([^"]*)"', labels))
        assert own.pop("instance") in ("rank_0_0", "recommend_0_0")  # in one process or the other, by the layout
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
    return read_config(find_stage_folder(repository, "rank", generation) / "tables" / "levels.json")


def with_tables(repository: Path, generation: int, tables: TableSettings, own_rows: bool = False) -> Path:
    """The same models behind other levels. own_rows: rows that no other repository has, so that nothing is shared with one."""
    folder = find_stage_folder(repository, "rank", generation)
    if own_rows:
        padding = np.load(folder / "tables" / "user_0.npy")
        padding[0] = np.random.default_rng().random(padding.shape[1])
        np.save(folder / "tables" / "user_0.npy", padding)
    write_tables(folder / "tables", tables, 1, 1024)
    seal_again(repository, generation, "rank")
    return repository


@dataclass
class Live:
    """A server of the small shop whose tables follow a broker."""

    repo: Path
    server: TritonServer
    config: LevelsConfig
    publisher: Publisher
    client: grpcclient.InferenceServerClient

    def table(self, name: str) -> TableConfig:
        return next(table for table in self.config.tables if table.name == name)

    def publish(self, name: str, keys: np.ndarray, rows: np.ndarray) -> None:
        self.publisher.publish(name, keys, rows)
        self.publisher.flush()

    def applied(self, name: str) -> float:
        return table_metrics(self.server).get(("updates_applied_total", name), 0)


@pytest.fixture(scope="module")
def live(tmp_path_factory) -> Iterator[Live]:
    broker, folder = MockBroker(), tmp_path_factory.mktemp("live")
    tables = TableSettings(brokers=broker.address, state=str(folder / "state"))
    repo = with_tables(copy_small_fused_repository(folder / "repository"), 1, tables, own_rows=True)
    config = settings_of(repo, 1)
    publisher = Publisher(broker.address, config.model, {table.name: table.width for table in config.tables})
    with (
        TritonServer(repo, run_dir=folder / "run") as server,
        grpcclient.InferenceServerClient(server.grpc_url) as client,
    ):
        yield Live(repo, server, config, publisher, client)
    broker.stop()


def test_a_published_row_changes_what_is_served(live):
    assert len(find_running(live.server.state.tag, UPDATER_MODULE)) == 2  # with its supervisor
    items, before, applied = live.table("item_0"), infer(live.client, user_id=USERS), live.applied("item_0")
    rows = np.random.default_rng(0).standard_normal((items.rows, items.width), dtype=np.float32)
    live.publish("item_0", np.arange(items.rows), rows)
    until(lambda: not np.array_equal(infer(live.client, user_id=USERS)["scores"], before["scores"]))
    until(lambda: live.applied("item_0") == applied + items.rows)
    after = infer(live.client, user_id=USERS)
    assert (after["degraded"] == 0).all()
    metrics = table_metrics(live.server)
    assert metrics["update_lag_seconds", "item_0"] > 0
    assert metrics["broker_down", "item_0"] == metrics["updates_rejected_total", "item_0"] == 0
    pipeline = Pipeline.load(live.repo)  # another process of the machine sees the same rows
    np.testing.assert_allclose(pipeline.recommend(USERS)["scores"], after["scores"], atol=1e-5)
    pipeline.close()


def test_a_killed_updater_is_started_again_and_loses_nothing(live):
    """Rows acknowledged before, while it was dead, and after."""
    items, before, pipeline = live.table("item_0"), infer(live.client, user_id=USERS), Pipeline.load(live.repo)
    rows = np.random.default_rng(1).standard_normal((items.rows, items.width), dtype=np.float32)

    def publish(part: int) -> None:
        keys = np.arange(part, items.rows, 3)
        live.publish("item_0", keys, rows[keys])

    def served() -> bool:
        return np.array_equal(pipeline.stages["rank"].tables.lookup("item_0", np.arange(items.rows)).values, rows)

    publish(0)
    (updater,) = (p for p in find_running(live.server.state.tag, UPDATER_MODULE) if supervisor.__name__ not in p.cmdline())
    updater.kill()
    publish(1)
    seen_s = time.time()
    until(lambda: table_metrics(live.server).get(("updater_seen_timestamp_seconds", "item_0"), 0) > seen_s)
    publish(2)
    until(served)
    after = infer(live.client, user_id=USERS)
    np.testing.assert_allclose(pipeline.recommend(USERS)["scores"], after["scores"], atol=1e-5)
    assert not np.array_equal(after["scores"], before["scores"])
    assert (after["degraded"] == 0).all()
    pipeline.close()


def test_what_was_acknowledged_survives_and_a_source_that_cannot_be_followed_costs_no_answer(live, run_dir):
    """The last test: it ends the server, and starts another one whose updater is broken."""
    before, tag = infer(live.client, user_id=USERS), live.server.state.tag
    live.server.stop()
    assert find_running(tag, UPDATER_MODULE) == []
    assert not (choose_shared_root(live.config) / f"embedding-tables-{live.config.arena}").exists()
    broken = live.repo / ENSEMBLE / "1" / "serving" / "tables" / "updates" / "updater.py"
    broken.unlink()
    broken.write_text("raise RuntimeError('cut short')")
    seal_again(live.repo, 1, "rank")
    again = TritonServer(live.repo, run_dir=run_dir)
    try:
        with pytest.raises(ServerError, match=r"RuntimeError: cut short\. The server answers without updates.*tried again"):
            again.start()
        assert is_ready(again.grpc_url)
        assert find_running(again.state.tag, UPDATER_MODULE)  # the supervisor, at least
        with grpcclient.InferenceServerClient(again.grpc_url) as client:  # from RocksDB
            np.testing.assert_array_equal(infer(client, user_id=USERS)["scores"], before["scores"])
    finally:
        again.stop()


def test_without_a_source_there_is_no_updater(server):
    assert find_running(server.state.tag, UPDATER_MODULE) == []
