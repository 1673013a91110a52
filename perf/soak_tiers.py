"""Embedding tiers under updates, evictions and SIGKILL: nothing may be torn, mixed up or lost.

    .venv/bin/python -m perf.soak_tiers [--seconds 600] [--instances 3] [--rows 20000]

Every few seconds an instance or the updater is killed and started again. Instances look rows up and check each answer: a row's
first column is its key, all others its version. A row is wrong when it is

    foreign   of another key, or a default: every key has a row
    torn      of two versions
    early     newer than what is being published
    stale     older than what the updater had applied last when the look-up began: the update ring tells
    fallen    older than what the same process was given before
    late      older than what was acknowledged VISIBLE_WITHIN_S before, the updater up since RESTARTED_WITHIN_S
    lost      in the end, when all is quiet, not the version acknowledged last

Wrong rows of look-ups that were marked `degraded` are wrong all the same, and counted apart as well.

Says on stderr how it goes, every 30 s, and the first wrong rows. Ends with one line of JSON; exit status 1 when anything was
wrong.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stages.embeddings.config import RocksConfig, TableConfig, TiersConfig, UpdateConfig
from stages.embeddings.memory import ARENA_PREFIX, remove_unused
from stages.embeddings.publisher import Publisher
from stages.embeddings.ring import UpdateRing
from stages.embeddings.row_formats import RowCodec
from stages.embeddings.table import shared_root
from stages.embeddings.tiers import Tiers

WIDTH = 8
TOPIC = "hps_et.soak.items"
UPDATER = "updater"
SETTLE_S = 60.0
VISIBLE_WITHIN_S, RESTARTED_WITHIN_S = 5.0, 10.0  # generous: milliseconds, and 3 to 4 s from a kill until it has caught up
FAULTS = ("foreign", "torn", "early", "stale", "fallen", "late", "lost")
SHOWN = 5  # wrong rows of a process that are described
TOLD_EVERY_S = 30.0


def rows_of(keys: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """float32 [N, 8]: key, then seven times the version."""
    rows = np.repeat(versions.astype(np.float32)[:, None], WIDTH, axis=1)
    rows[:, 0] = keys
    return rows


class Applied:
    """The versions that the updater applied last, int32 [rows] by key; 0 where this saw none."""

    def __init__(self, ring: UpdateRing, codec: RowCodec, n_rows: int) -> None:
        self._ring, self._codec = ring, codec
        self._position = max(0, ring.head - ring.size // 2)
        self.versions = np.zeros(n_rows, np.int32)

    def follow(self) -> None:
        """What the ring tells since the last time; nothing is known when that was too much for it."""
        recent = self._ring.since(self._position)
        if recent is None:
            self._position = self._ring.head
            self.versions[:] = 0
            return
        keys, stored, self._position = recent
        self.versions[keys] = self._codec.decode(stored)[:, 1].astype(np.int32)


class Checker:
    """What one process was given, held against what it may be given. Versions are int32 [rows], by key.

    published: the last ones acknowledged; due: those that must be visible. Others write both while this reads.
    """

    def __init__(self, published: np.ndarray, due: np.ndarray, applied: Applied) -> None:
        self._published, self._due, self._applied = published, due, applied
        self._given = np.zeros(len(published), np.int32)

    def look_up(self, lookup: Callable[[np.ndarray], np.ndarray], keys: np.ndarray) -> dict[str, np.ndarray]:
        """int64 [N] -> of each fault that there is, the keys of its rows."""
        self._applied.follow()
        due, applied = self._due[keys], self._applied.versions[keys]
        rows = lookup(keys)
        newest = self._published[keys] + 1  # one more is on its way before it counts as acknowledged
        given, version = self._given[keys], rows[:, 1]
        foreign, torn = rows[:, 0] != keys, (rows[:, 1:] != rows[:, 1:2]).any(axis=1)
        known = ~foreign & ~torn & (version <= newest)
        np.maximum.at(self._given, keys[known], version[known].astype(np.int32))
        of_kind = {"foreign": foreign, "torn": torn & ~foreign, "early": ~foreign & ~torn & ~known}
        of_kind |= {"stale": known & (version < applied), "fallen": known & (version < given), "late": known & (version < due)}
        return {kind: keys[there] for kind, there in of_kind.items() if there.any()}


class Due:
    """Moves versions into `due` (int32 [rows]) when they must be visible: so long after them and after the updater's start."""

    def __init__(self, due: np.ndarray, now_s: float) -> None:
        self._due, self._updater_since_s = due, now_s
        self._waiting: deque[tuple[float, np.ndarray, np.ndarray]] = deque()

    def acknowledged(self, keys: np.ndarray, versions: np.ndarray, now_s: float) -> None:
        self._waiting.append((now_s, keys, versions))

    def updater_killed(self, now_s: float) -> None:
        self._updater_since_s = now_s

    def advance(self, now_s: float) -> None:
        if now_s < self._updater_since_s + RESTARTED_WITHIN_S:
            return
        while self._waiting and now_s >= self._waiting[0][0] + VISIBLE_WITHIN_S:
            _, keys, versions = self._waiting.popleft()
            self._due[keys] = versions


