"""Measure hit rates and latencies of answer caches on a recorded log.

    python -m experiments.cache --repo … --data online-retail

    hit rates   a stretch of the log goes through a MemoryCache that lives by the log's own clock, for several ttls
    warming     hit rate of the first day's visits after warming with the users who were most active before the stretch
    time        the same requests, in the log's order, to two real servers in turns: without a cache, with Triton's response
                cache, with ours in memory and in Redis, and with ours in memory that asks for the generation each time

The log holds purchases, not requests, so two readings bound how many requests there were: `lines` has one for every line of an
invoice (somebody browses, and buys at the end), `visits` one per invoice. With events, the cache forgets a user when the user's
invoice ends.

Every answer is compared with that of the server without a cache.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import typer
from rich.console import Console

from experiments.fault_backends import RedisNode
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from perf.command import run
from perf.observe import Latency
from perf.target import own_server
from repository.triton.models import read_config, read_repository, write_config
from server.status.health import open_local_client
from serving.contract.tensors import ENSEMBLE
from triton_recommender import MemoryCache, Recommender, RedisCache
from triton_recommender.cache.base import Cache, Entry
from triton_recommender.cache.entries import DIGEST_BYTES, Key
from triton_recommender.models import Recommendations

TTLS_S = {"1 min": 60, "10 min": 600, "1 h": 3_600, "1 day": 86_400, "7 days": 7 * 86_400}
ANSWER = bytes(240)  # in place of a real one
WARM_USERS = 500
WARM_UP = 200  # requests before the clock starts, of users that the stretch does not have
CACHE_MIB = 64
COUNTED_S = 1.0  # the server counts a moment after it has answered
TTL_S = 86_400.0  # of our caches while times are measured

Report = Callable[[str], None]


@dataclass(frozen=True)
class Stretch:
    """Events of a log in time order. user_id, time_s: int64 [N]; ends: bool [N], the last line of its invoice."""

    user_id: np.ndarray
    time_s: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.user_id)

    @property
    def visits(self) -> Stretch:
        """One request per invoice."""
        return Stretch(self.user_id[self.ends], self.time_s[self.ends], self.ends[self.ends])

    def take(self, start: int, end: int) -> Stretch:
        return Stretch(self.user_id[start:end], self.time_s[start:end], self.ends[start:end])

    def split(self, count: int) -> list[Stretch]:
        return [self.take(start, end) for start, end in pairwise(np.linspace(0, len(self), count + 1).astype(int).tolist())]


def read_stretch(data: str, count: int) -> tuple[Stretch, np.ndarray]:
    """Read the last `count` lines of a data set's log. Lines of one user and instant are one invoice.

    Also return the users of the lines before, int64 [U], the most active first: who warms a cache does not know who will come.
    """
    from training.dataset import load_dataset  # pandas

    log = load_dataset(data).interactions.sort_values(["timestamp", "user_id"], kind="stable")
    user_id, time_s = log["user_id"].to_numpy(np.int64), log["timestamp"].to_numpy(np.int64)
    earlier_ids, activity = np.unique(user_id[:-count], return_counts=True)
    user_id, time_s = user_id[-count:], time_s[-count:]
    ends = np.append((np.diff(user_id) != 0) | (np.diff(time_s) != 0), True)
    return Stretch(user_id, time_s, ends), earlier_ids[np.argsort(-activity, kind="stable")]


def replay_hit_rate(stretch: Stretch, ttl_s: float, events: bool, warm: list[int] | None = None) -> float:
    """Return the hit rate of a cache that holds everything. events: users are forgotten when an invoice ends."""
    now_s = float(stretch.time_s[0])
    cache = MemoryCache(ttl_s, 1 << 30, clock_s=lambda: now_s)
    for user in warm or ():
        read_or_write(cache, user)
    hits = 0
    for user, time_s, end in zip(stretch.user_id.tolist(), stretch.time_s.tolist(), stretch.ends.tolist(), strict=True):
        now_s = float(time_s)
        hits += read_or_write(cache, user)
        if end and events:
            cache.forget([user])
    return hits / len(stretch)


def read_or_write(cache: MemoryCache, user: int) -> bool:
    """Return whether the user's answer was cached; cache one where it was not."""
    key = Key(user, (user % (1 << 63)).to_bytes(DIGEST_BYTES, "little"))
    [token], [value] = cache.read([key], 1)
    if value is None:
        cache.write([Entry(key, token, 1, ANSWER)])
    return value is not None


