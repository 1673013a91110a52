"""Soak the embedding tables under updates, evictions and SIGKILL: no row may be torn, mixed up or lost.

    python -m experiments.soak [--seconds 600] [--instances 3] [--rows 20000]

Every few seconds the updater, or an instance that answers, is killed and started again. Instances look rows up and check each
answer: a row's first column is its key, all others its version. A row is wrong when it is

    foreign   of another key, or a default: every key has a row
    torn      of two versions
    early     newer than what is being published
    stale     older than what the updater had applied when the look-up began, by the update ring
    fallen    older than what the same process was given before
    late      older than what was acknowledged VISIBLE_WITHIN_S before, the updater up since RESTARTED_WITHIN_S
    lost      in the end, when all is quiet, not the version acknowledged last

Wrong rows of look-ups marked `degraded` are wrong too, and also counted apart. Progress and the first wrong rows go to stderr.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from confluent_kafka import Producer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.soak_checks import FAULTS, WIDTH, Applied, Checker, Due, make_rows
from experiments.tables_feed import STARTED_S, run_broker, spawn
from perf.command import run
from serving.contract.errors import ServerError
from serving.tables.config import LevelsConfig, RocksConfig, TableConfig, UpdateConfig
from serving.tables.formats.kafka import name_topic
from serving.tables.leveled import LeveledTables
from serving.tables.store.memory import ARENA_PREFIX, remove_unused
from serving.tables.store.table import choose_shared_root
from serving.tables.updates.publisher import Publisher
from serving.tables.updates.updater import Updater

TABLE = "items"
SETTLE_S = 60.0
SHOWN = 5  # wrong rows of a process that are described


@dataclass(frozen=True)
class Shared:
    """Memory that the processes share. It has no lock: one held by a process that is killed would stop all others.

    wrong: int64 [2, instances, FAULTS], of look-ups that were not `degraded` and of those that were;
    lookups: int64 [instances]; published, due: int32 [rows]
    """

    wrong: Any
    lookups: Any
    published: Any
    due: Any
    finish: Any

    @classmethod
    def of(cls, n_instances: int, n_rows: int) -> Shared:
        return cls(
            wrong=spawn.Array("q", 2 * n_instances * len(FAULTS), lock=False),
            lookups=spawn.Array("q", n_instances, lock=False),
            published=spawn.Array("i", n_rows, lock=False),
            due=spawn.Array("i", n_rows, lock=False),
            finish=spawn.Value("b", 0, lock=False),
        )

    def view_versions(self) -> tuple[np.ndarray, np.ndarray]:
        """Return (published, due)."""
        return np.frombuffer(self.published, np.int32), np.frombuffer(self.due, np.int32)

    def count(self, instance: int, kind: str, keys: np.ndarray, degraded: bool) -> None:
        index = (degraded * len(self.lookups) + instance) * len(FAULTS) + FAULTS.index(kind)
        if len(keys) and self.wrong[index] < SHOWN:
            fact = f"{kind}, {'degraded' if degraded else 'not degraded'}, keys {keys[:SHOWN].tolist()}"
            print(f"instance {instance} at {time.monotonic():.3f} s: {fact}", file=sys.stderr, flush=True)
        self.wrong[index] += len(keys)

    def sum_counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Return wrong rows of all instances by kind: of all look-ups, and of those that were `degraded`."""
        by_mark = np.frombuffer(self.wrong, np.int64).reshape(2, -1, len(FAULTS)).sum(axis=1)
        total, degraded = (dict(zip(FAULTS, rows.tolist(), strict=True)) for rows in (by_mark.sum(axis=0), by_mark[1]))
        return total, degraded


def run_updater(config: LevelsConfig) -> None:
    Updater(config).run(threading.Event())


