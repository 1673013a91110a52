"""Observe a server under load: latencies, its own counters, cache hit rates, and the memory of its processes."""

from __future__ import annotations

import contextlib
import threading
import time
import urllib.request
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import psutil
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel
from tritonclient.utils import InferenceServerException

from server.processes import find_members
from server.status.health import open_local_client

READINGS = 20  # of the server's counters, at most
BETWEEN_READINGS_S = 0.05


class Latency(BaseModel, frozen=True):
    """Milliseconds over `count` requests."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float

    @classmethod
    def of(cls, latencies_ns: np.ndarray) -> Latency | None:
        """Return the latency of int64 [N] nanoseconds, None when N = 0.

        Percentiles are observed values: the smallest latency that at least q % of the requests did not exceed.
        """
        if len(latencies_ns) == 0:
            return None
        latencies_ms = np.asarray(latencies_ns) / 1e6
        p50_ms, p95_ms, p99_ms = np.percentile(latencies_ms, (50, 95, 99), method="inverted_cdf").tolist()
        return cls(count=len(latencies_ms), mean_ms=float(latencies_ms.mean()), p50_ms=p50_ms, p95_ms=p95_ms, p99_ms=p99_ms)


PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


class StageTimes(BaseModel, frozen=True):
    """Mean microseconds of one request in one model, by phase, and how its calls were batched."""

    requests: int
    failed: int
    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float
    calls_by_batch: dict[int, int]  # batch size -> calls

    @property
    def mean_batch(self) -> float:
        calls = sum(self.calls_by_batch.values())
        return sum(size * count for size, count in self.calls_by_batch.items()) / calls if calls else 0.0


@dataclass(frozen=True)
class Counters:
    """Totals of one model since the server started (all its versions)."""

    count: dict[str, int] = field(default_factory=dict)  # by kind: success, fail, queue, ...
    ns: dict[str, int] = field(default_factory=dict)
    calls_by_batch: dict[int, int] = field(default_factory=dict)


def read_counters(url: str) -> dict[str, Counters]:
    """Return counters by model name, once two readings are equal, or after a second, if others send requests too.

    Triton counts a request only after it has answered it.
    """
    with open_local_client(url) as client:
        last = parse_statistics(client.get_inference_statistics(as_json=True))
        for _ in range(READINGS):
            time.sleep(BETWEEN_READINGS_S)
            before, last = last, parse_statistics(client.get_inference_statistics(as_json=True))
            if last == before:
                break
        return last


def parse_statistics(statistics: dict) -> dict[str, Counters]:
    """Sum the counters of each model over its versions.

    statistics: Triton's ModelStatistics as JSON: numbers are strings, zeros are left out.
    """
    totals: dict[str, Counters] = {}
    for model in statistics.get("model_stats", []):
        into = totals.setdefault(model["name"], Counters())
        for kind, entry in model.get("inference_stats", {}).items():
            into.count[kind] = into.count.get(kind, 0) + int(entry.get("count", 0))
            into.ns[kind] = into.ns.get(kind, 0) + int(entry.get("ns", 0))
        for batch in model.get("batch_stats", []):
            size = int(batch["batch_size"])
            into.calls_by_batch[size] = into.calls_by_batch.get(size, 0) + int(batch["compute_infer"].get("count", 0))
    return totals


def compute_times(before: dict[str, Counters], after: dict[str, Counters]) -> dict[str, StageTimes]:
    """Return the times of the models that were called in between. Those of an ensemble are sums over its steps."""
    return {
        name: times for name, end in after.items() if (times := _compute_difference(before.get(name, Counters()), end)).requests
    }


def read_times_since(before: dict[str, Counters], url: str) -> dict[str, StageTimes]:
    """Return the times of the models that were called since; {} where the server is gone, of which the calls' errors tell."""
    try:
        return compute_times(before, read_counters(url))
    except InferenceServerException:
        return {}


def _compute_difference(start: Counters, end: Counters) -> StageTimes:
    if any(end.count.get(kind, 0) < count for kind, count in start.count.items()):  # a new server, which counts from zero
        start = Counters()

    def count(kind: str) -> int:
        return end.count.get(kind, 0) - start.count.get(kind, 0)

    def compute_mean_us(kind: str) -> float:
        spent_ns = end.ns.get(kind, 0) - start.ns.get(kind, 0)
        return spent_ns / 1e3 / count("success") if count("success") else 0.0

    sizes = {size: n - start.calls_by_batch.get(size, 0) for size, n in end.calls_by_batch.items()}
    return StageTimes(
        requests=count("success") + count("fail"),
        failed=count("fail"),
        **{f"{phase}_us": compute_mean_us(phase) for phase in PHASES},
        calls_by_batch={size: n for size, n in sorted(sizes.items()) if n},
    )