def measure_hit_rates(stretch: Stretch) -> list[Figure]:
    readings = {"lines": (stretch, False), "lines with events": (stretch, True), "visits": (stretch.visits, False)}
    return [
        Figure(name=f"hit rate, {reading}, ttl {name}", values=[replay_hit_rate(part, ttl_s, events)])
        for name, ttl_s in TTLS_S.items()
        for reading, (part, events) in readings.items()
    ]


def measure_warming(stretch: Stretch, active_ids: np.ndarray) -> list[Figure]:
    """Return the share of the first day's visits that are hits, by the users that the cache was warmed with.

    active_ids: int64 [U], users before the stretch, the most active first
    """
    chosen = {"nobody": [], f"{WARM_USERS} users by activity": active_ids[:WARM_USERS].tolist()}
    visits, day_s = stretch.visits, TTLS_S["1 day"]
    visits = visits.take(0, int(np.searchsorted(visits.time_s, visits.time_s[0] + day_s)))
    name = "hit rate of the first day's visits, warmed with"
    return [Figure(name=f"{name} {group}", values=[replay_hit_rate(visits, day_s, True, ids)]) for group, ids in chosen.items()]


@dataclass
class Way:
    """One way to ask. hits: bool per request, for our caches; those of Triton's cache are counted by the server."""

    name: str
    client: Recommender
    cache: Cache | None = None
    latencies_ns: list[int] = field(default_factory=list)
    hits: list[bool] = field(default_factory=list)
    answers: list[Recommendations] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()

    def _count_hits(self) -> int:
        return self.cache.counts.hits if self.cache else 0

    def ask(self, stretch: Stretch) -> None:
        """Send one request after the other; forget the users of an invoice that has ended."""
        for user, end in zip(stretch.user_id.tolist(), stretch.ends.tolist(), strict=True):
            before, started_ns = self._count_hits(), time.perf_counter_ns()
            answer = self.client.recommend(user)
            self.latencies_ns.append(time.perf_counter_ns() - started_ns)
            self.answers.append(answer)
            self.hits.append(self._count_hits() > before)
            if end and self.cache:
                self.cache.forget([user])

    def warm_up(self, user_ids: list[int]) -> None:
        for user in user_ids:
            self.client.recommend(user)
        if self.cache:
            self.cache.forget(user_ids)


def measure_times(
    readings: dict[str, Stretch], strangers: list[int], repo: Path, rounds: int, report: Report
) -> tuple[list[Figure], int]:
    """Return the figures of every reading and way, and how many answers differ from those without a cache."""
    figures, differing = [], 0
    with contextlib.ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory(prefix="cache-")))
        report("two servers and a Redis")
        plain_url = running.enter_context(own_server(repo)).grpc_url
        node = running.enter_context(RedisNode(folder, in_cluster=False))
        redis_url, cached_repo = f"redis://{node.address}", copy_with_response_cache(repo, folder)
        for reading, stretch in readings.items():
            with contextlib.ExitStack() as while_reading:
                server = own_server(cached_repo)  # a new one per reading: Triton's cache never expires
                server.cache_bytes = CACHE_MIB << 20
                cached_url = while_reading.enter_context(server).grpc_url
                ways = [while_reading.enter_context(way) for way in make_ways(plain_url, cached_url, redis_url, reading)]
                for way in ways:
                    way.warm_up(strangers)
                before = read_cache_hits(cached_url)
                for number, part in enumerate(stretch.split(rounds)):
                    report(f"time, {reading}, round {number + 1}")
                    for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
                        way.ask(part)
                triton_hits = read_cache_hits(cached_url) - before
                for way in ways:
                    figures += make_figures(reading, way, ways[0], triton_hits)
                    differing += sum(a != b for a, b in zip(way.answers, ways[0].answers, strict=True))
    return figures, differing


