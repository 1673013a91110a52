"""Where the server spent its time between two moments, by model, from its own counters."""

from __future__ import annotations

from dataclasses import dataclass, field

from pydantic import BaseModel

from server.health import local_client

PHASES = ("queue", "compute_input", "compute_infer", "compute_output")


class StageTimes(BaseModel, frozen=True):
    """Mean microseconds of one request in one model, by phase, and how its kernel calls were batched."""

    requests: int
    failed: int
    queue_us: float
    compute_input_us: float
    compute_infer_us: float
    compute_output_us: float
    calls_by_batch: dict[int, int]  # batch size -> kernel calls
    cache_hits: int = 0
    cache_misses: int = 0

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
    """-> counters by model name."""
    with local_client(url) as client:
        return parse(client.get_inference_statistics(as_json=True))


def parse(statistics: dict) -> dict[str, Counters]:
    """`statistics` is Triton's ModelStatistics as JSON: numbers are strings, zeros are left out."""
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


def between(before: dict[str, Counters], after: dict[str, Counters]) -> dict[str, StageTimes]:
    """-> models that answered anything in between. The ensemble's own times are the sums over its steps: left out there."""
    return {name: times for name, end in after.items() if (times := _difference(before.get(name, Counters()), end)).requests}


def _difference(start: Counters, end: Counters) -> StageTimes:
    def count(kind: str) -> int:
        return end.count.get(kind, 0) - start.count.get(kind, 0)

    def mean_us(kind: str) -> float:
        spent_ns = end.ns.get(kind, 0) - start.ns.get(kind, 0)
        return spent_ns / 1e3 / count("success") if count("success") else 0.0

    sizes = {size: n - start.calls_by_batch.get(size, 0) for size, n in end.calls_by_batch.items()}
    return StageTimes(
        requests=count("success") + count("fail"),
        failed=count("fail"),
        **{f"{phase}_us": mean_us(phase) for phase in PHASES},
        calls_by_batch={size: n for size, n in sorted(sizes.items()) if n},
        cache_hits=count("cache_hit"),
        cache_misses=count("cache_miss"),
    )
