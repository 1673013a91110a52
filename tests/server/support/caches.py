"""The client's cache in front of a real server."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tests.unit.tables.redis_server import RedisServer
from triton_recommender import MemoryCache, RedisCache
from triton_recommender.cache.entries import CACHED_OUTPUTS
from triton_recommender.cache.transport import CachedTransport
from triton_recommender.models import Call
from triton_recommender.tensors import RECOMMEND
from triton_recommender.transports.grpc import GrpcTransport

TIMEOUT_S = 20.0
FORGOTTEN = 10  # users, before each pass


def memory_cache() -> MemoryCache:
    """Return a cache that asks for the generation with every request, so that a switch is seen at once."""
    return MemoryCache(ttl_s=3_600, generation_age_s=0.0)


def redis_cache(redis_server: RedisServer, namespace: str) -> RedisCache:
    """Return such a cache that no other test sees."""
    address = f"redis://{redis_server.address}"
    return RedisCache(address, ttl_s=3_600, namespace=namespace, timeout_s=TIMEOUT_S, generation_age_s=0.0)


def ask_each(transport, inputs: dict[str, np.ndarray], rows: Iterable[int]) -> dict[str, np.ndarray]:
    """Make one call for each of the rows. Return the outputs, [R, …]."""
    answers = [transport.infer(Call({name: array[row : row + 1] for name, array in inputs.items()}, TIMEOUT_S)) for row in rows]
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


class CachedQuestions:
    """Requests, asked through caches of either kind and past them. inputs: [R, *dims] by name"""

    def __init__(self, grpc_url: str, inputs: dict[str, np.ndarray], caches: list[MemoryCache | RedisCache]) -> None:
        self._inputs, self._caches, self._rng = inputs, caches, np.random.default_rng(0)
        self._plain = GrpcTransport(grpc_url)
        self._cached = [CachedTransport(GrpcTransport(grpc_url), cache) for cache in caches]
        self._own: dict[int, dict[str, np.ndarray]] = {}
        for transport in self._cached:
            transport.describe(RECOMMEND, TIMEOUT_S)

    def check(self, generation: int) -> None:
        """Ask twice through each cache, which forgets some users before: every answer is the server's own."""
        n_requests = len(self._inputs["user_id"])
        if generation not in self._own:
            self._own[generation] = ask_each(self._plain, self._inputs, range(n_requests))
        for cache, transport in zip(self._caches * 2, self._cached * 2, strict=True):
            cache.forget(self._rng.choice(self._inputs["user_id"][:, 0], FORGOTTEN).tolist())
            rows = self._rng.permutation(n_requests)
            got = ask_each(transport, self._inputs, rows)
            assert got.keys() == set(CACHED_OUTPUTS)
            for name, array in got.items():
                own = self._own[generation][name][rows]
                np.testing.assert_array_equal(array, own, err_msg=f"{name}, generation {generation}")

    def close(self) -> None:
        """The caches answered, and never had to be passed by."""
        for cache in self._caches:
            assert cache.counts.bypassed == cache.counts.failures == 0
            assert cache.counts.hits > 2 * len(self._inputs["user_id"])
        self._plain.close()
        for transport in self._cached:
            transport.close()
