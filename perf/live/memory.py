"""Compare the memory of a server with live state and of one without it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from perf.figures import Figure
from perf.live.exchange import connect
from perf.live.shop import Shop, open_shop
from perf.load.workload import draw, serialise
from perf.observe import read_memory, sum_mib
from serving.contract.tensors import ENSEMBLE

MORE_MB = 150.0  # bound
MB_PER_MIB = 2**20 / 1e6
EVENTS_PER_REQUEST = 256
ASK_EVERY = 16  # requests of events: answers follow the log, as in a shop, and none has to read all of it at once


def measure(repo: Path, events: int, requests: int, rng: np.random.Generator, progress) -> list[Figure]:
    """Ask a server without live models, then one whose store holds `events`, the same requests; compare their memory."""
    megabytes = {}
    for live in (False, True):
        progress(f"a server {'with' if live else 'without'} live state")
        with open_shop(repo, live) as shop:
            if live:
                observe_many(shop, events, rng)
            ask_many(shop, requests, np.random.default_rng(0))
            megabytes[live] = MB_PER_MIB * sum_mib(read_memory(shop.site.tag or ""))
    return [
        Figure(
            name="memory with live state over without", values=[megabytes[True] - megabytes[False]], unit="MB", at_most=MORE_MB
        ),
        Figure(name="memory without live state", values=[megabytes[False]], unit="MB"),
    ]


def observe_many(shop: Shop, count: int, rng: np.random.Generator) -> None:
    """Post at least `count` events of random users and items, with requests in between."""
    with connect(shop.site.grpc_url) as exchange:
        for number in range(-(-count // EVENTS_PER_REQUEST)):
            users, items = (rng.choice(ids, EVENTS_PER_REQUEST).tolist() for ids in (shop.user_ids, shop.item_ids))
            exchange.ask(shop.encode_observe(users, items))
            if number % ASK_EVERY == 0:
                exchange.ask(shop.encode_recommend(users[0]))


def ask_many(shop: Shop, count: int, rng: np.random.Generator) -> None:
    with connect(shop.site.grpc_url) as exchange:
        for body in serialise(shop.specs[ENSEMBLE], draw(shop.requests, count, rng)):
            exchange.ask(body)