Samples = dict[tuple[str, str], float]
TABLE_ROWS = "recommender_table_rows_total"  # by answering level (serving/tables/measurements.py)
REPORTED_AFTER_S = 2.5  # models publish counts every second (serving/stages/adapter/triton.py)
LEVELS = ("l1", "l2", "l3")


def read_samples(metrics_url: str) -> Samples:
    """Return (metric, labels as text) -> value; nothing when there is no metrics page."""
    try:
        with urllib.request.urlopen(metrics_url, timeout=5) as page:
            return parse_metrics(page.read().decode())
    except OSError:  # urllib's errors are OSErrors too
        return {}


def parse_metrics(text: str) -> Samples:
    """Return every sample of a metrics page in Prometheus's text format."""
    return {
        (sample.name, ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def compute_hit_rates(before: Samples, after: Samples) -> dict[str, float]:
    """Return "cache labels" -> share of lookups between two readings that hit; caches without lookups are left out."""
    rates = compute_table_hit_rates(before, after)
    for (name, labels), hits_after in after.items():
        partner = name.replace("hit", "miss").replace("misss", "misses")
        if "hit" not in name or (partner, labels) not in after:
            continue
        hits = hits_after - before.get((name, labels), 0.0)
        misses = after[partner, labels] - before.get((partner, labels), 0.0)
        if hits + misses > 0:
            cache = name.split("hit")[0].strip("_")
            rates[f"{cache} {labels}".strip()] = hits / (hits + misses)
    return rates


def compute_table_hit_rates(before: Samples, after: Samples) -> dict[str, float]:
    """Return "tables, level" -> share of the rows that reached a level and were found there, over all tables and processes."""
    rows: defaultdict[str, float] = defaultdict(float)
    for (name, labels), value in after.items():
        if name == TABLE_ROWS:
            answer = dict(label.split("=", 1) for label in labels.split(","))["answer"]
            rows[answer] += value - before.get((name, labels), 0.0)
    rates, reached = {}, sum(rows.values())
    for level in LEVELS:
        if reached > 0:
            rates[f"tables, {level}"] = rows[level] / reached
        reached -= rows[level]
    return rates


SAMPLE_EVERY_S = 1.0


class ProcessMemory(BaseModel, frozen=True):
    """MiB of one process, when the sum over all processes was highest."""

    name: str  # tritonserver, the model instance whose stub it is, or the module of a helper
    pid: int
    pss_mib: float  # its own pages, and its part of shared ones
    rss_mib: float


def read_memory(tag: str) -> list[ProcessMemory]:
    """Return the memory of the server's processes by this tag, tritonserver first."""
    entries = []
    for process in find_members(tag):
        with contextlib.suppress(psutil.Error):  # a process may have ended
            full = process.memory_full_info()
            entries.append(
                ProcessMemory(name=_name(process), pid=process.pid, pss_mib=full.pss / 2**20, rss_mib=full.rss / 2**20)
            )
    return sorted(entries, key=lambda entry: (entry.name != "tritonserver", entry.name))


def _name(process: psutil.Process) -> str:
    """Return the model instance of a stub; of other processes, the module that Python runs, or the program.

    The arguments of a stub are its path, the model file, shared memory, …, instance and kind.
    """
    arguments = process.cmdline()
    if not arguments[0].endswith("triton_python_backend_stub"):
        helper = arguments[2] if arguments[1:2] == ["-m"] else ""
        return helper or Path(arguments[0]).name
    model = Path(arguments[1]).parents[1].name
    return next((text for text in arguments[2:] if text.startswith(f"{model}_")), model)


class PeakMemory:
    """Samples in the background: `with PeakMemory(tag) as memory: …; memory.peak`.

    Without a tag (a server that was not started here) the peak stays empty.
    """

    def __init__(self, tag: str | None) -> None:
        self.peak: list[ProcessMemory] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._sample, args=(tag,), daemon=True) if tag else None

    def __enter__(self) -> Self:
        if self._thread:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        if self._thread:
            self._thread.join()

    def _sample(self, tag: str) -> None:
        while True:
            now = read_memory(tag)
            if sum_mib(now) > sum_mib(self.peak):
                self.peak = now
            if self._done.wait(SAMPLE_EVERY_S):
                return


def sum_mib(processes: list[ProcessMemory]) -> float:
    return sum(process.pss_mib for process in processes)
