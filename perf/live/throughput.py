"""Durable events/s of many clients, and the latency of one client beside the disk's own fsync."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from itertools import repeat
from pathlib import Path

import numpy as np

from perf.figures import Figure
from perf.live.after import read_last_sequence
from perf.live.exchange import Exchange, connect
from perf.live.shop import Shop, read_sequences
from perf.load.open_loop import prevent_delays
from perf.observe import Latency
from serving.live.reader import Reader

EVENTS_PER_S = 10_000.0  # a bound, like the next one
ABOVE_FSYNC_MS = 3.0
CLIENTS, EVENTS_PER_REQUEST = 32, 16
BODIES = 64  # requests that a client repeats: without event ids, their events count again each time
FSYNC_BYTES = 4_096
SYNCED_S = 0.5  # how long the disk is timed in each round


def measure(shop: Shop, seconds: float, rounds: int, rng: np.random.Generator, progress: Callable[[str], None]) -> list[Figure]:
    """Return the figures of `rounds` of many clients, of one, and of the disk."""
    rates, alone, synced, missing = [], [], [], 0
    with closing(Reader(shop.live_folder)) as reader:
        for number in range(rounds):
            progress(f"round {number + 1}: {CLIENTS} clients of {EVENTS_PER_REQUEST} events a request")
            before = read_last_sequence(reader)
            count, taken_s = run_clients(shop, seconds, rng)
            rates.append(count / taken_s)
            missing += count - (read_last_sequence(reader) - before)
            progress(f"round {number + 1}: one client, and the disk")
            alone.append(time_one_client(shop, seconds / 2, rng).p50_ms)
            synced.append(time_fsync(shop.live_folder.parent).p50_ms)
    above = [total - disk for total, disk in zip(alone, synced, strict=True)]
    return [
        Figure(name=f"durable events, {CLIENTS} clients", values=rates, unit="/s", at_least=EVENTS_PER_S),
        Figure(name="acknowledged events that the log lacks", values=[float(missing)], at_most=0),
        Figure(name="p50 of one client above the disk's fsync", values=above, unit="ms", at_most=ABOVE_FSYNC_MS),
        Figure(name="p50 of one client", values=alone, unit="ms"),
        Figure(name="p50 of the disk's fsync", values=synced, unit="ms"),
    ]


def draw_requests(shop: Shop, count: int, events: int, rng: np.random.Generator) -> list[bytes]:
    """Return `count` requests of `observe`, each with `events` events of random users and items."""
    users, items = (rng.choice(ids, (count, events)) for ids in (shop.user_ids, shop.item_ids))
    return [shop.encode_observe(*row) for row in zip(users.tolist(), items.tolist(), strict=True)]


def run_clients(shop: Shop, seconds: float, rng: np.random.Generator) -> tuple[int, float]:
    """Let each client send its next request when the last is acknowledged. Return the acknowledged events and the seconds."""
    bodies = [draw_requests(shop, BODIES, EVENTS_PER_REQUEST, rng) for _ in range(CLIENTS)]
    exchanges = [Exchange(shop.site.grpc_url) for _ in range(CLIENTS)]
    try:
        with prevent_delays(), ThreadPoolExecutor(CLIENTS) as pool:
            started_s = time.perf_counter()
            end_s = started_s + seconds
            counts = list(pool.map(run_client, exchanges, bodies, repeat(end_s)))
            return sum(counts), time.perf_counter() - started_s
    finally:
        for exchange in exchanges:
            exchange.close()


def run_client(exchange: Exchange, bodies: list[bytes], end_s: float) -> int:
    """Return how many events were acknowledged until `end_s`."""
    count = 0
    while time.perf_counter() < end_s:
        count += len(read_sequences(exchange.ask(bodies[count // EVENTS_PER_REQUEST % len(bodies)])))
    return count


def measure_latency(taken_ns: list[int]) -> Latency:
    """Return the latency. taken_ns: not empty"""
    latency = Latency.of(np.array(taken_ns))
    assert latency is not None
    return latency


def time_one_client(shop: Shop, seconds: float, rng: np.random.Generator) -> Latency:
    """Time requests of one event, one after the other."""
    taken_ns: list[int] = []
    bodies = draw_requests(shop, BODIES, 1, rng)
    with connect(shop.site.grpc_url) as exchange, prevent_delays():
        end_s = time.perf_counter() + seconds
        while time.perf_counter() < end_s or not taken_ns:
            started_ns = time.perf_counter_ns()
            exchange.ask(bodies[len(taken_ns) % BODIES])
            taken_ns.append(time.perf_counter_ns() - started_ns)
    return measure_latency(taken_ns)


def time_fsync(folder: Path) -> Latency:
    """Time how long the disk takes to make a written block durable, in the folder's file system."""
    taken_ns: list[int] = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        end_s = time.perf_counter() + SYNCED_S
        while time.perf_counter() < end_s or not taken_ns:
            file.write(bytes(FSYNC_BYTES))
            file.flush()
            started_ns = time.perf_counter_ns()
            os.fdatasync(file.fileno())
            taken_ns.append(time.perf_counter_ns() - started_ns)
    return measure_latency(taken_ns)