def run_broker(address) -> None:
    from confluent_kafka import Producer

    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    cluster.list_topics(TOPIC, timeout=10)
    address.send(",".join(f"{b.host}:{b.port}" for b in cluster.list_topics(timeout=10).brokers.values()))
    signal.pause()


def run_updater(config: TiersConfig) -> None:
    import threading

    from stages.embeddings.updater import Updater

    Updater(config).run(threading.Event())


@dataclass(frozen=True)
class Shared:
    """What the processes tell each other. Nothing has a lock, as an Event has: one held by a process that is killed would stop
    all others for good. found: int64 [2, instances, FAULTS], of look-ups that were not `degraded` and of those that were;
    lookups: int64 [instances]; published, due: int32 [rows]."""

    found: Any
    lookups: Any
    published: Any
    due: Any
    finish: Any

    @classmethod
    def of(cls, n_instances: int, n_rows: int, context) -> Shared:
        kinds = (("q", 2 * n_instances * len(FAULTS)), ("q", n_instances), ("i", n_rows), ("i", n_rows))
        return cls(*(context.Array(*kind, lock=False) for kind in kinds), context.Value("b", 0, lock=False))

    def versions(self) -> tuple[np.ndarray, np.ndarray]:
        """-> (published, due)"""
        return np.frombuffer(self.published, np.int32), np.frombuffer(self.due, np.int32)

    def count(self, instance: int, kind: str, keys: np.ndarray, degraded: bool) -> None:
        at = (degraded * len(self.lookups) + instance) * len(FAULTS) + FAULTS.index(kind)
        if len(keys) and self.found[at] < SHOWN:
            what = f"{kind}, {'degraded' if degraded else 'not degraded'}, keys {keys[:SHOWN].tolist()}"
            print(f"instance {instance} at {time.monotonic():.3f} s: {what}", file=sys.stderr, flush=True)
        self.found[at] += len(keys)

    def counts(self) -> tuple[dict[str, int], dict[str, int]]:
        """Wrong rows of all instances by kind: of all look-ups, and of those that were `degraded`."""
        by_mark = np.frombuffer(self.found, np.int64).reshape(2, -1, len(FAULTS)).sum(axis=1)
        every, marked = (dict(zip(FAULTS, found.tolist(), strict=True)) for found in (by_mark.sum(axis=0), by_mark[1]))
        return every, marked


