"""Clients that are forked, and clients that are closed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import triton_recommender
from tests.unit.clients.conftest import ANSWER
from tests.waiting import until
from triton_recommender import AsyncRecommender, InvalidRequest, MemoryCache, Recommender

FORK = """
import os, sys
from triton_recommender import Recommender

with Recommender(sys.argv[1], timeouts=20.0) as shop:
    shop.recommend(1)
    child = os.fork()
    shop.recommend(1)
    if child:
        sys.exit(os.waitpid(child, 0)[1])
"""


def test_a_forked_process_has_connections_of_its_own(http):
    """Otherwise, the bytes of its requests would be mixed with those of its parent."""
    env = os.environ | {"PYTHONPATH": str(Path(triton_recommender.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", FORK, http.url], check=True, timeout=60, env=env)
    assert len(http.connections) == 3
    assert len(set(http.connections)) == 2


def list_calls(shop: Recommender | AsyncRecommender) -> list[Callable[[], Any]]:
    return [
        lambda: shop.recommend(1),
        lambda: shop.recommend_many([1, 2]),
        lambda: shop.observe(1, 2),
        lambda: shop.upsert("item", 2, {"price": 1.0}),
        shop.signature,
        shop.health,
    ]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_closed_client_refuses_calls(protocol, cached, server, http):
    url, cache = {"grpc": server.url, "http": http.url}[protocol], MemoryCache() if cached else None
    with Recommender(url, timeouts=20.0, cache=cache) as shop:
        assert shop.recommend(1) == ANSWER
    shop.close()
    for call in list_calls(shop):
        with pytest.raises(InvalidRequest, match="The client is closed"):
            call()

    async def call_closed() -> None:
        async with AsyncRecommender(url, timeouts=20.0, cache=cache) as shop:
            assert await shop.recommend(1) == ANSWER
        await shop.close()
        for call in list_calls(shop):
            with pytest.raises(InvalidRequest, match="The client is closed"):
                await call()

    asyncio.run(call_closed())


def test_a_call_that_the_client_is_closed_under_does_not_blame_the_server(server):
    with Recommender(server.url, timeouts=20.0) as shop, ThreadPoolExecutor() as threads:
        shop.signature()
        server.delay_s = 1.0
        asked = threads.submit(shop.recommend, 1)
        until(lambda: server.metadata)
        shop.close()
        with pytest.raises(InvalidRequest, match="The client is closed"):
            asked.result()
