"""A real Redis, both kinds of cache, and a shop whose answers can be told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from threading import Event

import pytest

from triton_recommender import AsyncRecommender, Degraded, MemoryCache, Query, Recommendations, Recommender, RedisCache
from triton_recommender.testing import FakeTransport

WAIT_S = 20.0  # for what must happen; far more than it takes


@pytest.fixture(params=["memory", "redis"])
def make_cache(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[..., MemoryCache | RedisCache]:
    """make_cache(ttl_s=…) -> an empty cache; the generation is asked with every request unless said otherwise."""

    def make(**settings):
        settings = {"generation_age_s": 0.0} | settings
        if request.param == "memory":
            return MemoryCache(**settings)
        server = request.getfixturevalue("redis_server")
        return RedisCache(f"redis://{server.address}", namespace=str(tmp_path), timeout_s=WAIT_S, **settings)

    return make


@pytest.fixture
def cache(make_cache) -> MemoryCache | RedisCache:
    return make_cache()


class Shop(FakeTransport):
    """A server whose answers say who asked, in which state of the world, and as which generation.

    version: of the world: an event is `shop.version += 1`;  gate: set while the server answers;  arrived: a question is there
    """

    def __init__(self, items_returned: int = 6) -> None:
        context = {"store": "INT64", "device": "BYTES", "basket": "FP32"}
        super().__init__(self._say, history=3, exclusions=2, items_returned=items_returned, context=context)
        self.version, self.degraded = 0, Degraded.NONE
        self.gate, self.arrived, self.error = Event(), Event(), None
        self.gate.set()

    def _say(self, query: Query) -> Recommendations:
        user = int(query.user_id or 0)
        items = (user * 100 + 10 + self.version, user * 100 + 20, user * 100 + 30)
        return Recommendations(items, (3.0, 2.0, 1.0), self.degraded, self.served_generation)

    def infer(self, call):
        outputs = self.answer(call)  # the server decides now, and the answer takes its time
        self.arrived.set()
        assert self.gate.wait(WAIT_S)
        if self.error is not None:
            raise self.error
        return outputs

    @property
    def asked(self) -> list[int]:
        """Users the server was asked for, in order."""
        return [user for call in self.calls for user in call.inputs["user_id"][:, 0].tolist()]


class AsyncShop:
    """The same shop for asyncio."""

    url = "fake"

    def __init__(self, shop: Shop) -> None:
        self.shop = shop

    async def describe(self, model, timeout_s):
        return self.shop.describe(model, timeout_s)

    async def read_generation(self, timeout_s):
        return self.shop.read_generation(timeout_s)

    async def infer(self, call):
        outputs = self.shop.answer(call)
        self.shop.arrived.set()
        while not self.shop.gate.is_set():
            await asyncio.sleep(0.001)
        if self.shop.error is not None:
            raise self.shop.error
        return outputs


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture(params=["blocking", "asyncio"])
def recommend(request: pytest.FixtureRequest, shop: Shop, cache) -> Callable[..., list[Recommendations]]:
    """recommend(queries, k=…) -> answers, by either client over the same shop and cache; each call connects anew."""

    def ask(queries, **options):
        if request.param == "blocking":
            return Recommender(transport=shop, cache=cache).recommend_many(queries, **options)

        async def call():
            try:
                return await AsyncRecommender(transport=AsyncShop(shop), cache=cache).recommend_many(queries, **options)
            finally:
                if isinstance(cache, RedisCache):
                    await cache.close_async()  # its connections belong to this loop

        return asyncio.run(call())

    return ask
