"""Cost of 256 keys, 95 % of them in memory, as the table grows around a cache of one size.

All sizes are open at once and take turns. Beside each, raw reads of as many blocks of its file: the SSD's own growth.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from experiments.tiers.big import shares
from experiments.tiers.device import RawDevice, read_through
from experiments.tiers.traffic import (
    KEYS_PER_REQUEST,
    TABLE,
    latencies_us,
    opened,
    resident_keys,
    settings,
    write_table,
    zipf_keys,
)
from serving.tables.metrics import TableCounts
from serving.tables.store.tiers import Tiers

N_MISSES = round(0.05 * KEYS_PER_REQUEST)
EXPONENT = 1.0


@dataclass
class Size:
    rows: int
    tiers: Tiers
    device: RawDevice
    cached: int  # rows that fit
    taken_us: dict[str, list[float]] = field(default_factory=lambda: {"hits_us": [], "p50_us": [], "device_us": []})
    from_memory: list[float] = field(default_factory=list)  # share of the mixed requests' rows, by round

    def ask(self, count: int, rng: np.random.Generator) -> None:
        """A round: `count` requests of either kind, and raw reads for a quarter of them."""
        hits, mixed = self.requests(count, rng)
        self.taken_us["hits_us"] += latencies_us(self.lookup, hits).tolist()
        before = self.counts
        self.taken_us["p50_us"] += latencies_us(self.lookup, mixed, pause_s=0.002).tolist()
        self.from_memory.append(shares(before, self.counts)["memory_hit_rate"])
        self.taken_us["device_us"] += latencies_us(self.device.read, mixed[: count // 4, :N_MISSES]).tolist()

    def requests(self, count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """-> int64 [count, 256] keys that all hit, and the same with 13 that do not."""
        resident = resident_keys(self.tiers, 2 * self.cached)  # fewer after every round of misses
        hits = resident[zipf_keys(len(resident), EXPONENT, (count, KEYS_PER_REQUEST), rng)]
        mixed = hits.copy()
        mixed[:, :N_MISSES] = rng.integers(2 * self.cached, self.rows, (count, N_MISSES))
        return hits, mixed

    def lookup(self, keys: np.ndarray) -> None:
        self.tiers.lookup(TABLE, keys)

    @property
    def counts(self) -> TableCounts:
        return self.tiers.metrics().tables[TABLE].counts

    def described(self) -> dict:
        medians_us = {name: round(float(np.median(us)), 1) for name, us in self.taken_us.items()}
        return {"rows": self.rows, "memory_hit_rate": round(float(np.mean(self.from_memory)), 4), **medians_us}


def bench_growth(
    folder: Path, rows: list[int], rng: np.random.Generator, n_requests: int = 200, rounds: int = 10
) -> list[dict]:
    cached = min(rows) // 10
    with ExitStack() as open_now:
        sizes = [_opened(folder, count, cached, rng, open_now) for count in rows]
        for _ in range(rounds):
            for size in sizes:
                size.ask(n_requests, rng)
    results = [size.described() for size in sizes]
    for result in results:
        result["ratio"] = round(result["p50_us"] / results[0]["p50_us"], 2)
        result["device_ratio"] = round(result["device_us"] / results[0]["device_us"], 2)
        print(
            "{rows:>11,} rows, {memory_hit_rate:.1%} in memory: p50 {p50_us:8.1f} us ({ratio} of the smallest); "
            "all in memory {hits_us:7.1f} us, raw reads of the missing rows {device_us:8.1f} us ({device_ratio})".format(
                **result
            )
        )
    return results


def _opened(folder: Path, rows: int, cached: int, rng: np.random.Generator, open_now: ExitStack) -> Size:
    source = write_table(folder, rows, rng)
    tiers = open_now.enter_context(opened(settings(rows, source, l2_rows=cached), arena=f"bench-growth-{rows}"))
    read_through(source)
    device = RawDevice(f"{source}/{TABLE}.npy")
    open_now.callback(device.close)
    return Size(rows, tiers, device, cached)
