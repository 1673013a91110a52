"""What keeping answers is worth on a recorded log: `python -m perf.cache --repo … --data online-retail`.

    hit rates   the whole stretch of the log goes through a MemoryCache that lives by the log's own clock, for several ttls
    warming     how many visits find an answer when users were asked for beforehand: of every cluster in turns, or by activity
    time        the same requests to two real servers, in the log's order, in turns: without a cache, with Triton's response
                cache, with ours in memory and in Redis; ours also when it asks for the generation before every answer

What the log's requests were is not recorded, so two readings bound it: `lines` asks once for every line of an invoice (somebody
who looks around, and buys at the end: the purchase is an event when the invoice is through), `visits` once for every invoice.
Where events forget users, a visit is never answered from the cache, for the visit before ended with a purchase.

Every answer is compared with that of the server without a cache. The last line is one line of JSON; the exit code is 1 when an
answer differs.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Self

import numpy as np
import redis
import tritonclient.grpc as grpcclient
import typer
from rich.console import Console
from rich.table import Table

from clients import MemoryCache, Recommender, RedisCache
from clients.cache.base import Cache, Entry
from clients.cache.entries import DIGEST_BYTES, Key
from clients.cache.warm import clusters_of, in_turns, users_of
from clients.models import Recommendations
from perf.command import BROKEN, run
from perf.observe.latency import Latency
from perf.report.results import last_line
from perf.target import own_server
from server.launcher import TritonServer
from server.ports import free_ports
from server.repository import read_config, read_repository, write_config
from stages.contract import ENSEMBLE
from stages.errors import ConfigError, ServerError

TTLS_S = {"1 min": 60, "10 min": 600, "1 h": 3_600, "1 day": 86_400, "7 days": 7 * 86_400}
ANSWER = bytes(240)
WARM_USERS, WARM_CLUSTERS = 500, 50
CACHE_MIB = 64
COUNTED_S = 1.0  # the server counts a moment after it has answered
WARM_UP = 200  # requests before the clock starts, of users that the stretch does not have

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Stretch:
    """Events of the log in time order. user_id, time_s: int64 [N]; ends: bool [N], the last line of its invoice."""

    user_id: np.ndarray
    time_s: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.user_id)

    @property
    def visits(self) -> Stretch:
        """One request for each invoice."""
        return Stretch(self.user_id[self.ends], self.time_s[self.ends], self.ends[self.ends])

    def part(self, start: int, end: int) -> Stretch:
        return Stretch(self.user_id[start:end], self.time_s[start:end], self.ends[start:end])

    def parts(self, count: int) -> list[Stretch]:
        return [self.part(start, end) for start, end in pairwise(np.linspace(0, len(self), count + 1).astype(int).tolist())]


class Clock:
    """The log's."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def read_stretch(data: str, count: int) -> Stretch:
    """The last `count` lines of a data set's log. Lines of one user and instant are one invoice."""
    from export.dataset import load_dataset  # pandas

    log = load_dataset(data).interactions.sort_values(["timestamp", "user_id"], kind="stable").tail(count)
    user_id, time_s = log["user_id"].to_numpy(np.int64), log["timestamp"].to_numpy(np.int64)
    ends = np.append((np.diff(user_id) != 0) | (np.diff(time_s) != 0), True)
    return Stretch(user_id, time_s, ends)


# --- hit rates, by the log's clock
def hit_rate(stretch: Stretch, ttl_s: float, events: bool, warm: list[int] | None = None) -> float:
    """Of the stretch's requests through a cache that holds everything. events: users are forgotten when an invoice ends."""
    clock = Clock()
    clock.now_s = float(stretch.time_s[0])
    cache = MemoryCache(ttl_s, 1 << 30, clock_s=clock)
    for user in warm or ():
        look_up(cache, user)
    hits = 0
    for user, now_s, end in zip(stretch.user_id.tolist(), stretch.time_s.tolist(), stretch.ends.tolist(), strict=True):
        clock.now_s = float(now_s)
        hits += look_up(cache, user)
        if end and events:
            cache.forget([user])
    return hits / len(stretch)


def look_up(cache: MemoryCache, user: int) -> bool:
    """A question without a server: kept when it was not there."""
    key = Key(user, (user % (1 << 63)).to_bytes(DIGEST_BYTES, "little"))
    [token], [value] = cache.read([key], 1)
    if value is None:
        cache.write([Entry(key, token, 1, ANSWER)])
    return value is not None


