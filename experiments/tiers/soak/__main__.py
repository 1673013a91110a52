"""python -m experiments.tiers.soak: see the package's docstring."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from confluent_kafka import Producer

from experiments.tiers import feed
from experiments.tiers.soak.checks import WIDTH, Due, rows_of
from experiments.tiers.soak.processes import TABLE, Processes, Shared, run_instance, run_updater
from perf.command import BROKEN, run
from perf.report.results import last_line
from serving.tables.config import RocksConfig, TableConfig, TiersConfig, UpdateConfig
from serving.tables.formats.kafka import topic
from serving.tables.store.memory import ARENA_PREFIX, remove_unused
from serving.tables.store.table import shared_root
from serving.tables.updates.publisher import Publisher

MODEL = "soak"
UPDATER = "updater"
TOLD_EVERY_S = 30.0

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seconds: Annotated[float, typer.Option(help="of updates and kills", min=30)] = 600.0,
    instances: Annotated[int, typer.Option(help="processes that look rows up", min=1)] = 3,
    rows: Annotated[int, typer.Option(help="of the table", min=500)] = 20_000,
) -> None:
    """Kill, update and check the embedding tiers. Exit code 1 when a row was wrong, or a check had nothing to look at."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = soak(Path(folder), seconds, instances, rows, np.random.default_rng(0))
    print(last_line({"perf": "soak"} | report))
    if report["wrong_rows"] or report["failed_instances"] or not (report["lookups"] and report["rows_due"]):
        raise typer.Exit(BROKEN)


def soak(folder: Path, seconds: float, n_instances: int, n_rows: int, rng: np.random.Generator) -> dict:
    np.save(folder / f"{TABLE}.npy", rows_of(np.arange(n_rows), np.zeros(n_rows)))
    shared = Shared.of(n_instances, n_rows)
    with ExitStack() as running:
        brokers, _ = running.enter_context(feed.broker())
        Producer({"bootstrap.servers": brokers}).list_topics(topic(MODEL, TABLE), timeout=feed.STARTED_S)  # creates it
        config = settings(folder, n_rows, brokers)
        instances = {f"instance {i}": (run_instance, (config, i, shared)) for i in range(n_instances)}
        processes = Processes({**instances, UPDATER: (run_updater, (config,))})
        running.callback(remove_unused, shared_root(config) / f"{ARENA_PREFIX}{config.arena}")
        running.callback(processes.end)
        for name in processes.names:
            processes.start(name)
        rows_published = publish(config, shared, processes, seconds, rng)
        shared.finish.value = 1
        failed = processes.wait(list(instances))
    by_kind, degraded = shared.counts()
    return {
        "seconds": seconds,
        "lookups": sum(shared.lookups),
        "rows_published": rows_published,
        "rows_due": int(shared.versions()[1].sum()),
        "kills": processes.kills,
        "wrong_rows": sum(by_kind.values()),
        "by_kind": by_kind,
        "by_kind_degraded": degraded,
        "failed_instances": failed,
    }


def settings(folder: Path, n_rows: int, brokers: str) -> TiersConfig:
    return TiersConfig(
        MODEL,
        (TableConfig(TABLE, n_rows, WIDTH, l1_rows=n_rows // 50, l2_rows=n_rows // 5),),
        f"soak-{os.getpid()}",
        source=str(folder),
        rocksdb=RocksConfig(str(folder / "rocksdb"), read_threads=4),
        updates=UpdateConfig(brokers),
    )


def publish(config: TiersConfig, shared: Shared, processes: Processes, seconds: float, rng: np.random.Generator) -> int:
    """New versions of random rows, and kills, for `seconds` -> rows that were acknowledged.

    The updater is spared until some of them were due: killed every few seconds, it might never be up for as long as that takes.
    """
    publisher = Publisher(config.updates.brokers, config.model, {TABLE: WIDTH})
    (versions, due_versions), n_published = shared.versions(), 0
    begun_s = time.monotonic()
    until_s, kill_at_s, tell_at_s = begun_s + seconds, begun_s + 5, begun_s + TOLD_EVERY_S
    due = Due(due_versions, begun_s)
    while time.monotonic() < until_s:
        keys = rng.choice(len(versions), 100, replace=False)
        publisher.publish(TABLE, keys, rows_of(keys, versions[keys] + 1))
        publisher.flush()
        versions[keys] += 1
        due.acknowledged(keys, versions[keys], time.monotonic())
        n_published += len(keys)
        if time.monotonic() >= kill_at_s:
            spared = {UPDATER} if not due_versions.any() else set()
            name = str(rng.choice([name for name in processes.names if name not in spared]))
            processes.kill(name)
            if name == UPDATER:
                due.updater_killed(time.monotonic())
            kill_at_s = time.monotonic() + rng.uniform(1.0, 5.0)
        due.advance(time.monotonic())
        if time.monotonic() >= tell_at_s:
            tell(time.monotonic() - begun_s, shared, processes)
            tell_at_s += TOLD_EVERY_S
        time.sleep(0.01)
    return n_published


def tell(elapsed_s: float, shared: Shared, processes: Processes) -> None:
    n_wrong = sum(shared.counts()[0].values())
    so_far = f"{sum(shared.lookups):,} look-ups, {processes.kills} kills, {n_wrong} rows wrong"
    print(f"{elapsed_s:.0f} s: {so_far}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    run(app, "python -m experiments.tiers.soak")