def make_figures(reading: str, way: Way, plain: Way, triton_hits: int) -> list[Figure]:
    latencies_ns, plain_ns, hits = np.array(way.latencies_ns), np.array(plain.latencies_ns), np.array(way.hits)
    latency, name = Latency.of(latencies_ns), f"{reading}, {way.name}"
    assert latency is not None  # it was asked
    n_hits = triton_hits if way.name == "Triton's cache" else int(hits.sum())
    times_ms = {"p50": latency.p50_ms, "p99": latency.p99_ms, "mean": latency.mean_ms}
    if way.cache and hits.any() and not hits.all():
        times_ms |= {"p50 of a hit": np.median(latencies_ns[hits]) / 1e6, "p50 of a miss": np.median(latencies_ns[~hits]) / 1e6}
    times_ms["saved per request, mean"] = (plain_ns.mean() - latencies_ns.mean()) / 1e6
    figures = [Figure(name=f"{name}: {title}", values=[float(ms)], unit="ms") for title, ms in times_ms.items()]
    return [Figure(name=f"{name}: hit rate", values=[n_hits / len(latencies_ns)]), *figures]


def make_ways(plain_url: str, cached_url: str, redis_url: str, reading: str) -> list[Way]:
    caches = {
        "ours in memory": MemoryCache(TTL_S),
        "ours in Redis": RedisCache(redis_url, TTL_S, namespace=reading),
        "ours in memory, generation asked": MemoryCache(TTL_S, generation_age_s=0.0),
    }
    ways = [Way("no cache", Recommender(plain_url)), Way("Triton's cache", Recommender(cached_url))]
    return ways + [Way(name, Recommender(plain_url, cache=cache), cache) for name, cache in caches.items()]


def copy_with_response_cache(repo: Path, folder: Path) -> Path:
    copy = shutil.copytree(repo, folder / "cached", symlinks=True)
    config = read_config(copy / ENSEMBLE / "config.pbtxt")
    config.response_cache.enable = True
    write_config(copy / ENSEMBLE / "config.pbtxt", config)
    return copy


def read_cache_hits(url: str) -> int:
    time.sleep(COUNTED_S)
    with open_local_client(url) as client:
        return sum(s.inference_stats.cache_hit.count for s in client.get_inference_statistics(ENSEMBLE).model_stats)


def main(
    repo: Annotated[Path, typer.Option(help="the repository that is served")] = Path("model_repository"),
    data: Annotated[str, typer.Option(help="data set whose log is replayed")] = "online-retail",
    lines: Annotated[int, typer.Option(min=100, help="lines at the end of the log, for the hit rates")] = 60_000,
    requests: Annotated[int, typer.Option(min=40, help="how many of these lines, for the times")] = 2_000,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure hit rates by ttl, the effect of warming, and the time that caches save. Exit code 1 when an answer differs."""
    machine, report = read_machine(), Console(stderr=True).print
    read_repository(repo)
    stretch, active_ids = read_stretch(data, lines)
    report("hit rates, and warming")
    figures = measure_hit_rates(stretch) + measure_warming(stretch, active_ids)
    strangers = np.setdiff1d(np.arange(1, 4 * WARM_UP), stretch.user_id)[:WARM_UP].tolist()
    readings = {
        "lines": stretch.take(0, requests),
        "visits": stretch.take(requests, len(stretch)).visits.take(0, requests // 4),
    }
    times, differing = measure_times(readings, strangers, repo, rounds, report)
    sizes = f"--lines {lines} --requests {requests} --rounds {rounds}"
    title, command = "Caches of answers on a recorded log", f"python -m experiments.cache --repo {repo} --data {data} {sizes}"
    conditions = f"{data}: the last {lines:,} lines; times of {requests:,} lines and of {requests // 4:,} visits, one client"
    text = f"{differing} of them" if differing else ""
    finish("cache", title, command, conditions, figures + times, results, machine, text)


if __name__ == "__main__":
    run(main, "python -m experiments.cache")