def run_instance(config: TiersConfig, number: int, shared: Shared) -> None:
    """Look up and check until `finish`; then wait until every key has its last version, and count those that never do."""
    tiers, rng, rows = Tiers(config), np.random.default_rng(os.getpid()), config.tables[0].rows
    published, due = shared.versions()
    table = tiers._tables["items"]
    checker = Checker(published, due, Applied(table.shared.ring, table.codec, rows))
    while not shared.finish.value:
        keys = np.minimum(rng.zipf(1.2, 300), rows) - 1
        for kind, found in checker.look_up(lambda asked: tiers.lookup("items", asked), keys).items():
            shared.count(number, kind, found, tiers.degraded)
        shared.lookups[number] += 1
    keys = np.arange(rows)
    deadline = time.monotonic() + SETTLE_S
    while (tiers.lookup("items", keys)[:, 1] != published).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    lost = np.flatnonzero(tiers.lookup("items", keys)[:, 1] != published)
    shared.count(number, "lost", lost, tiers.degraded)
    tiers.close()


class Processes:
    """Started, killed and started again."""

    def __init__(self, starts: dict) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._starts, self.names, self.kills = starts, list(starts), 0
        self._running: dict = {}

    def start(self, name: str) -> None:
        target, arguments = self._starts[name]
        self._running[name] = self._context.Process(target=target, args=arguments, daemon=True)
        self._running[name].start()

    def kill(self, name: str) -> None:
        os.kill(self._running[name].pid, signal.SIGKILL)
        self._running[name].join()
        self.start(name)
        self.kills += 1

    def end(self) -> None:
        """Of all that run."""
        for process in self._running.values():
            if process.pid is not None:  # it was started
                process.terminate()
                process.join()

    def wait(self, names: list[str]) -> int:
        """-> how many of them did not end well."""
        for name in names:
            self._running[name].join(2 * SETTLE_S)
        return sum(self._running[name].exitcode != 0 for name in names)


def soak(folder: Path, seconds: float, n_instances: int, n_rows: int, rng: np.random.Generator) -> dict:
    context = multiprocessing.get_context("spawn")
    np.save(folder / "items.npy", rows_of(np.arange(n_rows), np.zeros(n_rows)))
    shared = Shared.of(n_instances, n_rows, context)
    with ExitStack() as running:
        config = settings(folder, n_rows, running.enter_context(broker(context)))
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


@contextmanager
def broker(context) -> Iterator[str]:
    """-> host:port"""
    ours, theirs = context.Pipe()
    process = context.Process(target=run_broker, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def settings(folder: Path, n_rows: int, brokers: str) -> TiersConfig:
    return TiersConfig(
        "soak",
        (TableConfig("items", n_rows, WIDTH, l1_rows=n_rows // 50, l2_rows=n_rows // 5),),
        f"soak-{os.getpid()}",
        source=str(folder),
        rocksdb=RocksConfig(str(folder / "rocksdb"), read_threads=4),
        updates=UpdateConfig(brokers),
    )


def publish(config: TiersConfig, shared: Shared, processes: Processes, seconds: float, rng: np.random.Generator) -> int:
    """New versions of random rows, and kills, for `seconds` -> rows that were acknowledged."""
    publisher = Publisher(config.updates.brokers, config.model, {"items": WIDTH})
    (versions, due_versions), n_published = shared.versions(), 0
    begun_s = time.monotonic()
    until_s, kill_at_s, tell_at_s = begun_s + seconds, begun_s + 5, begun_s + TOLD_EVERY_S
    due = Due(due_versions, begun_s)
    while time.monotonic() < until_s:
        keys = rng.choice(len(versions), 100, replace=False)
        publisher.publish("items", keys, rows_of(keys, versions[keys] + 1))
        publisher.flush()
        versions[keys] += 1
        due.acknowledged(keys, versions[keys], time.monotonic())
        n_published += len(keys)
        if time.monotonic() >= kill_at_s:
            name = str(rng.choice(processes.names))
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


def leave(signum: int, _frame: object) -> None:
    """Told to stop: the way out that ends the other processes, which otherwise would go on for good."""
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)  # not sys.exit: inside Kafka's client that becomes a SystemError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, leave)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = soak(Path(folder), options.seconds, options.instances, options.rows, np.random.default_rng(0))
    print(json.dumps(report))
    sys.exit(bool(report["wrong_rows"] or report["failed_instances"] or not report["lookups"]))


if __name__ == "__main__":
    main()
