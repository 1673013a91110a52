"""The bare look-up while 10,000 rows/s are updated: when rows become visible, and what updates cost look-ups."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.tiers import feed
from experiments.tiers.traffic import (
    KEYS_PER_REQUEST,
    TABLE,
    WIDTH,
    latencies_us,
    opened,
    settings,
    visible_quantile_ms,
    write_table,
    zipf_keys,
)
from perf.progress import progress
from serving.tables.config import RocksConfig, TiersConfig, UpdateConfig
from serving.tables.store.tiers import Tiers

NEVER_S = 5.0
FOUND_S = 10.0  # the updater looks for its topic, which the first message creates


def bench_updates(folder: Path, rows: int, rng: np.random.Generator, exponent: float, seconds: float, rounds: int) -> dict:
    """From the producer's acknowledgement to the first look-up that gives the new row; p99 of look-ups at about half load."""
    source, database = write_table(folder, rows, rng), folder / "updated"
    shutil.rmtree(database, ignore_errors=True)
    requests = zipf_keys(rows, exponent, (4000, KEYS_PER_REQUEST), rng)
    with ExitStack() as running:
        address, _ = running.enter_context(feed.broker())
        config = replace(
            settings(rows, source, l1_rows=rows // 20, l2_rows=rows),
            arena=f"bench-updates-{os.getpid()}",
            rocksdb=RocksConfig(str(database)),
            updates=UpdateConfig(address),
        )
        tiers = running.enter_context(opened(config))
        published = feed.Published(address, config.model, {TABLE: np.arange(rows)}, width=WIDTH)
        running.enter_context(updater(config))
        running.enter_context(feed.publisher(published))
        watch = Watch(tiers, published)
        step = running.enter_context(progress(1 + 2 * rounds))
        step("the updater finds its topic")
        published.go.set()
        serve(tiers, requests, FOUND_S, watch)
        us: dict[bool, list[np.ndarray]] = {False: [], True: []}
        watch.visible_ms.clear()
        rows_per_s = []
        for turn in range(2 * rounds):
            updating = turn % 2 == 1
            step(f"round {turn // 2 + 1}, {'with' if updating else 'without'} updates")
            published.go.set() if updating else published.go.clear()
            serve(tiers, requests, 0.5, watch)
            begun_s, before = time.monotonic(), published.count.value
            us[updating].append(serve(tiers, requests, seconds, watch))
            if updating:
                rows_per_s.append(round((published.count.value - before) / (time.monotonic() - begun_s)))
        published.go.clear()
        watch.until_all_seen()
        applied = tiers.metrics().tables[TABLE].updater.rows_applied
    return _described(us, watch.visible_ms, applied, published.count.value) | {"rows_per_s_by_round": rows_per_s}


def _described(us: dict[bool, list[np.ndarray]], visible_ms: list[float], applied: int, acknowledged: int) -> dict:
    busy_us, quiet_us = (float(np.percentile(np.concatenate(us[updating]), 99)) for updating in (True, False))
    by_round = [np.percentile(b, 99) / np.percentile(q, 99) for b, q in zip(us[True], us[False], strict=True)]
    result = {
        "rows_acknowledged": acknowledged,
        "rows_applied": applied,
        "visible_p50_ms": visible_quantile_ms(visible_ms, 50),
        "visible_p99_ms": visible_quantile_ms(visible_ms, 99),
        "serving_p99_us": round(busy_us, 1),
        "without_updates_p99_us": round(quiet_us, 1),
        "p99_ratio": round(busy_us / quiet_us, 2),
        "p99_ratio_by_round": [round(float(ratio), 2) for ratio in by_round],
    }
    print(
        "updates visible after p50 {visible_p50_ms} ms, p99 {visible_p99_ms} ms; look-ups p99 {serving_p99_us} us, {p99_ratio} "
        "of that without, {p99_ratio_by_round} by round ({rows_applied:,} rows applied)".format(**result)
    )
    return result


class Watch:
    """Looks for one row of every published part until it is there."""

    def __init__(self, tiers: Tiers, published: feed.Published) -> None:
        self._tiers, self._published = tiers, published
        self._pending: list[tuple[int, int, float]] = []
        self.visible_ms: list[float] = []

    def __call__(self) -> None:
        pending, sent = self._pending, self._published.sent
        while not sent.empty():
            pending.append(sent.get())
        if not pending:
            return
        values = self._tiers.lookup(TABLE, np.array([key for key, _, _ in pending]))[:, 0]
        now_s = time.monotonic()
        seen = [value >= number for value, (_, number, _) in zip(values.tolist(), pending, strict=True)]
        self.visible_ms += [1e3 * (now_s - part[2]) for part, there in zip(pending, seen, strict=True) if there]
        self._pending = [part for part, there in zip(pending, seen, strict=True) if not there]

    def until_all_seen(self) -> None:
        """Look for what is left; infinite of what never comes."""
        until_s = time.monotonic() + NEVER_S
        while (self._pending or not self._published.sent.empty()) and time.monotonic() < until_s:
            self()
        self.visible_ms += [float("inf")] * len(self._pending)


def serve(tiers: Tiers, requests: np.ndarray, seconds: float, watch: Callable[[], None]) -> np.ndarray:
    """Latencies in µs at about half load: every request is followed by a pause as long as the median one takes."""
    pause_s = float(np.median(latencies_us(lambda keys: tiers.lookup(TABLE, keys), requests[:200]))) / 1e6
    us, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s:
        keys = requests[len(us) % len(requests)]
        us.append(latencies_us(lambda keys: tiers.lookup(TABLE, keys), keys[None])[0])
        watch()
        time.sleep(pause_s)
    return np.array(us)


@contextmanager
def updater(config: TiersConfig) -> Iterator[None]:
    stop = feed.spawn.Event()
    with feed.beside("The updater", run_updater, (config, stop), stop.set):
        yield


def run_updater(config: TiersConfig, stop) -> None:
    from serving.tables.updates.updater import Updater

    updating = Updater(config)
    updating.run(stop)
    updating.close()
