"""Calls of both clients to a server in this process: answers, errors, retries and deadlines."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from server.start.ports import find_free_ports
from tests.pages import serve_page
from tests.present import present
from tests.unit.clients.conftest import ANSWER, both, use
from triton_recommender import (
    DeadlineExceeded,
    Health,
    InvalidRequest,
    MemoryCache,
    ModelNotFound,
    Overloaded,
    Query,
    Recommendations,
    Recommender,
    RecommenderError,
    ServerFault,
    Timeouts,
    Unavailable,
)
from triton_recommender.tensors import Degraded

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "GOAWAY")


@pytest.fixture(params=[b"<html>Welcome</html>", b"{}", b"[1]"])
def web_page(request) -> Iterator[str]:
    """The address of a web server that answers everything with a page, or with JSON of its own."""
    with serve_page(lambda: request.param) as url:
        yield url


def ask(kind: str, url: str, *arguments, settings: dict | None = None, **options) -> Recommendations:
    """Return what recommend() of either client returns on a fresh connection."""
    [answer] = use(kind, url, lambda shop: [lambda: shop.recommend(*arguments, **options)], **(settings or {}))
    return answer


@both
def test_a_call_over_grpc(kind, server):
    context = {"device": "phone", "store": 1, "basket": 9.5}
    answer = ask(kind, server.url, 17850, exclude=[20], context=context, category="bags", among=[30, 10], k=2)
    assert answer.item_ids == (30, 10)
    assert answer.scores == (4.0, 3.0)
    assert answer.degraded == Degraded.RANK | Degraded.RERANK
    assert answer.generation == 2
    sent = server.fake.calls[0].inputs
    assert sent["device"].tolist() == [[b"phone"]]
    assert sent["basket"].tolist() == [[9.5]]
    assert sent["exclude"].tolist() == [[20, -1, -1]]
    assert sent["category"].tolist() == [[b"bags"]]
    assert sent["among"].tolist() == [[30, 10, -1, -1, -1, -1]]
    assert ask(kind, server.url, 17850) == ANSWER


@both
def test_stages_are_timed_for_a_client_that_asks(kind, server):
    stage_ms = {"preprocess": 0.5, "retrieve": 2.0, "rank": 1.25, "rerank": 0.25}
    server.fake.handler = lambda query: Recommendations((3, 1), (0.5, 0.25), stage_ms=stage_ms)
    assert ask(kind, server.url, 1, settings={"timings": True}).stage_ms == stage_ms
    ask(kind, server.url, 1)
    asked, unasked = server.parameters
    assert asked["timings"].bool_param is True
    assert "timings" not in unasked


@both
def test_priority_queue_timeout_and_sizes_reach_the_server(kind, server):
    ask(kind, server.url, 1, settings={"priority": 3, "timeouts": Timeouts(5, queue=0.25)})
    assert server.parameters[0]["priority"].uint64_param == 3
    assert server.parameters[0]["timeout"].int64_param == 250_000


def test_the_signature_is_asked_once_and_again_after_a_refusal(server):
    with Recommender(server.url) as shop:
        shop.recommend(1)
        shop.recommend(2)
        assert server.config_calls == 1
        server.failures = [(grpc.StatusCode.INVALID_ARGUMENT, "expected history of 8")]
        with pytest.raises(InvalidRequest, match="refuses this request: expected history of 8") as caught:
            shop.recommend(3)
        assert present(caught.value.call).inputs["user_id"].tolist() == [[3]]
        shop.recommend(4)
        assert server.config_calls == 2


@both
def test_a_cache_learns_over_grpc_which_generation_answers(kind, server):
    def asked() -> int:
        cache = MemoryCache(generation_age_s=0.0)
        ask(kind, server.url, 1, settings={"cache": cache})
        ask(kind, server.url, 1, settings={"cache": cache})
        return cache.counts.hits + 10 * cache.counts.bypassed

    server.fake.handler = lambda query: Recommendations((30,), (1.0,), generation=2)
    assert asked() == 1
    server.versions = ["1", "2"]  # in the middle of a move
    assert asked() == 20
    server.versions = ["1"]
    assert asked() == 0


@both
def test_unavailable_is_tried_again_inside_the_timeout(kind, server):
    server.failures = [UNAVAILABLE, UNAVAILABLE]
    assert ask(kind, server.url, 1) == ANSWER
    assert len(server.parameters) == 3


@both
def test_retries_end(kind, server):
    server.failures = [UNAVAILABLE] * 3
    with pytest.raises(Unavailable, match="GOAWAY"):
        ask(kind, server.url, 1, settings={"retries": 1})
    assert len(server.parameters) == 2


@both
@pytest.mark.parametrize(
    ("status", "words", "error", "message"),
    [
        (grpc.StatusCode.INVALID_ARGUMENT, "shape", InvalidRequest, "refuses this request: shape"),
        (grpc.StatusCode.NOT_FOUND, "unknown model", ModelNotFound, "does not know the model"),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "", Overloaded, "turned the request away. Send less"),
        (grpc.StatusCode.INTERNAL, "stub died\n\nAt: model.py", ServerFault, r"failed with INTERNAL .it said: stub died\)"),
        (grpc.StatusCode.INTERNAL, "Stub process 'rank_0_0' is not healthy.", ServerFault, r"process died, .*`make serve`"),
        (grpc.StatusCode.UNIMPLEMENTED, "", ServerFault, "failed with UNIMPLEMENTED"),
    ],
)
def test_statuses_become_errors(kind, server, status, words, error, message):
    server.failures = [(status, words)]
    with pytest.raises(error, match=message) as caught:
        ask(kind, server.url, 1)
    assert len(server.parameters) == 1  # no second attempt
    assert isinstance(caught.value, RecommenderError)
    assert present(caught.value.call).inputs["user_id"].tolist() == [[1]]


@pytest.mark.parametrize("words", ["Exceeds maximum queue size", "Request timeout expired"])
def test_a_full_queue_is_not_an_absent_server(server, words):
    server.failures = [(grpc.StatusCode.UNAVAILABLE, words)]
    with pytest.raises(Overloaded, match=words):
        ask("blocking", server.url, 1, settings={"retries": 0})


def test_a_store_that_cannot_be_written_is_not_an_absent_server(server):
    server.failures = [(grpc.StatusCode.UNAVAILABLE, "The live store in shop.live is full at 64 MiB.")]
    with pytest.raises(Unavailable, match=r"saves nothing at present: The live store in shop.live is full at 64 MiB\.$"):
        ask("blocking", server.url, 1, settings={"retries": 0})


@both
def test_the_deadline_ends_the_call(kind, server):
    server.delay_s = 1.0
    with pytest.raises(DeadlineExceeded, match=r"No answer from localhost:\d+ within 0\.[01][0-9]* s"):
        ask(kind, server.url, 1, settings={"timeouts": 0.1})


@both
def test_an_absent_server(kind):
    url = f"localhost:{find_free_ports().grpc}"
    with pytest.raises(Unavailable, match=f"No server answers at {url}.*make run"):
        ask(kind, url, 1)


@both
def test_an_unknown_model(kind, server):
    server.missing.add("recommend")
    with pytest.raises(ModelNotFound, match="unknown model"):
        ask(kind, server.url, 1)


@both
def test_health_is_one_real_question(kind, server):
    def health() -> Health:
        [[said]] = use(kind, server.url, lambda shop: [shop.health])
        return said

    said = health()
    assert (said.url, said.ready, said.generation, said.degraded) == (server.url, True, 2, ANSWER.degraded)
    assert server.fake.queries == [Query(None, None, [], {})]
    server.failures = [(grpc.StatusCode.INTERNAL, "Stub process 'rank_0_0' is not healthy.")]
    assert not health().ready  # although the server says that the model is ready
    server.ready = False
    assert "not ready" in health().reason
    server.stop()
    assert "No server answers" in health().reason


@both
def test_a_server_of_this_machine_is_asked_without_a_proxy(kind, server, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{find_free_ports().grpc}")
    assert ask(kind, server.url, 1).item_ids == ANSWER.item_ids


@both
def test_a_web_page_at_the_address_is_a_fault_of_the_server(kind, web_page):
    with pytest.raises(ServerFault, match="the answer is not JSON"):
        ask(kind, web_page, 1)
