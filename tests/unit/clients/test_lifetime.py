"""Clients that are forked, made outside of an event loop or closed, and connections that die."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

import triton_recommender
from tests.unit.clients.conftest import ANSWER
from tests.unit.clients.grpc_double import GrpcDouble
from tests.unit.clients.relay import Relay
from tests.waiting import until
from triton_recommender import AsyncRecommender, InvalidRequest, MemoryCache, NoAnswer, Recommender, Timeouts
from triton_recommender.transports import grpc as grpc_transport

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


@pytest.mark.parametrize("ask", [lambda shop: shop.recommend(1), lambda shop: shop.health()], ids=["recommend", "health"])
def test_a_call_that_the_client_is_closed_under_does_not_blame_the_server(ask, server, monkeypatch):
    monkeypatch.setattr(grpc_transport, "CLOSE_S", 0.1)
    with Recommender(server.url, timeouts=20.0) as shop, ThreadPoolExecutor() as threads:
        shop.signature()
        server.delay_s = 1.0
        asked = threads.submit(ask, shop)
        until(lambda: server.metadata)
        shop.close()
        with pytest.raises(InvalidRequest, match="The client is closed"):
            asked.result()


def test_an_asyncio_call_that_the_client_is_closed_under_is_not_taken_for_cancelled(server, monkeypatch):
    """Its caller would end in silence: no `except Exception` catches a CancelledError."""
    monkeypatch.setattr(grpc_transport, "CLOSE_S", 0.1)

    async def close_under_calls(hedge_after_s: float | None) -> list[BaseException | None]:
        shop = AsyncRecommender([server.url, server.url], timeouts=20.0, hedge_after_s=hedge_after_s)
        await shop.signature()
        calls = [asyncio.create_task(call) for call in (shop.recommend(1), shop.observe(1, 2), shop.health())]
        await asyncio.sleep(0.1)
        await shop.close()
        await asyncio.wait(calls)
        assert not any(call.cancelled() for call in calls)
        return [call.exception() for call in calls]

    server.delay_s = 2.0
    for hedge_after_s in (None, 0.01):
        for error in asyncio.run(close_under_calls(hedge_after_s)):
            assert isinstance(error, InvalidRequest)
            assert "The client is closed" in str(error)


def test_an_asyncio_call_that_its_caller_cancels_is_cancelled(server):
    async def cancel() -> None:
        async with AsyncRecommender(server.url, timeouts=20.0) as shop:
            await shop.signature()
            call = asyncio.create_task(shop.recommend(1))
            await asyncio.sleep(0.1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    server.delay_s = 2.0
    asyncio.run(cancel())


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_call_that_would_be_repeated_after_the_client_was_closed_is_refused(protocol, server, http, monkeypatch):
    monkeypatch.setattr("triton_recommender.endpoints.FIRST_PAUSE_S", 1.0)
    monkeypatch.setattr("triton_recommender.endpoints.LONGEST_PAUSE_S", 1.0)
    url, double, failure = {
        "grpc": (server.url, server, (grpc.StatusCode.UNAVAILABLE, "GOAWAY")),
        "http": (http.url, http, (503, "starting")),
    }[protocol]
    double.failures = [failure] * 100
    with Recommender(url, timeouts=20.0, retries=10) as shop, ThreadPoolExecutor() as threads:
        shop.signature()
        asked = threads.submit(shop.recommend, 1)
        until(lambda: len(double.failures) < 100)
        shop.close()
        with pytest.raises(InvalidRequest, match="The client is closed"):
            asked.result()

    async def close_in_pause() -> None:
        shop, left = AsyncRecommender(url, timeouts=20.0, retries=10), len(double.failures)
        await shop.signature()
        asked = asyncio.create_task(shop.recommend(1))
        while len(double.failures) == left:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the refusal arrives
        await shop.close()
        with pytest.raises(InvalidRequest, match="The client is closed"):
            await asked

    asyncio.run(close_in_pause())


def test_a_call_that_would_be_hedged_after_the_client_was_closed_is_refused(http):
    """Over HTTP, closing does not end the first attempt."""

    def answer_late(query):
        time.sleep(5.0)
        return ANSWER

    http.fake.handler = answer_late
    with Recommender([http.url, http.url], timeouts=20.0, hedge_after_s=1.5) as shop, ThreadPoolExecutor() as threads:
        shop.signature()
        asked = threads.submit(shop.recommend, 1)
        until(lambda: http.headers)
        shop.close()
        with pytest.raises(InvalidRequest, match="The client is closed"):
            asked.result()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_an_asyncio_client_may_be_made_outside_of_the_loop_that_uses_it(protocol, server, http):
    """As a module does with its own client."""
    shop = AsyncRecommender({"grpc": server.url, "http": http.url}[protocol], timeouts=20.0)

    async def ask() -> None:
        async with shop:
            assert await shop.recommend(1) == ANSWER

    asyncio.run(ask())


def test_a_dead_connection_that_nobody_closed_is_replaced(monkeypatch):
    """As when a server's machine is gone, and its address leads to another one."""
    monkeypatch.setattr(grpc_transport, "KEEPALIVE_MS", 200)
    monkeypatch.setattr(grpc_transport, "KEEPALIVE_TIMEOUT_MS", 1_000)
    double = GrpcDouble(lambda query: ANSWER)
    relay = Relay(int(double.url.rpartition(":")[2]))
    try:
        with Recommender(relay.url, timeouts=Timeouts(20.0, connect=20.0), retries=0) as shop:
            assert shop.recommend(1) == ANSWER
            relay.silence()

            def is_answered() -> bool:
                try:
                    return shop.recommend(1, timeout_s=1.0) == ANSWER
                except NoAnswer:
                    return False

            assert not is_answered()
            silent_s = time.monotonic()
            until(is_answered)
            assert time.monotonic() - silent_s < 45.0  # gRPC itself notices it after 60 s by chance, or in a quarter of an hour
            assert relay.connections > 1
    finally:
        relay.stop()
        double.stop()


def test_a_server_that_shakes_hands_slowly_is_connected_to():
    """As one that is busy or far away."""
    double = GrpcDouble(lambda query: ANSWER)
    relay = Relay(int(double.url.rpartition(":")[2]), delay_s=1.0)
    try:
        with Recommender(relay.url, timeouts=20.0, retries=0) as shop:
            assert shop.recommend(1) == ANSWER
    finally:
        relay.stop()
        double.stop()
