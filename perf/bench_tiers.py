"""What the embedding tiers cost: hits, SSD misses, a table far larger than its RAM, growth, and live updates.

    .venv/bin/python -m perf.bench_tiers [--rows 1000000] [--folder /tmp/bench-tiers] [--parts hits,misses,big,growth,updates]

A table of `--rows` rows x 16 is written to `--folder` (kept for the next run; 50,000,000 rows need 10 GB). Latencies are of
requests for 256 keys. Every figure is compared with what the same machine does without the tiers, in turns, because other work
on it only ever adds time. The very last line of stdout is a single compact JSON document.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from stages.embeddings.config import RocksConfig, TableConfig, TiersConfig, UpdateConfig
from stages.embeddings.rocks_store import KEYS_PER_READ
from stages.embeddings.table import l1_sections, l2_sections
from stages.embeddings.tiers import Tiers

WIDTH = 16
ROW_BYTES = 4 * WIDTH
KEYS_PER_REQUEST = 256
READ_THREADS = 16
BLOCK_BYTES = 4096  # what RocksDB reads for one row
UPDATES_PER_S = 10_000
REST_OF_REQUEST_S = 0.002  # of a request that looks rows up: the network, the other stages


# --- the table and its traffic ----------------------------------------------------------------------------------------------
def write_table(folder: Path, rows: int, rng: np.random.Generator) -> str:
    """-> folder of `items.npy`, float32 [rows, 16], written once."""
    folder = folder / f"{rows}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        table = np.lib.format.open_memmap(folder / "items.npy", "w+", np.float32, (rows, WIDTH))
        for start in range(0, rows, 1 << 20):
            table[start : start + (1 << 20)] = rng.standard_normal((min(1 << 20, rows - start), WIDTH), dtype=np.float32)
        table.flush()
        (folder / "done").touch()
    return str(folder)


def zipf_keys(n_keys: int, exponent: float, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """int64 of `shape`: key k with a probability proportional to 1 / (k + 1) ** exponent."""
    cumulative = np.cumsum(np.arange(1, n_keys + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative, rng.random(shape) * cumulative[-1]).astype(np.int64)


@contextmanager
def tiers_over(rows: int, source: str, threshold: float = 1.1, **table) -> Iterator[Tiers]:
    config = TiersConfig(
        "bench",
        (TableConfig("items", rows, WIDTH, **table),),
        f"bench-{os.getpid()}",
        hit_rate_threshold=threshold,
        source=source,
        rocksdb=RocksConfig(f"{source}/rocksdb", READ_THREADS, direct_reads=True),
    )
    tiers = Tiers(config)
    try:
        yield tiers
    finally:
        tiers.close()


def seconds_per_call(
    ways: dict[str, Callable[[np.ndarray], object]], requests: np.ndarray, repeats: int = 9
) -> dict[str, float]:
    """The fastest of `repeats` rounds over all requests, the ways taking turns."""
    best = dict.fromkeys(ways, np.inf)
    for _ in range(repeats):
        for name, call in ways.items():
            started_s = time.perf_counter()
            for keys in requests:
                call(keys)
            best[name] = min(best[name], (time.perf_counter() - started_s) / len(requests))
    return best


def latencies_us(call: Callable[[np.ndarray], object], requests: np.ndarray, pause_s: float = 0.0) -> np.ndarray:
    """float64 [R], one per request; between two of them a pause, in which background work may go on."""
    elapsed_ns = np.empty(len(requests))
    for i, keys in enumerate(requests):
        started_ns = time.perf_counter_ns()
        call(keys)
        elapsed_ns[i] = time.perf_counter_ns() - started_ns
        if pause_s:
            time.sleep(pause_s)
    return elapsed_ns / 1e3


# --- hits -------------------------------------------------------------------------------------------------------------------
def bench_hits(folder: Path, rows: int, rng: np.random.Generator, exponent: float) -> list[dict]:
    """Rows per second of lookups that hit, against numpy.take of the same rows of a plain array."""
    source = write_table(folder, rows, rng)
    plain = np.load(f"{source}/items.npy")
    kinds = {
        "L2 complete fp32": {"l2_rows": rows},
        "L1 over L2, slot index": {"l1_rows": rows // 4, "l2_rows": rows},
        "L2 partial, hashed": {"l2_rows": rows // 10},
        "L2 complete int8": {"l2_rows": rows, "row_format": "int8"},
        "L2 complete int4": {"l2_rows": rows, "row_format": "int4"},
        "L1 over L2 int8": {"l1_rows": rows // 4, "l2_rows": rows, "row_format": "int8"},
    }
    results = []
    for kind, settings in kinds.items():
        with tiers_over(rows, source, **settings) as tiers:
            resident = resident_keys(tiers, rows)
            for batch in (256, 4096, 32768):
                shape = (max(4, 400_000 // batch), batch)
                requests = resident[zipf_keys(len(resident), exponent, shape, rng)]
                out = np.empty((batch, WIDTH), np.float32)
                ways = {
                    "take": lambda keys: plain.take(keys, axis=0),
                    "lookup": lambda keys, tiers=tiers: tiers.lookup("items", keys),
                    "take into": lambda keys, out=out: plain.take(keys, axis=0, out=out, mode="clip"),
                    "lookup into": lambda keys, tiers=tiers, out=out: tiers.lookup("items", keys, out),
                }
                cost_s = seconds_per_call(ways, requests)
                results.append(
                    {
                        "kind": kind,
                        "batch": batch,
                        "rows_per_s": round(batch / cost_s["lookup into"]),
                        "of_take": round(cost_s["take"] / cost_s["lookup"], 3),
                        "of_take_into": round(cost_s["take into"] / cost_s["lookup into"], 3),
                    }
                )
                print(
                    "{kind:24} batch {batch:6}  {rows_per_s:>12,} rows/s  {of_take:.2f} / {of_take_into:.2f} of take".format(
                        **results[-1]
                    )
                )
    return results


def resident_keys(tiers: Tiers, rows: int) -> np.ndarray:
    """int64: those of the keys 0 … rows - 1 that the first level holds."""
    table = tiers._tables["items"]
    slots, resident = table.l1.slots if table.l1 else table.shared.slots, []
    for start in range(0, rows, 1 << 18):
        keys = np.arange(start, min(start + (1 << 18), rows))
        _, missing = slots.read(keys)
        resident.append(keys if missing is None else keys[~missing])
    return np.concatenate(resident)


# --- misses -----------------------------------------------------------------------------------------------------------------
class RawDevice:
    """Random 4 KiB reads of the table file past the page cache, by as many threads as RocksDB is read by."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        self._blocks = os.path.getsize(path) // BLOCK_BYTES
        self._buffers = threading.local()
        self._pool = ThreadPoolExecutor(READ_THREADS)

    def read(self, blocks: np.ndarray) -> None:
        offsets = (blocks % self._blocks * BLOCK_BYTES).tolist()
        parts = [offsets[start : start + KEYS_PER_READ] for start in range(0, len(offsets), KEYS_PER_READ)]
        if len(parts) == 1:
            self._some(parts[0])
        else:
            list(self._pool.map(self._some, parts))

    def _some(self, offsets: list[int]) -> None:
        if not hasattr(self._buffers, "block"):
            self._buffers.block = mmap.mmap(-1, BLOCK_BYTES)
        for offset in offsets:
            os.preadv(self._file, [self._buffers.block], offset)


