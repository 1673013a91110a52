"""Embedding tiers under updates, evictions and SIGKILL: nothing may be torn, mixed up or lost.

    .venv/bin/python -m perf.soak_tiers [--seconds 600] [--instances 3] [--rows 20000]

Instances look rows up and check each answer: a row's first column is its key, all others its version, no version is newer than
what was published. Every few seconds an instance or the updater is killed and started again. In the end every instance must
give, for every key, the version acknowledged last. Ends with one line of JSON; exit status 1 when anything was wrong.
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
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stages.embeddings.config import RocksConfig, TableConfig, TiersConfig, UpdateConfig
from stages.embeddings.memory import ARENA_PREFIX, remove_unused
from stages.embeddings.publisher import Publisher
from stages.embeddings.tiers import Tiers

WIDTH = 8
TOPIC = "hps_et.soak.items"
SETTLE_S = 60.0


def rows_of(keys: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """float32 [N, 8]: key, then seven times the version."""
    rows = np.repeat(versions.astype(np.float32)[:, None], WIDTH, axis=1)
    rows[:, 0] = keys
    return rows


def wrong_rows(keys: np.ndarray, rows: np.ndarray, versions: np.ndarray) -> int:
    """Rows of another key, torn rows, defaults (every key has a row), and versions beyond the one being published now."""
    torn = (rows[:, 1:] != rows[:, 1:2]).any(axis=1)
    return int(((rows[:, 0] != keys) | torn | (rows[:, 1] > versions[keys] + 1)).sum())


def run_broker(address, stop) -> None:
    from confluent_kafka import Producer

    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    cluster.list_topics(TOPIC, timeout=10)
    address.send(",".join(f"{b.host}:{b.port}" for b in cluster.list_topics(timeout=10).brokers.values()))
    stop.wait()


def run_updater(config: TiersConfig) -> None:
    import threading

    from stages.embeddings.updater import Updater

    Updater(config).run(threading.Event())


def run_instance(config: TiersConfig, number: int, wrong, lookups, finish, expected) -> None:
    """Look up and check until `finish`; then wait until every key has its expected version, and count those that never do.

    wrong, lookups: one counter per instance. These and `finish` have no lock, as an Event has: one held by a process that is
    killed would stop all others for good.
    """
    tiers, rng, rows = Tiers(config), np.random.default_rng(os.getpid()), config.tables[0].rows
    versions = np.frombuffer(expected, np.int32)
    while not finish.value:
        keys = np.minimum(rng.zipf(1.2, 300), rows) - 1
        wrong[number] += wrong_rows(keys, tiers.lookup("items", keys), versions)
        lookups[number] += 1
    keys = np.arange(rows)
    deadline = time.monotonic() + SETTLE_S
    while (tiers.lookup("items", keys)[:, 1] != versions).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    wrong[number] += int((tiers.lookup("items", keys)[:, 1] != versions).sum())
    tiers.close()


class Processes:
    """Started, killed and started again."""

    def __init__(self, starts: dict) -> None:
        self._context = multiprocessing.get_context("spawn")
        self._starts, self.kills = starts, 0
        self._running = {name: self._start(name) for name in starts}

    def _start(self, name: str):
        target, arguments = self._starts[name]
        process = self._context.Process(target=target, args=arguments, daemon=True)
        process.start()
        return process

    def kill(self, name: str) -> None:
        os.kill(self._running[name].pid, signal.SIGKILL)
        self._running[name].join()
        self._running[name] = self._start(name)
        self.kills += 1

    def end(self, name: str) -> None:
        self._running[name].terminate()
        self._running[name].join()

    def wait(self, names: list[str]) -> int:
        """-> how many of them did not end well."""
        for name in names:
            self._running[name].join(2 * SETTLE_S)
        return sum(self._running[name].exitcode != 0 for name in names)


def soak(folder: Path, seconds: float, n_instances: int, n_rows: int, rng: np.random.Generator) -> dict:
    context = multiprocessing.get_context("spawn")
    np.save(folder / "items.npy", rows_of(np.arange(n_rows), np.zeros(n_rows)))
    ours, theirs = context.Pipe()
    stop, finish = context.Event(), context.Value("b", 0, lock=False)
    wrong, lookups = (context.Array("q", n_instances, lock=False) for _ in range(2))
    expected = context.Array("i", n_rows, lock=False)
    broker = context.Process(target=run_broker, args=(theirs, stop), daemon=True)
    broker.start()
    config = TiersConfig(
        "soak",
        (TableConfig("items", n_rows, WIDTH, l1_rows=n_rows // 50, l2_rows=n_rows // 5),),
        f"soak-{os.getpid()}",
        source=str(folder),
        rocksdb=RocksConfig(str(folder / "rocksdb"), read_threads=4),
        updates=UpdateConfig(ours.recv()),
    )
    instances = [f"instance {i}" for i in range(n_instances)]
    starts = {name: (run_instance, (config, i, wrong, lookups, finish, expected)) for i, name in enumerate(instances)}
    processes = Processes({**starts, "updater": (run_updater, (config,))})
    publisher = Publisher(config.updates.brokers, "soak", {"items": WIDTH})
    versions = np.frombuffer(expected, np.int32)
    until_s, kill_at_s, published = time.monotonic() + seconds, time.monotonic() + 5, 0
    while time.monotonic() < until_s:
        keys = rng.choice(n_rows, 100, replace=False)
        publisher.publish("items", keys, rows_of(keys, versions[keys] + 1))
        publisher.flush()
        versions[keys] += 1
        published += len(keys)
        if time.monotonic() >= kill_at_s:
            processes.kill(str(rng.choice([*instances, "updater"])))
            kill_at_s = time.monotonic() + rng.uniform(1.0, 5.0)
        time.sleep(0.01)
    finish.value = 1
    failed = processes.wait(instances)
    processes.end("updater")
    remove_unused(Path(config.shared_folder) / f"{ARENA_PREFIX}{config.arena}")
    stop.set()
    return {
        "seconds": seconds,
        "lookups": sum(lookups),
        "rows_published": published,
        "kills": processes.kills,
        "wrong_rows": sum(wrong),
        "failed_instances": failed,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--instances", type=int, default=3)
    parser.add_argument("--rows", type=int, default=20_000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        report = soak(Path(folder), options.seconds, options.instances, options.rows, np.random.default_rng(0))
    print(json.dumps(report))
    sys.exit(bool(report["wrong_rows"] or report["failed_instances"] or not report["lookups"]))


if __name__ == "__main__":
    main()
