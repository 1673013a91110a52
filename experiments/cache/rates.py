"""Hit rates of a log through a MemoryCache that lives by the log's own clock: no server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from clients import MemoryCache
from clients.cache.base import Entry
from clients.cache.entries import DIGEST_BYTES, Key
from clients.cache.warm import clusters_of, in_turns, users_of
from experiments.cache.log import Stretch

TTLS_S = {"1 min": 60, "10 min": 600, "1 h": 3_600, "1 day": 86_400, "7 days": 7 * 86_400}
ANSWER = bytes(240)
WARM_USERS, WARM_CLUSTERS = 500, 50


class Clock:
    """The log's."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


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
