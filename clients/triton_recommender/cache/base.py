"""The interface of a cache of answers, by request.

    read(keys, generation) ─▶ tokens, values         token: the user's current one; it changes when the user is forgotten
    write([(key, token, generation, value)])         with the token that was read before the request was sent

A value is valid only while the token that it is stored with is still the user's token. So an answer that was computed before
an event and is written after it is never read. This needs no locks, and holds in whatever order writers come. A lost token
(evicted or expired, or after a restart) is replaced by a new one, which only costs misses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from threading import Lock
from typing import NamedTuple

from triton_recommender.cache.entries import Key
from triton_recommender.errors import InvalidRequest


class Lookup(NamedTuple):
    """The result of a read, one element per key. tokens: of the keys' users; values: None where no answer is valid"""

    tokens: list[bytes]
    values: list[bytes | None]


class Entry(NamedTuple):
    """An answer to store. token: the user's, as the read before the request returned it"""

    key: Key
    token: bytes
    generation: int  # of the answer itself
    value: bytes


@dataclass
class Counts:
    """Counts since the cache was made. Each requested user counts as one of hits, misses, joined and bypassed.

    joined: waited for an equal request
    bypassed: asked the server without the cache, because it did not answer or the served generation was unknown
    stored: answers kept; degraded: answers by a fallback, which are not kept
    forgotten: users; failures: calls of the cache that its store did not answer
    """

    hits: int = 0
    misses: int = 0
    joined: int = 0
    bypassed: int = 0
    stored: int = 0
    degraded: int = 0
    forgotten: int = 0
    failures: int = 0
    _lock: Lock = field(default_factory=Lock, repr=False, compare=False)

    def add(self, **counts: int) -> None:
        with self._lock:
            for name, count in counts.items():
                setattr(self, name, getattr(self, name) + count)

    @property
    def hit_rate(self) -> float:
        """Share of hits among all requested users; 0 before the first."""
        requested = self.hits + self.misses + self.joined + self.bypassed
        return self.hits / requested if requested else 0.0

    def as_dict(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if not name.startswith("_")}


class Cache(ABC):
    """A cache of answers, safe to share between threads and between clients of one shop.

    ttl_s: lifetime of an answer; generation_age_s: how long a client relies on the served generation before it asks again
    """

    def __init__(self, ttl_s: float, generation_age_s: float) -> None:
        self.ttl_s = _check_seconds("ttl_s", ttl_s)
        self.generation_age_s = _check_seconds("generation_age_s", generation_age_s, may_be_zero=True)
        self.counts = Counts()

    @abstractmethod
    def read(self, keys: Sequence[Key], generation: int) -> Lookup | None:
        """Return the users' tokens, and a generation's cached answers to these requests; None if the store does not answer."""

    @abstractmethod
    def write(self, entries: Sequence[Entry]) -> None:
        """Store answers. If the store fails, they are lost, and `failures` counts it."""

    @abstractmethod
    def forget(self, user_ids: Iterable[int]) -> None:
        """Invalidate all answers computed for these users so far. Raises CacheUnavailable when that is not certain."""

    # A cache that waits for a server or a disk must override these three: they would block the event loop.
    async def read_async(self, keys: Sequence[Key], generation: int) -> Lookup | None:
        """See read."""
        return self.read(keys, generation)

    async def write_async(self, entries: Sequence[Entry]) -> None:
        """See write."""
        self.write(entries)

    async def forget_async(self, user_ids: Iterable[int]) -> None:
        """See forget."""
        self.forget(user_ids)

    def collect(self) -> Iterator:
        """Yield the counts for Prometheus: `prometheus_client.REGISTRY.register(cache)` publishes them."""
        from prometheus_client.core import CounterMetricFamily  # imported late, because only publishing needs it

        for name, value in self.counts.as_dict().items():
            yield CounterMetricFamily(f"recommendation_cache_{name}", f"{name}: see triton_recommender.cache.Counts", value)


def _check_seconds(name: str, value: float, may_be_zero: bool = False) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (0 < value < float("inf") or (may_be_zero and value == 0)):
        raise InvalidRequest(f"{name} is {value!r}; expected seconds {'from' if may_be_zero else 'above'} 0.")
    return float(value)