def run_instance(config: LevelsConfig, number: int, shared: Shared) -> None:
    """Check looked-up rows until `finish`; then wait until every key has its last version, and count those that never do."""
    tables, rng, rows = LeveledTables(config), np.random.default_rng(os.getpid()), config.tables[0].rows
    published, due = shared.view_versions()
    table = tables.tables[TABLE]
    assert table.shared is not None
    checker = Checker(published, due, Applied(table.shared.ring, table.codec, rows))
    while not shared.finish.value:
        keys = np.minimum(rng.zipf(1.2, 300), rows) - 1
        wrong, degraded = checker.look_up(lambda requested: tables.lookup(TABLE, requested), keys)
        for kind, wrong_keys in wrong.items():
            shared.count(number, kind, wrong_keys, degraded)
        shared.lookups[number] += 1
    keys = np.arange(rows)
    deadline = time.monotonic() + SETTLE_S
    while (tables.lookup(TABLE, keys).values[:, 1] != published).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    latest = tables.lookup(TABLE, keys)
    shared.count(number, "lost", np.flatnonzero(latest.values[:, 1] != published), latest.degraded)
    tables.close()


class Processes:
    """Start processes, kill them and start them again. An instance is ready when it has looked rows up since its start."""

    def __init__(self, starts: dict, instances: list[str], shared: Shared) -> None:
        self._starts, self.names, self.kills = starts, list(starts), 0
        self._instances, self._lookups = instances, shared.lookups
        self._running: dict = {}
        self._lookups_at_start: dict[str, int] = {}

    def start(self, name: str) -> None:
        target, arguments = self._starts[name]
        self._lookups_at_start[name] = self._count_lookups(name)
        self._running[name] = spawn.Process(target=target, args=arguments, daemon=True)
        self._running[name].start()

    def is_ready(self, name: str) -> bool:
        return name not in self._instances or self._count_lookups(name) > self._lookups_at_start[name]

    def wait_until_ready(self) -> None:
        """Raise ServerError where an instance looks nothing up."""
        deadline_s = time.monotonic() + SETTLE_S
        while not all(map(self.is_ready, self.names)):
            if time.monotonic() > deadline_s:
                raise ServerError(f"an instance looked nothing up within {SETTLE_S:g} s. What it printed is above.")
            time.sleep(0.05)

    def _count_lookups(self, name: str) -> int:
        return self._lookups[self._instances.index(name)] if name in self._instances else 0

    def kill(self, name: str) -> None:
        os.kill(self._running[name].pid, signal.SIGKILL)
        self._running[name].join()
        self.start(name)
        self.kills += 1

    def end(self) -> None:
        """Terminate all that run."""
        for process in self._running.values():
            if process.pid is not None:  # it was started
                process.terminate()
                process.join()

    def wait(self, names: list[str]) -> int:
        """Wait for these; return how many did not end well."""
        for name in names:
            self._running[name].join(2 * SETTLE_S)
        return sum(self._running[name].exitcode != 0 for name in names)


MODEL = "soak"
UPDATER = "updater"
REPORTED_EVERY_S = 30.0


def soak(folder: Path, seconds: float, n_instances: int, n_rows: int, rng: np.random.Generator) -> list[Figure]:
    np.save(folder / f"{TABLE}.npy", make_rows(np.arange(n_rows), np.zeros(n_rows)))
    shared = Shared.of(n_instances, n_rows)
    with ExitStack() as running:
        brokers, _ = running.enter_context(run_broker())
        Producer({"bootstrap.servers": brokers}).list_topics(name_topic(MODEL, TABLE), timeout=STARTED_S)  # creates it
        config = make_settings(folder, n_rows, brokers)
        instances = {f"instance {i}": (run_instance, (config, i, shared)) for i in range(n_instances)}
        processes = Processes({**instances, UPDATER: (run_updater, (config,))}, list(instances), shared)
        running.callback(remove_unused, choose_shared_root(config) / f"{ARENA_PREFIX}{config.arena}")
        running.callback(processes.end)
        for name in processes.names:
            processes.start(name)
        processes.wait_until_ready()
        rows_published = publish(config, shared, processes, seconds, rng)
        shared.finish.value = 1
        failed = processes.wait(list(instances))
    by_kind, degraded = shared.sum_counts()
    counts = {
        "look-ups": (sum(shared.lookups), {"at_least": 1}),
        "rows published": (rows_published, {"at_least": 1}),
        "rows that had to be visible": (int(shared.view_versions()[1].sum()), {"at_least": 1}),
        "kills": (processes.kills, {}),
        "wrong rows": (sum(by_kind.values()), {"at_most": 0}),
        **{f"wrong rows, {kind}": (count, {}) for kind, count in by_kind.items()},
        "wrong rows of degraded look-ups": (sum(degraded.values()), {}),
        "instances that failed": (failed, {"at_most": 0}),
    }
    return [Figure(name=name, values=[count], **bounds) for name, (count, bounds) in counts.items()]