def bench_misses(folder: Path, rows: int, rng: np.random.Generator, n_requests: int = 300) -> list[dict]:
    """What 1 and 64 missing rows add to a request of 256 keys, against as many raw reads of the device."""
    source, results = write_table(folder, rows, rng), []
    device = RawDevice(f"{source}/items.npy")
    with tiers_over(rows, source, l2_rows=rows // 10) as tiers:
        resident = resident_keys(tiers, rows // 10)
        absent = rng.integers(rows // 5, rows, n_requests * 65)  # beyond what was filled in
        for n_misses in (1, 64):
            hits = rng.choice(resident, (n_requests, KEYS_PER_REQUEST))
            mixed = hits.copy()
            fresh, absent = np.split(absent, [n_requests * n_misses])
            mixed[:, :n_misses] = fresh.reshape(n_requests, n_misses)
            elapsed_us = {"raw": [], "hits": [], "mixed": []}
            for i, missing in enumerate(fresh.reshape(n_requests, n_misses)):
                elapsed_us["raw"] += latencies_us(device.read, missing[None]).tolist()
                elapsed_us["hits"] += latencies_us(lambda keys: tiers.lookup("items", keys), hits[i : i + 1]).tolist()
                elapsed_us["mixed"] += latencies_us(lambda keys: tiers.lookup("items", keys), mixed[i : i + 1]).tolist()
                tiers.settle()
            medians_us = {name: float(np.median(us)) for name, us in elapsed_us.items()}
            added_us, device_us = medians_us["mixed"] - medians_us["hits"], medians_us["raw"]
            results.append(
                {
                    "misses": n_misses,
                    "added_us": round(added_us, 1),
                    "device_us": round(device_us, 1),
                    "ratio": round(added_us / device_us, 2),
                }
            )
            print(
                "{misses:3} misses add {added_us:8.1f} us; the device alone takes {device_us:8.1f} us: {ratio:.2f}".format(
                    **results[-1]
                )
            )
    return results


# --- a table larger than its RAM --------------------------------------------------------------------------------------------
def within_budget(rows: int, budget_bytes: float, l1_share: float) -> dict[str, int]:
    """l1_rows and l2_rows that take `budget_bytes` with their keys, tags, sequence numbers and indices."""
    cached = int(budget_bytes / 70)
    while True:
        table = TableConfig("items", rows, WIDTH, l1_rows=int(l1_share * cached), l2_rows=int((1 - l1_share) * cached))
        if l1_sections(table).nbytes + (l2_sections(table).nbytes if table.l2_rows else 0) <= budget_bytes:
            return {"l1_rows": table.l1_rows, "l2_rows": table.l2_rows}
        cached = int(cached * 0.99)


def bench_big(folder: Path, rows: int, rng: np.random.Generator, exponent: float, n_requests: int = 2500) -> list[dict]:
    """p99 of 256 keys with RAM for 10 % of the table, against the whole table in RAM."""
    source, results = write_table(folder, rows, rng), []
    budget_bytes = 0.1 * rows * ROW_BYTES
    requests = zipf_keys(rows, exponent, (2 * n_requests, KEYS_PER_REQUEST), rng)
    cases = {
        "all in RAM": (1.1, {"l2_rows": rows}),
        "10 % in RAM, waits for misses": (1.1, within_budget(rows, budget_bytes, 0.05)),
        "10 % in RAM, threshold 0.7": (0.7, within_budget(rows, budget_bytes, 1.0)),  # rows that L1 lacks come late: all in L1
    }
    for case, (threshold, settings) in cases.items():
        with tiers_over(rows, source, threshold, **settings) as tiers:
            for keys in requests[:n_requests]:
                tiers.lookup("items", keys)
            tiers.settle()
            before = tiers.metrics().tables["items"]
            us = latencies_us(lambda keys, tiers=tiers: tiers.lookup("items", keys), requests[n_requests:], REST_OF_REQUEST_S)
            after = tiers.metrics().tables["items"]
            asked = after.counts.rows - before.counts.rows
            in_memory = (after.counts.l1_hits + after.counts.l2_hits - before.counts.l1_hits - before.counts.l2_hits) / asked
            late = (after.counts.late - before.counts.late) / asked
        results.append(
            {
                "case": case,
                "ram_share": round((after.l1_bytes + after.l2_bytes) / (rows * ROW_BYTES), 4),
                "memory_hit_rate": round(in_memory, 4),
                "late": round(late, 4),
                "p50_us": round(float(np.percentile(us, 50)), 1),
                "p99_us": round(float(np.percentile(us, 99)), 1),
            }
        )
        results[-1]["p99_ratio"] = round(results[-1]["p99_us"] / results[0]["p99_us"], 2)
        print(
            "{case:30} RAM {ram_share:6.1%}  in memory {memory_hit_rate:.1%}  late {late:.1%}  "
            "p50 {p50_us:7.1f}  p99 {p99_us:7.1f} us  ({p99_ratio} of all in RAM)".format(**results[-1])
        )
    return results


def bench_growth(folder: Path, sizes: list[int], rng: np.random.Generator, n_requests: int = 2000) -> list[dict]:
    """Cost of 256 keys, 95 % of them in memory, as the table grows around a cache of one size."""
    cached, results = min(sizes) // 10, []
    for rows in sizes:
        source = write_table(folder, rows, rng)
        with tiers_over(rows, source, l2_rows=cached) as tiers:
            resident = resident_keys(tiers, cached * 2)
            requests = resident[zipf_keys(len(resident), 1.0, (n_requests, KEYS_PER_REQUEST), rng)]
            n_misses = round(0.05 * KEYS_PER_REQUEST)
            requests[:, :n_misses] = rng.integers(2 * cached, rows, (n_requests, n_misses))
            hits = resident[zipf_keys(len(resident), 1.0, requests.shape, rng)]
            device = RawDevice(f"{source}/items.npy")
            hit_us, us = (
                latencies_us(lambda keys, tiers=tiers: tiers.lookup("items", keys), asked) for asked in (hits, requests)
            )
            device_us = latencies_us(device.read, requests[:500, :n_misses])
        medians_us = {"hits_us": hit_us, "p50_us": us, "device_us": device_us}
        results.append({"rows": rows, **{name: round(float(np.median(us)), 1) for name, us in medians_us.items()}})
        results[-1]["ratio"] = round(results[-1]["p50_us"] / results[0]["p50_us"], 2)
        print(
            "{rows:>11,} rows: p50 {p50_us:8.1f} us ({ratio} of the smallest); all in memory {hits_us:7.1f} us, "
            "raw reads of the missing rows {device_us:8.1f} us".format(**results[-1])
        )
    return results


# --- updates ----------------------------------------------------------------------------------------------------------------
def run_broker(address, stop) -> None:
    from confluent_kafka import Producer

    cluster = Producer({"test.mock.num.brokers": 1, "log_level": 0})
    cluster.list_topics("hps_et.bench.items", timeout=10)
    address.send(",".join(f"{b.host}:{b.port}" for b in cluster.list_topics(timeout=10).brokers.values()))
    stop.wait()


def run_updater(config: TiersConfig, stop) -> None:
    from stages.embeddings.updater import Updater

    updater = Updater(config)
    updater.run(stop)
    updater.close()


def run_publisher(brokers: str, rows: int, go, stop, sent) -> None:
    """UPDATES_PER_S rows a second, in parts of 1/100 s; `sent` gets (key, value, acknowledged at) of one row of each."""
    from stages.embeddings.publisher import Publisher

    publisher, rng, version = Publisher(brokers, "bench", {"items": WIDTH}), np.random.default_rng(1), 0
    go.wait()
    next_s = time.monotonic()
    while not stop.is_set():
        version += 1
        keys = rng.choice(rows, UPDATES_PER_S // 100, replace=False)
        publisher.publish("items", keys, np.full((len(keys), WIDTH), version, np.float32))
        publisher.flush()
        sent.put((int(keys[0]), version, time.monotonic()))
        next_s += 0.01
        time.sleep(max(0.0, next_s - time.monotonic()))


def serve(tiers: Tiers, requests: np.ndarray, seconds: float, watch: Callable[[], None]) -> np.ndarray:
    """Latencies in µs at about half load: every request is followed by a pause as long as the median one takes."""
    pause_s = float(np.median(latencies_us(lambda keys: tiers.lookup("items", keys), requests[:200]))) / 1e6
    us, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s:
        keys = requests[len(us) % len(requests)]
        us.append(latencies_us(lambda keys: tiers.lookup("items", keys), keys[None])[0])
        watch()
        time.sleep(pause_s)
    return np.array(us)


def bench_updates(folder: Path, rows: int, rng: np.random.Generator, exponent: float, seconds: float) -> dict:
    """Time from the producer's acknowledgement to the first lookup that gives the new row, and what updates cost lookups."""
    context = multiprocessing.get_context("spawn")
    source = write_table(folder, rows, rng)
    database = folder / "updated"
    shutil.rmtree(database, ignore_errors=True)
    stop, go, broker_stop, sent = context.Event(), context.Event(), context.Event(), context.Queue()
    ours, theirs = context.Pipe()
    broker = context.Process(target=run_broker, args=(theirs, broker_stop))
    broker.start()
    config = TiersConfig(
        "bench",
        (TableConfig("items", rows, WIDTH, l1_rows=rows // 20, l2_rows=rows),),
        f"bench-updates-{os.getpid()}",
        source=source,
        rocksdb=RocksConfig(str(database), READ_THREADS),
        updates=UpdateConfig(ours.recv()),
    )
    tiers = Tiers(config)
    others = [
        context.Process(target=run_updater, args=(config, stop)),
        context.Process(target=run_publisher, args=(config.updates.brokers, rows, go, stop, sent)),
    ]
    for process in others:
        process.start()
    requests = zipf_keys(rows, exponent, (4000, KEYS_PER_REQUEST), rng)
    pending: list[tuple[int, int, float]] = []
    visible_ms: list[float] = []

    def watch() -> None:
        while not sent.empty():
            pending.append(sent.get())
        if pending:
            values = tiers.lookup("items", np.array([key for key, _, _ in pending]))[:, 0]
            now_s = time.monotonic()
            seen = [value >= version for value, (_, version, _) in zip(values.tolist(), pending, strict=True)]
            visible_ms.extend(1e3 * (now_s - row[2]) for row, there in zip(pending, seen, strict=True) if there)
            pending[:] = [row for row, there in zip(pending, seen, strict=True) if not there]

    time.sleep(3)  # the updater finds its topic
    quiet_us = serve(tiers, requests, seconds, lambda: None)
    go.set()
    serve(tiers, requests, 3, watch)
    visible_ms.clear()
    busy_us = serve(tiers, requests, seconds, watch)
    stop.set()
    for process in others:
        process.join(20)
    broker_stop.set()
    broker.join(20)
    applied = tiers.metrics().tables["items"].updater.rows_applied
    tiers.close()
    result = {
        "rows_applied": applied,
        "visible_p50_ms": round(float(np.percentile(visible_ms, 50)), 1),
        "visible_p99_ms": round(float(np.percentile(visible_ms, 99)), 1),
        "serving_p99_us": round(float(np.percentile(busy_us, 99)), 1),
        "without_updates_p99_us": round(float(np.percentile(quiet_us, 99)), 1),
    }
    result["p99_ratio"] = round(result["serving_p99_us"] / result["without_updates_p99_us"], 2)
    print(
        "updates visible after p50 {visible_p50_ms} ms, p99 {visible_p99_ms} ms; lookups p99 {serving_p99_us} us, "
        "{p99_ratio} of that without ({rows_applied:,} rows applied)".format(**result)
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table that is larger than its RAM")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/bench-tiers"), help="on the SSD to be measured")
    parser.add_argument("--parts", default="hits,misses,big,growth,updates")
    parser.add_argument("--zipf", type=float, default=1.1, help="exponent of the traffic's popularity")
    parser.add_argument("--seconds", type=float, default=10.0, help="of serving with and without updates")
    options = parser.parse_args()
    rng, small = np.random.default_rng(0), min(options.rows, 1_000_000)
    parts = {
        "hits": lambda: bench_hits(options.folder, small, rng, options.zipf),
        "misses": lambda: bench_misses(options.folder, options.rows, rng),
        "big": lambda: bench_big(options.folder, options.rows, rng, options.zipf),
        "growth": lambda: bench_growth(options.folder, sorted({small, options.rows // 5, options.rows} - {0}), rng),
        "updates": lambda: bench_updates(options.folder, min(small, 200_000), rng, options.zipf, options.seconds),
    }
    report = {"rows": options.rows, "zipf": options.zipf}
    for name in options.parts.split(","):
        print(f"\n{name}")
        report[name] = parts[name]()
    print(json.dumps(report, separators=(",", ":")))


if __name__ == "__main__":
    main()
