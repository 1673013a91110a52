"""Check that an answer to `after=<event>` reflects the event, and that the log holds every acknowledged event."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial

import numpy as np

from perf.figures import Figure
from perf.live.exchange import connect
from perf.live.shop import Shop
from perf.live.visible import Probes, ask_first_items
from perf.observe import Latency
from serving.live.reader import Reader

AT_ONCE = 16


def measure(shop: Shop, count: int, rng: np.random.Generator) -> list[Figure]:
    """Let users buy the first item they were shown, `count` times, and check the answer after each purchase."""
    with closing(Reader(shop.live_folder)) as reader:
        first = read_last_sequence(reader)
        with connect(shop.site.grpc_url) as exchange:
            users = shop.draw_users(min(count, len(shop.user_ids)), rng)
            probes = Probes(shop, exchange, ask_first_items(shop, exchange, users))
            user_ids = list(probes.next_item)
            exchange.run_closed_loop(make_purchases(probes, user_ids, count), min(AT_ONCE, len(user_ids)))
        logged = read_last_sequence(reader) - first
    latency = Latency.of(np.array(probes.changed_ns))
    return [
        Figure(name="answers that name an event", values=[float(len(probes.changed_ns))], at_least=count),
        Figure(name="of these without their event", values=[float(probes.stale)], at_most=0),
        Figure(name="acknowledged events that the log lacks", values=[float(count - logged)], at_most=0, at_least=0),
        Figure(name="event to changed answer, 16 at once: p50", values=[latency.p50_ms] if latency else [], unit="ms"),
    ]


def make_purchases(probes: Probes, user_ids: list[int], count: int) -> Iterator[Callable[[Callable[[], None]], None]]:
    """Yield purchases of the users in turn, so that a user's next one begins when most likely the last one was answered."""

    def buy(user_id: int, on_done: Callable[[], None]) -> None:
        probes.buy(user_id, time.perf_counter_ns(), on_done)

    for number in range(count):
        yield partial(buy, user_ids[number % len(user_ids)])


def read_last_sequence(reader: Reader) -> int:
    with reader.snapshot() as snapshot:
        return snapshot.read_progress().last_sequence