def hit_rates(stretch: Stretch, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """ttl -> reading -> hit rate"""
    readings = {
        "lines": (stretch, False),
        "lines, events": (stretch, True),
        "visits": (stretch.visits, False),
    }
    rates: dict[str, dict[str, float]] = {}
    for name, ttl_s in TTLS_S.items():
        say(f"hit rates, ttl {name}")
        rates[name] = {reading: hit_rate(part, ttl_s, events) for reading, (part, events) in readings.items()}
    return rates


def warm_rates(stretch: Stretch, repo: Path, ttl_s: float) -> dict[str, float]:
    """Share of the visits within `ttl_s` of the stretch's start that are hits when WARM_USERS users were asked for before."""
    user_ids, activity, vectors = users_of(repo)
    chosen = {
        "nobody": [],
        "by activity": user_ids[:WARM_USERS].tolist(),
        "by cluster": user_ids[in_turns(clusters_of(vectors, WARM_CLUSTERS), activity)[:WARM_USERS]].tolist(),
    }
    visits = stretch.visits
    visits = visits.part(0, int(np.searchsorted(visits.time_s, visits.time_s[0] + ttl_s)))
    return {name: hit_rate(visits, ttl_s, True, users) for name, users in chosen.items()}


# --- time, in turns
@dataclass
class Way:
    """One way of asking. hit: for each request, None where nobody says."""

    name: str
    shop: Recommender
    cache: Cache | None = None
    latency_ns: list[int] = field(default_factory=list)
    hit: list[bool] = field(default_factory=list)
    answers: list[Recommendations] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.shop.close()

    def ask(self, stretch: Stretch) -> None:
        """One request after the other; the users of an invoice that is through are forgotten."""
        for user, end in zip(stretch.user_id.tolist(), stretch.ends.tolist(), strict=True):
            before, started_ns = self.cache.counts.hits if self.cache else 0, time.perf_counter_ns()
            answer = self.shop.recommend(user)
            self.latency_ns.append(time.perf_counter_ns() - started_ns)
            self.answers.append(answer)
            self.hit.append(bool(self.cache) and self.cache.counts.hits > before)
            if end and self.cache:
                self.cache.forget([user])

    def warm_up(self, user_ids: list[int]) -> None:
        for user in user_ids:
            self.shop.recommend(user)
        if self.cache:
            self.cache.forget(user_ids)


def result_of(way: Way, plain: Way, triton_hits: int) -> dict[str, object]:
    taken, without, hit = np.array(way.latency_ns), np.array(plain.latency_ns), np.array(way.hit)
    hits = triton_hits if way.name == "triton" else int(hit.sum())
    split = {"hit_p50_ms": taken[hit], "miss_p50_ms": taken[~hit]} if way.cache else {}
    return {
        "requests": len(taken),
        "hit_rate": hits / len(taken),
        **Latency.of(taken).model_dump(include={"p50_ms", "p95_ms", "p99_ms", "mean_ms"}),
        **{name: float(np.median(values)) / 1e6 if len(values) else None for name, values in split.items()},
        "saved_ms": float(without.mean() - taken.mean()) / 1e6,
        "differing_answers": sum(a != b for a, b in zip(way.answers, plain.answers, strict=True)),
    }


def with_response_cache(repo: Path, folder: Path) -> Path:
    """A copy whose `recommend` asks for Triton's response cache."""
    copy = shutil.copytree(repo, folder / "cached", symlinks=True)
    config = read_config(copy / ENSEMBLE / "config.pbtxt")
    config.response_cache.enable = True
    write_config(copy / ENSEMBLE / "config.pbtxt", config)
    return copy


@contextlib.contextmanager
def own_redis(folder: Path) -> Iterator[str]:
    """-> redis://… of a server of its own on a free port."""
    port = free_ports().grpc
    command = ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    try:
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise ConfigError("There is no redis-server on PATH. Install it (apt-get install redis-server).") from error
    try:
        deadline = time.monotonic() + 10
        with redis.Redis(port=port) as client:
            while True:
                with contextlib.suppress(redis.ConnectionError):
                    if client.ping():
                        break
                if time.monotonic() > deadline:
                    raise ServerError(f"redis-server does not answer on port {port} in 10 s. Look whether it starts by hand.")
                time.sleep(0.05)
        yield f"redis://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(10)


def cache_hits(url: str) -> int:
    time.sleep(COUNTED_S)
    with grpcclient.InferenceServerClient(url) as client:
        return sum(s.inference_stats.cache_hit.count for s in client.get_inference_statistics(ENSEMBLE).model_stats)


def timed(
    readings: dict[str, Stretch], strangers: list[int], repo: Path, rounds: int, say: Callable[[str], None]
) -> dict[str, dict[str, dict]]:
    """-> reading -> way -> figures, each reading in `rounds` consecutive parts."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="perf-cache-")))
        say("two servers and a Redis")
        plain = stack.enter_context(own_server(repo)).grpc_url
        redis_url, cached_repo = stack.enter_context(own_redis(folder)), with_response_cache(repo, folder)
        results = {}
        for reading, stretch in readings.items():
            with contextlib.ExitStack() as of_reading:
                cached = of_reading.enter_context(caching_server(cached_repo)).grpc_url
                ways = [of_reading.enter_context(way) for way in ways_of(plain, cached, redis_url, reading)]
                for way in ways:
                    way.warm_up(strangers)
                before = cache_hits(cached)
                ask_in_turns(ways, stretch.parts(rounds), lambda number, of=reading: say(f"time, {of}, round {number}"))
                hits = cache_hits(cached) - before
                results[reading] = {way.name: result_of(way, ways[0], hits) for way in ways}
        return results


def caching_server(repo: Path) -> TritonServer:
    """One for each reading: what Triton keeps has no end, and the next reading would be answered from it."""
    server = own_server(repo)
    server.cache_bytes = CACHE_MIB << 20
    return server


def ask_in_turns(ways: list[Way], parts: list[Stretch], say: Callable[[int], None]) -> None:
    """Each part of the log in every way, before the next begins; who goes first changes."""
    for number, part in enumerate(parts):
        say(number + 1)
        for way in ways[number % len(ways) :] + ways[: number % len(ways)]:
            way.ask(part)


def ways_of(plain: str, cached: str, redis_url: str, reading: str) -> list[Way]:
    """plain, cached: addresses of the servers without and with Triton's response cache"""
    caches = {
        "memory": MemoryCache(TTLS_S["1 day"]),
        "redis": RedisCache(redis_url, TTLS_S["1 day"], namespace=reading),
        "memory, generation asked": MemoryCache(TTLS_S["1 day"], generation_age_s=0.0),
    }
    ways = [Way("none", Recommender(plain)), Way("triton", Recommender(cached))]
    return ways + [Way(name, Recommender(plain, cache=cache), cache) for name, cache in caches.items()]


# --- telling
def hit_table(rates: dict[str, dict[str, float]], stretch: Stretch) -> Table:
    table = Table(title=f"Hit rates of {len(stretch):,} lines, {len(stretch.visits):,} visits, by the log's clock")
    table.add_column("ttl")
    for reading in next(iter(rates.values())):
        table.add_column(reading, justify="right")
    for name, row in rates.items():
        table.add_row(name, *(f"{rate:.1%}" for rate in row.values()))
    return table


def time_table(reading: str, results: dict[str, dict]) -> Table:
    table = Table(title=f"{reading}, with events; one client, the log's order, milliseconds")
    for column in ("cache", "hit rate", "p50", "p95", "p99", "mean", "a hit", "a miss", "saved per request", "other answers"):
        table.add_column(column, justify="left" if column == "cache" else "right")
    for name, row in results.items():
        keys = ("p50_ms", "p95_ms", "p99_ms", "mean_ms", "hit_p50_ms", "miss_p50_ms", "saved_ms")
        numbers = ["" if row.get(key) is None else f"{row[key]:.2f}" for key in keys]
        table.add_row(name, f"{row['hit_rate']:.1%}", *numbers, str(row["differing_answers"]))
    return table


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="the repository that is served")] = Path("model_repository"),
    data: Annotated[str, typer.Option(help="data set whose log is replayed")] = "online-retail",
    lines: Annotated[int, typer.Option(min=1_000, help="of the end of the log, for the hit rates")] = 60_000,
    requests: Annotated[int, typer.Option(min=100, help="of them, for the times")] = 2_000,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
) -> None:
    """Hit rates by ttl, what warming brings, and the time that caches save on a recorded log."""
    console, say = Console(width=120), Console(stderr=True).print
    read_repository(repo)
    stretch = read_stretch(data, lines)
    rates = hit_rates(stretch, say)
    say("warming")
    warmed = warm_rates(stretch, repo, 86_400)
    strangers = np.setdiff1d(np.arange(1, 4 * WARM_UP), stretch.user_id)[:WARM_UP].tolist()
    readings = {
        "lines": stretch.part(0, requests),
        "visits": stretch.part(requests, len(stretch)).visits.part(0, requests // 4),
    }
    results = timed(readings, strangers, repo, rounds, say)
    console.print(hit_table(rates, stretch), *(time_table(*item) for item in results.items()), sep="\n")
    shares = ", ".join(f"{name} {rate:.1%}" for name, rate in warmed.items())
    console.print(f"visits of the first day that {WARM_USERS} users asked for beforehand make hits: {shares}")
    print(last_line({"perf": "cache", "data": data, "hit_rates": rates, "warmed": warmed, "times": results}))
    if any(row["differing_answers"] for reading in results.values() for row in reading.values()):
        raise typer.Exit(BROKEN)


if __name__ == "__main__":
    run(app, "python -m perf.cache")
