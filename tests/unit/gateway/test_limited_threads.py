"""Slow answers of the gateway's own: only so many wait, because work goes on when its caller is gone."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.answers import limited_threads
from gateway.answers.limited_threads import MOST_WAITING, LimitedThreads
from tests.unit.gateway.conftest import Gateway
from triton_recommender import Overloaded


def test_requests_are_refused_while_many_wait():
    goes_on = threading.Event()

    async def ask() -> list:
        threads = LimitedThreads(2, "similar items")
        asked = [asyncio.create_task(threads.run(goes_on.wait, 60)) for _ in range(MOST_WAITING + 3)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        goes_on.set()
        answers = await asyncio.gather(*asked, return_exceptions=True)
        assert await threads.run(lambda: "again") == "again"
        threads.close(wait=True)
        return answers

    answers = asyncio.run(ask())
    assert answers.count(True) == MOST_WAITING
    refused = [answer for answer in answers if isinstance(answer, Overloaded)]
    assert len(refused) == 3
    assert str(refused[0]) == "64 requests for similar items wait already; expected fewer. Try again."


@pytest.mark.parametrize("path", ["/v1/items/3/similar", "/v1/explain?user=7&item=3", "/v1/users/7", "/v1/sessions/a"])
def test_who_is_refused_is_told_when_to_come_again(gateway, monkeypatch, path):
    monkeypatch.setattr(limited_threads, "MOST_WAITING", 0)
    refused = gateway().ask("GET", path)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "RESOURCE_EXHAUSTED"


def test_an_answer_whose_reasons_are_refused_has_none(repo, monkeypatch):
    monkeypatch.setattr(limited_threads, "MOST_WAITING", 0)
    answer = Gateway(repo).recommend(user=7, reasons=True)
    assert answer["degraded"] == []
    assert {item["reasons"] for item in answer["items"]} == {None}
