"""The processes that are killed and started again, what each of them does, and what they tell each other."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.tiers.feed import spawn
from experiments.tiers.soak.checks import FAULTS, Applied, Checker
from serving.tables.config import TiersConfig
from serving.tables.store.tiers import Tiers
from serving.tables.updates.updater import Updater

TABLE = "items"
SETTLE_S = 60.0
SHOWN = 5  # wrong rows of a process that are described


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
    def of(cls, n_instances: int, n_rows: int) -> Shared:
        kinds = (("q", 2 * n_instances * len(FAULTS)), ("q", n_instances), ("i", n_rows), ("i", n_rows))
        return cls(*(spawn.Array(*kind, lock=False) for kind in kinds), spawn.Value("b", 0, lock=False))

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


def run_updater(config: TiersConfig) -> None:
    Updater(config).run(threading.Event())


def run_instance(config: TiersConfig, number: int, shared: Shared) -> None:
    """Look up and check until `finish`; then wait until every key has its last version, and count those that never do."""
    tiers, rng, rows = Tiers(config), np.random.default_rng(os.getpid()), config.tables[0].rows
    published, due = shared.versions()
    table = tiers._tables[TABLE]
    checker = Checker(published, due, Applied(table.shared.ring, table.codec, rows))
    while not shared.finish.value:
        keys = np.minimum(rng.zipf(1.2, 300), rows) - 1
        for kind, found in checker.look_up(lambda asked: tiers.lookup(TABLE, asked), keys).items():
            shared.count(number, kind, found, tiers.degraded)
        shared.lookups[number] += 1
    keys = np.arange(rows)
    deadline = time.monotonic() + SETTLE_S
    while (tiers.lookup(TABLE, keys)[:, 1] != published).any() and time.monotonic() < deadline:
        time.sleep(0.05)
    lost = np.flatnonzero(tiers.lookup(TABLE, keys)[:, 1] != published)
    shared.count(number, "lost", lost, tiers.degraded)
    tiers.close()


class Processes:
    """Started, killed and started again."""

    def __init__(self, starts: dict) -> None:
        self._starts, self.names, self.kills = starts, list(starts), 0
        self._running: dict = {}

    def start(self, name: str) -> None:
        target, arguments = self._starts[name]
        self._running[name] = spawn.Process(target=target, args=arguments, daemon=True)
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
