"""The time that keeping answers saves: a log's requests to real servers, in every way of asking, in turns."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import redis

from clients import MemoryCache, Recommender, RedisCache
from clients.cache.base import Cache
from clients.models import Recommendations
from experiments.cache.log import Stretch
from perf.observe.latency import Latency
from perf.target import own_server
from repository.models import read_config, write_config
from server.health import local_client
from server.launcher import TritonServer
from server.ports import free_ports
from serving.contract.errors import ConfigError, ServerError
from serving.contract.tensors import ENSEMBLE

CACHE_MIB = 64
COUNTED_S = 1.0  # the server counts a moment after it has answered
TTL_S = 86_400.0  # of our caches


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
    with local_client(url) as client:
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
        "memory": MemoryCache(TTL_S),
        "redis": RedisCache(redis_url, TTL_S, namespace=reading),
        "memory, generation asked": MemoryCache(TTL_S, generation_age_s=0.0),
    }
    ways = [Way("none", Recommender(plain)), Way("triton", Recommender(cached))]
    return ways + [Way(name, Recommender(plain, cache=cache), cache) for name, cache in caches.items()]