def make_settings(folder: Path, n_rows: int, brokers: str) -> LevelsConfig:
    return LevelsConfig(
        MODEL,
        (TableConfig(TABLE, n_rows, WIDTH, l1_rows=n_rows // 50, l2_rows=n_rows // 5),),
        f"soak-{os.getpid()}",
        source=str(folder),
        rocksdb=RocksConfig(str(folder / "rocksdb"), read_threads=4),
        updates=UpdateConfig(brokers),
    )


def publish(config: LevelsConfig, shared: Shared, processes: Processes, seconds: float, rng: np.random.Generator) -> int:
    """Publish new versions of random rows, and kill processes, for `seconds`; return the rows that were acknowledged.

    The updater is spared until some of them were due: killed every few seconds, it might never be up for as long as that takes.
    """
    assert config.updates is not None
    publisher = Publisher(config.updates.brokers, config.model, {TABLE: WIDTH})
    (versions, due_versions), n_published = shared.view_versions(), 0
    begun_s = time.monotonic()
    until_s, kill_at_s, report_at_s = begun_s + seconds, begun_s + 5, begun_s + REPORTED_EVERY_S
    due = Due(due_versions, begun_s)
    while time.monotonic() < until_s:
        keys = rng.choice(len(versions), 100, replace=False)
        publisher.publish(TABLE, keys, make_rows(keys, versions[keys] + 1))
        publisher.flush()
        versions[keys] += 1
        due.note_acknowledged(keys, versions[keys], time.monotonic())
        n_published += len(keys)
        if time.monotonic() >= kill_at_s:
            spared = {UPDATER} if not due_versions.any() else set()
            killable = [name for name in processes.names if name not in spared and processes.is_ready(name)]
            if killable:
                name = str(rng.choice(killable))
                processes.kill(name)
                if name == UPDATER:
                    due.note_updater_killed(time.monotonic())
            kill_at_s = time.monotonic() + rng.uniform(1.0, 5.0)
        due.advance(time.monotonic())
        if time.monotonic() >= report_at_s:
            report_progress(time.monotonic() - begun_s, shared, processes)
            report_at_s += REPORTED_EVERY_S
        time.sleep(0.01)
    return n_published


def report_progress(elapsed_s: float, shared: Shared, processes: Processes) -> None:
    n_wrong = sum(shared.sum_counts()[0].values())
    so_far = f"{sum(shared.lookups):,} look-ups, {processes.kills} kills, {n_wrong} rows wrong"
    print(f"{elapsed_s:.0f} s: {so_far}", file=sys.stderr, flush=True)


def main(
    seconds: Annotated[float, typer.Option(help="of updates and kills", min=10)] = 600.0,
    instances: Annotated[int, typer.Option(help="processes that look rows up", min=1)] = 3,
    rows: Annotated[int, typer.Option(help="of the table", min=500)] = 20_000,
    results: ResultsFolder = RESULTS,
) -> None:
    """Kill, update and check the embedding tables. Exit code 1 when a row was wrong, or a check had nothing to look at."""
    machine = read_machine()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        figures = soak(Path(folder), seconds, instances, rows, np.random.default_rng(0))
    title, command = "Wrong rows under updates and kills", f"python -m experiments.soak --seconds {seconds:g}"
    finish("soak", title, command, f"{seconds:g} s, {instances} processes, {rows:,} rows", figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.soak")
