"""Inferences whose time is over are left alone: tritonserver 2.51 may crash when a call is cancelled."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.unit.clients.grpc_double import GrpcDouble
from tests.waiting import until
from triton_recommender import AsyncRecommender, DeadlineExceeded, Recommender
from triton_recommender.transports import grpc

SLOW_S, PATIENCE_S = 2.0, 0.05


def test_a_blocking_client_cancels_no_late_answer(server):
    with Recommender(server.url, timeouts=20.0, retries=0) as shop:
        shop.signature()
        server.delay_s = SLOW_S
        for _ in range(3):
            with pytest.raises(DeadlineExceeded, match=r"No answer from localhost:\d+ within 0\.0\d+ s"):
                shop.recommend(1, timeout_s=PATIENCE_S)
        until(lambda: server.n_ended == 3)
    assert server.n_cancelled == 0


def test_an_asyncio_client_cancels_no_late_answer_and_none_that_its_caller_gave_up(server):
    async def ask() -> None:
        async with AsyncRecommender(server.url, timeouts=20.0, retries=0) as shop:
            await shop.signature()
            server.delay_s = SLOW_S
            with pytest.raises(DeadlineExceeded, match=r"No answer from localhost:\d+ within 0\.0\d+ s"):
                await shop.recommend(1, timeout_s=PATIENCE_S)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(shop.recommend(1), PATIENCE_S)
            while server.n_ended < 2:
                await asyncio.sleep(0.01)

    asyncio.run(ask())
    assert server.n_cancelled == 0


def ask_once(kind: str, url: str) -> None:
    """Ask with little patience, and close the client at once."""
    if kind == "blocking":
        with Recommender(url, timeouts=20.0, retries=0) as shop:
            shop.signature()
            shop.recommend(1, timeout_s=PATIENCE_S)
            return

    async def ask() -> None:
        async with AsyncRecommender(url, timeouts=20.0, retries=0) as shop:
            await shop.signature()
            await shop.recommend(1, timeout_s=PATIENCE_S)

    asyncio.run(ask())


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_client_that_closes_waits_a_moment_for_late_answers(server, kind, monkeypatch):
    monkeypatch.setattr(grpc, "CLOSE_S", 20.0)  # the machine that runs the tests may be slow
    server.delay_s = SLOW_S
    with pytest.raises(DeadlineExceeded):
        ask_once(kind, server.url)
    assert (server.n_ended, server.n_cancelled) == (1, 0)


def test_a_blocking_client_that_closes_cancels_no_hedged_attempt_that_lost(server, monkeypatch):
    monkeypatch.setattr(grpc, "CLOSE_S", 20.0)
    slow = GrpcDouble(lambda query: [1])
    slow.delay_s = SLOW_S
    with Recommender([slow.url, server.url], timeouts=20.0, hedge_after_s=0.01) as shop:
        shop.recommend(1)
    assert (slow.n_ended, slow.n_cancelled) == (1, 0)
    slow.stop()


def test_an_asyncio_client_that_closes_cancels_no_hedged_attempt_that_lost(server, monkeypatch):
    monkeypatch.setattr(grpc, "CLOSE_S", 20.0)
    slow = GrpcDouble(lambda query: [1])
    slow.delay_s = SLOW_S

    async def ask() -> None:
        async with AsyncRecommender([slow.url, server.url], timeouts=20.0, hedge_after_s=0.01) as shop:
            await shop.recommend(1)

    asyncio.run(ask())
    assert (slow.n_ended, slow.n_cancelled) == (1, 0)
    slow.stop()


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_server_that_hangs_does_not_keep_a_client_open(server, kind, monkeypatch):
    monkeypatch.setattr(grpc, "CLOSE_S", 0.1)
    server.delay_s = 5.0
    began_s = time.monotonic()
    with pytest.raises(DeadlineExceeded):
        ask_once(kind, server.url)
    assert time.monotonic() - began_s < server.delay_s


@pytest.mark.parametrize("kind", ["blocking", "asyncio"])
def test_a_call_that_hangs_is_cancelled_at_last(kind, monkeypatch):
    monkeypatch.setattr(grpc, "LATE_S", 0.1)
    monkeypatch.setattr(grpc, "CLOSE_S", 20.0)
    server = GrpcDouble(lambda query: [1])
    server.delay_s = 2.0
    with pytest.raises(DeadlineExceeded):
        ask_once(kind, server.url)
    until(lambda: server.n_ended == 1)
    server.stop()
    assert server.n_cancelled == 1
