"""Two servers behind one gateway, over real sockets: the second is asked when the first is late.

The client decides which server is asked: tests/unit/clients/test_endpoints.py has the other cases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.__main__ import make_clients
from gateway.app import create_app
from gateway.settings import GatewaySettings
from repository.experiments import start_experiment
from serving.live.experiment import Experiment
from tests.unit.clients.grpc_double import GrpcDouble
from triton_recommender import AsyncRecommender, Timeouts

SLOW, QUICK = [1, 2], [3, 4]  # what each server answers
SLOW_S = 1.0
PATIENT = GatewaySettings(deadline_ms=5_000)


@contextmanager
def two_servers() -> Iterator[tuple[GrpcDouble, GrpcDouble]]:
    """Yield a server that takes a second and one that answers at once."""
    slow, quick = GrpcDouble(lambda query: SLOW), GrpcDouble(lambda query: QUICK)
    slow.delay_s = SLOW_S
    try:
        yield slow, quick
    finally:
        slow.stop()
        quick.stop()


def ask(
    repo: Path,
    urls: list[str],
    hedge_after_s: float | None,
    count: int = 1,
    settings: GatewaySettings = PATIENT,
) -> list[dict]:
    """Return the answers of a new gateway to `count` requests, sent one after the other."""

    async def ask_all() -> list[dict]:
        recommender = AsyncRecommender(urls, timeouts=Timeouts(5.0), hedge_after_s=hedge_after_s)
        app = create_app(repo, recommender, settings)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            answers = [(await http.get("/v1/recommendations", params={"user": "7"})).json() for _ in range(count)]
        await recommender.close()
        return answers

    return asyncio.run(ask_all())


def items_of(answer: dict) -> list[int]:
    return [item["id"] for item in answer["items"]]


def test_a_first_server_that_hangs_costs_popular_items_for_a_moment_only(repo):
    """It does not even say what its model is like."""
    with two_servers() as (slow, quick):
        slow.delay_s = slow.describe_delay_s = 3.0

        async def ask_twice() -> list[dict]:
            recommender = AsyncRecommender([slow.url, quick.url], timeouts=Timeouts(5.0, connect=2.0), hedge_after_s=0.02)
            app = create_app(repo, recommender, GatewaySettings())
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                first = (await http.get("/v1/recommendations", params={"user": "7"})).json()
                await asyncio.sleep(1.5)
                patient = {"x-deadline-ms": "5000"}
                second = (await http.get("/v1/recommendations", params={"user": "7"}, headers=patient)).json()
            await recommender.close()
            return [first, second]

        first, second = asyncio.run(ask_twice())
        assert first["degraded"] == ["gateway_fallback"]
        assert second["degraded"] == []
        assert items_of(second) == QUICK


@pytest.mark.parametrize(("hedge_after_s", "shown"), [(0.05, QUICK), (None, SLOW)], ids=["hedged", "not hedged"])
def test_a_second_server_answers_where_the_first_is_slow(repo, hedge_after_s, shown):
    with two_servers() as (slow, quick):
        (answer,) = ask(repo, [slow.url, quick.url], hedge_after_s)
        assert answer["degraded"] == []
        assert items_of(answer) == shown
        assert len(slow.metadata) == 1
        assert len(quick.metadata) == (hedge_after_s is not None)


def test_a_first_server_that_hangs_is_not_waited_for_with_the_defaults(repo):
    with two_servers() as (hanging, quick):
        settings = GatewaySettings(servers=(quick.url,), deadline_ms=2_000.0)
        hanging.delay_s = 10.0
        answers = ask(repo, [hanging.url, *settings.servers], settings.hedge_after_s, count=2, settings=settings)
        assert [answer["degraded"] for answer in answers] == [[], []]
        assert [items_of(answer) for answer in answers] == [QUICK, QUICK]


def test_a_challenger_is_asked_for_at_the_second_server_where_the_first_is_gone(own_repo):
    """Otherwise an outage of one server looks like failures of the challenger alone, because the champion answers there."""
    start_experiment(own_repo, Experiment("spring", 1, 2, 0.99))
    with two_servers() as (gone, quick):
        gone.stop()
        quick.fake.challengers[2] = lambda query: [5, 4]
        settings = GatewaySettings(servers=(quick.url,), deadline_ms=5_000)

        async def ask_once() -> dict:
            champion, challenger = make_clients(gone.url, settings)
            app = create_app(own_repo, champion, settings, challenger=challenger)
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
                answer = (await http.get("/v1/recommendations", params={"user": "7"})).json()
            await champion.close()
            await challenger.close()
            return answer

        answer = asyncio.run(ask_once())
        assert answer["degraded"] == []
        assert (answer["generation"], items_of(answer)) == (2, [5, 4])
