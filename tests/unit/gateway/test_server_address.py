"""Callers and strangers do not read where the servers are; the log says it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from gateway.app import create_app
from gateway.settings import GatewaySettings
from tests.unit.clients.grpc_double import GrpcDouble
from triton_recommender import AsyncRecommender, Timeouts

QUESTIONS = [
    ("GET", "/v1/recommendations?user=7&fallback=none", None),
    ("POST", "/v1/events", {"user": 7, "item": 1}),
    ("POST", "/v1/events", [{"user": 7, "item": 1}, {"user": 7, "item": 2}]),
    ("PUT", "/v1/items/1", {"price": 2.0}),
    ("GET", "/readyz", None),
]
REFUSAL = "2 of 2 rows are refused • Rows 0, 1: item_id is refused"  # as a server refuses a list of events


@pytest.fixture
def server() -> Iterator[GrpcDouble]:
    double = GrpcDouble(lambda query: [3, 1, 2])
    yield double
    double.stop()


def ask(repo: Path, url: str, questions: list[tuple]) -> list[httpx.Response]:
    """Return the answers of a new gateway in front of the server at `url`."""

    async def ask_all() -> list[httpx.Response]:
        recommender = AsyncRecommender(url, timeouts=Timeouts(5.0, connect=0.5), retries=0)
        app = create_app(repo, recommender, GatewaySettings(deadline_ms=2_000))
        answers = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as http:
            for method, path, body in questions:
                answers.append(await http.request(method, path, json=body))
        await recommender.close()
        return answers

    return asyncio.run(ask_all())


def test_no_answer_names_a_server_that_is_gone_and_the_log_does(repo, server, caplog):
    server.stop()
    for answer in ask(repo, server.url, QUESTIONS):
        assert answer.status_code == 503, answer.text
        assert "localhost" not in answer.text
        assert server.url.partition(":")[2] not in answer.text  # gRPC's own text has the address behind the name
    assert f"No server answers at {server.url}" in caplog.text
    assert f"the server at {server.url} is not ready: No server answers" in caplog.text


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
def test_no_answer_names_a_server_that_fails(repo, server, status):
    for question in QUESTIONS:
        server.failures = [(status, REFUSAL)] * 9
        (answer,) = ask(repo, server.url, [question])
        assert answer.status_code in (400, 502, 503), answer.text
        assert server.url not in answer.text


def test_a_caller_reads_why_a_server_refuses_a_request(repo, server):
    for question in QUESTIONS[:2]:
        server.failures = [(grpc.StatusCode.INVALID_ARGUMENT, "item_id is refused")]
        (answer,) = ask(repo, server.url, [question])
        assert answer.json()["error"]["message"] == "The server refuses this request: item_id is refused"
    server.failures = [(grpc.StatusCode.INVALID_ARGUMENT, REFUSAL)]
    (answer,) = ask(repo, server.url, [QUESTIONS[2]])
    messages = [result["error"]["message"] for result in answer.json()["results"]]
    assert messages == ["The server refuses this request: item_id is refused"] * 2


def test_the_log_says_once_that_a_server_is_not_ready(repo, server, caplog, monkeypatch):
    monkeypatch.setattr("gateway.readiness.KEPT_S", 0.0)
    server.ready = False
    answers = ask(repo, server.url, [QUESTIONS[-1]] * 3)
    assert [answer.status_code for answer in answers] == [503] * 3
    (told,) = answers[0].json()["servers"]
    assert told["reason"] == "it does not answer; the gateway's log has the reason"
    assert caplog.text.count(f"the server at {server.url} is not ready: `recommend` is not ready") == 1
