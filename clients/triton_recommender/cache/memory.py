"""A cache in the memory of one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from threading import Lock

from cachetools import LRUCache, TTLCache

from triton_recommender.cache.base import Cache, Entry, Lookup
from triton_recommender.cache.entries import Key
from triton_recommender.errors import InvalidRequest

MIB = 1 << 20
ENTRY_BYTES = 1_100  # upper bound of the overhead of an answer and its token, with the spare room of dictionaries


class MemoryCache(Cache):
    """Keep answers in this process, and evict the least recently used.

    max_bytes: of all answers together, overhead included
    clock_s: the clock that measures ttl_s; a replay passes that of its log
    """

    def __init__(
        self,
        ttl_s: float = 300.0,
        max_bytes: int = 64 * MIB,
        *,
        generation_age_s: float = 1.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ttl_s, generation_age_s)
        if max_bytes < MIB:
            raise InvalidRequest(f"max_bytes is {max_bytes!r}; expected {MIB:,} (1 MiB) or more.")
        self._answers: TTLCache = TTLCache(max_bytes, ttl_s, timer=clock_s, getsizeof=_measure_bytes)
        self._tokens: LRUCache = LRUCache(max_bytes // ENTRY_BYTES)
        self._numbers = count()
        self._lock = Lock()

    def read(self, keys: Sequence[Key], generation: int) -> Lookup:
        with self._lock:
            tokens = [self._get_token(key.user_id) for key in keys]
            cached = [self._answers.get((key, generation)) for key in keys]
        values = [entry[1] if entry and entry[0] == token else None for entry, token in zip(cached, tokens, strict=True)]
        return Lookup(tokens, values)

    def write(self, entries: Sequence[Entry]) -> None:
        with self._lock:
            for entry in entries:
                self._answers[entry.key, entry.generation] = entry.token, entry.value
        self.counts.add(stored=len(entries))

    def forget(self, user_ids: Iterable[int]) -> None:
        users = set(user_ids)
        with self._lock:
            for user_id in users:
                self._tokens.pop(user_id, None)
        self.counts.add(forgotten=len(users))

    def _get_token(self, user_id: int) -> bytes:
        token = self._tokens.get(user_id)
        if token is None:
            token = self._tokens[user_id] = next(self._numbers).to_bytes(8, "little")
        return token


def _measure_bytes(entry: tuple[bytes, bytes]) -> int:
    return ENTRY_BYTES + len(entry[1])
