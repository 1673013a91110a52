"""The gateway in front of a real tritonserver: started and stopped with it, observed, and answering when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpc

from export.relayout import relayout
from gateway import schema
from gateway.app import create_app
from gateway.settings import GatewaySettings
from live.exposures import SOURCE_NAMES, read_exposures
from perf.observe import read_samples
from repository.applied_rules import apply_rules, revert_rules
from repository.experiments import change_share, end_experiment, find_experiment_folder, start_experiment
from server.generations.challenger import load_challenger, unload_challenger
from server.helpers import gateway
from server.status.health import open_local_client
from serving.contract.tensors import STAGES
from serving.live.experiment import Experiment
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.rules.config import RulesConfig
from tests.monitoring import BACKEND_METRICS, GPU_METRICS, metric_names, named_metrics
from tests.repositories import small_repository
from tests.server.support.gateways import USER, Served, Visitors, served_gateway
from tests.server.support.otlp import Collector, collecting
from tests.server.support.requests import infer, tensor
from tests.server.test_publication import with_rules
from tests.waiting import until
from triton_recommender import AsyncRecommender

STAGE_NAMES = {"preprocess", "retrieve", "rank", "rerank"}
SPANS_S = 120.0  # tritonserver sends its spans every 5 s


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def served(tmp_path_factory, collector) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with served_gateway(tmp_path_factory.mktemp("gateway"), fused=False) as served:
            yield served


def test_what_a_user_does_changes_what_is_shown_next(served):
    before = served.recommend()
    schema.Recommendations.model_validate(before)
    assert before["known"] is True
    assert before["degraded"] == []
    first = before["items"][0]["id"]
    event = {"user": USER, "item": first, "request_id": before["request_id"]}
    recorded = served.http.post("/v1/events", json=event)
    assert recorded.status_code == 200, recorded.text
    after = served.recommend(after=recorded.json()["sequence"])
    assert first not in [item["id"] for item in after["items"]]
    history = served.http.get(f"/v1/users/{USER}").json()["history"]
    assert history[0]["id"] == first


def test_the_explanation_agrees_with_what_the_server_shows(served):
    shown = [item["id"] for item in served.recommend()["items"]]
    for rank in (1, len(shown)):
        told = served.http.get("/v1/explain", params={"user": USER, "item": shown[rank - 1]}).json()
        assert told["places"][-1]["rank"] == rank


def test_an_answer_says_how_long_each_stage_took(served):
    header = served.http.get("/v1/recommendations", params={"user": USER}).headers["server-timing"]
    spent_ms = {part: float(ms) for part, ms in (timing.split(";dur=") for timing in header.split(", "))}
    assert all(spent_ms[stage] > 0 for stage in STAGES)
    assert sum(spent_ms[stage] for stage in STAGES) < spent_ms["server"]


def test_a_title_that_was_upserted_is_shown_at_once(served):
    item = served.recommend()["items"][0]["id"]
    assert served.http.put(f"/v1/items/{item}", json={"title": "<b>Mug</b>"}).status_code == 200
    titles = {item["id"]: item["title"] for item in served.recommend()["items"]}
    assert titles[item] == "<b>Mug</b>"


def test_an_item_is_recommended_in_the_category_that_was_upserted(served):
    def ask(category: str) -> tuple[list[int], list[str], int]:
        answer = served.recommend(user=999_999, category=category)
        return [item["id"] for item in answer["items"]], answer["degraded"], len(answer["warnings"])

    assert ask("mugs") == ([], [], 1)
    changes = [{"id": item, "columns": {"category": "mugs"}} for item in (3, 4, 5)]
    changes.insert(1, {"id": 4, "columns": {"colour": "red"}})
    results = served.http.post("/v1/items", json=changes).json()["results"]
    assert [row for row, result in enumerate(results) if "sequence" not in result] == [1]
    assert "The server refuses this request" in results[1]["error"]["message"]
    assert "colour" in results[1]["error"]["message"]
    assert served.http.put("/v1/items/4", json={"category": "bags"}).status_code == 200
    items, degraded, n_warnings = ask("mugs")
    assert (sorted(items), degraded, n_warnings) == ([3, 5], [], 0)
    assert ask("bags") == ([4], [], 0)


def test_named_items_alone_are_recommended(served):
    answer = served.recommend(user=999_998, among="6,7,8,123456")
    assert {item["id"] for item in answer["items"]} == {6, 7, 8}
    assert (answer["degraded"], len(answer["warnings"])) == ([], 1)


def test_the_exposure_log_has_the_propensities_that_the_server_states(served):
    """About one list in ten shows one of two new items at place 9."""
    for item in (901, 902):
        assert served.http.put(f"/v1/items/{item}", json={"title": f"new {item}"}).status_code == 200
    strangers = list(range(10_000, 10_060))
    shown = {user: served.recommend(user=user, k=10) for user in strangers}
    assert all(answer["degraded"] == [] for answer in shown.values())
    with open_local_client(served.server.grpc_url) as client:
        users = tensor("user_id", np.array(strangers, np.int64)[:, None])
        wanted = [grpc.InferRequestedOutput(name) for name in ("item_ids", "propensities")]
        answer = client.infer("recommend", [users], outputs=wanted)
    assert {output.name for output in answer.get_response().outputs} == {"item_ids", "propensities"}
    items, stated = answer.as_numpy("item_ids")[:, :10], answer.as_numpy("propensities")[:, :10]
    is_new = np.isin(items[:, 9], (901, 902))
    assert 0 < is_new.sum() < len(strangers) / 2
    np.testing.assert_allclose(stated[:, 9], np.where(is_new, 0.05, 0.9), rtol=1e-6)
    assert (stated[:, :9] == 1.0).all()
    folder = find_experiment_folder(served.server.repo)

    def logged() -> dict[str, dict]:
        return {row["request_id"]: row for row in read_exposures(folder).to_pylist()}

    until(lambda: {answer["request_id"] for answer in shown.values()} <= logged().keys())
    rows = logged()
    for user, item_ids, propensities in zip(strangers, items.tolist(), stated.tolist(), strict=True):
        row = rows[shown[user]["request_id"]]
        assert (row["item_ids"], row["propensities"]) == (item_ids, propensities)


def test_the_exposure_log_has_the_sources_of_the_items_that_were_shown(served):
    answer = served.recommend(reasons="true")
    folder = find_experiment_folder(served.server.repo)

    def logged() -> list[dict]:
        return [row for row in read_exposures(folder).to_pylist() if row["request_id"] == answer["request_id"]]

    until(logged)
    sources = [[name for bit, name in SOURCE_NAMES.items() if bit & bits] for bits in logged()[0]["sources"]]
    assert sources == [item["reasons"]["source"] for item in answer["items"]]
    assert any("bought_together" in names for names in sources)


def test_the_share_of_a_challenger_changes_under_load_without_a_failed_or_mixed_answer(served, tmp_path):
    """Before rules are applied, which replace those of both generations."""
    repo, grpc_url, users, shares = served.server.repo, served.server.grpc_url, range(1, 41), (0.0, 0.1, 0.5, 0.0)
    half = RulesConfig(blocked_items=tuple(range(1, 16)))  # so that the two never answer alike
    relayout(with_rules(small_repository(), tmp_path / "other", half), repo, "ensemble")
    load_challenger(grpc_url, repo, 2)
    alone = [list_answers(served, users)]
    assert all(alone[0][user, 1] != alone[0][user, 2] for user in users)
    experiment = start_experiment(repo, Experiment("shares", 1, 2, shares[0]))
    with Visitors(served, users, clients=8) as visitors:
        for share in shares:
            visitors.share = None
            change_share(repo, share)
            visitors.share = share
            visitors.wait_for_each_user()
    end_experiment(repo, "the test is over")
    alone.append(list_answers(served, users))
    assert unload_challenger(grpc_url, repo) == 2
    assert visitors.errors == []
    enrolled: dict[float, set[int]] = {share: set() for share in shares}
    for visit in visitors.visits:
        generation = visit.answer["generation"]
        assert visit.answer["degraded"] == []
        assert [item["id"] for item in visit.answer["items"]] in [answers[visit.user, generation] for answers in alone]
        if visit.share is not None:
            assert generation == (2 if replace(experiment, share=visit.share).enrols(visit.user) else 1)
            enrolled[visit.share] |= {visit.user} if generation == 2 else set()
    assert enrolled[0.0] < enrolled[0.1] < enrolled[0.5] < set(users)


def list_answers(served: Served, users: range) -> dict[tuple[int, int], list[int]]:
    """Return the items of each user by each of both generations alone, by (user, generation)."""
    pairs = [(user, generation) for user in users for generation in (1, 2)]
    answers = {(user, generation): served.recommend(user=user, generation=generation) for user, generation in pairs}
    return {pair: [item["id"] for item in answer["items"]] for pair, answer in answers.items()}


def test_unknown_propensities_are_numbers_that_json_knows(served):
    """Exploration below a cap moves items up, depending on what was drawn."""
    apply_rules(served.server.repo, {"exploration": {"slots": 2, "pool": 5}, "price_cap": 25.0})
    user = {"name": "user_id", "datatype": "INT64", "shape": [1, 1], "data": [USER]}
    answer = httpx.post(f"http://{served.server.http_url}/v2/models/recommend/infer", json={"inputs": [user]})
    outputs = {output["name"]: output["data"] for output in answer.json()["outputs"]}
    revert_rules(served.server.repo)
    assert outputs["propensities"] == [0] * len(outputs["item_ids"])


def test_answers_of_questions_that_share_a_call_are_those_of_calls_of_their_own(served):
    async def ask_together(calls_in_flight: int) -> tuple[list[dict], int]:
        settings = GatewaySettings(deadline_ms=5_000, calls_in_flight=calls_in_flight)
        app = create_app(served.server.repo, AsyncRecommender(f"localhost:{served.server.ports.grpc}"), settings)
        transport, urgent = httpx.ASGITransport(app), {"x-priority": "high"}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost", headers=urgent) as http:
            await http.get("/v1/recommendations", params={"user": USER})  # tells how many questions a call may have
            asked = [http.get("/v1/recommendations", params={"user": user}) for user in range(20)]
            answers = [response.json() for response in await asyncio.gather(*asked)]
            calls = re.search(r"^gateway_calls_total (\S+)$", (await http.get("/metrics")).text, re.MULTILINE)
        assert calls is not None
        return [{**answer, "request_id": ""} for answer in answers], int(float(calls[1]))

    alone, calls_alone = asyncio.run(ask_together(20))
    joined, calls_joined = asyncio.run(ask_together(1))
    assert joined == alone
    assert all(answer["degraded"] == [] for answer in alone)
    assert calls_alone == 1 + 20
    assert 1 + 2 <= calls_joined < 1 + 20  # a call that takes long makes room for another one


def test_an_event_that_the_server_refuses_has_its_own_error(served):
    events = [{"user": USER + 90, "item": 20 + row, "id": f"refused/{row}"} for row in range(16)]  # USER's lists stay long
    events[5]["event"] = "smile"
    response = served.http.post("/v1/events", json=events)
    assert response.status_code == 207, response.text
    results = response.json()["results"]
    assert [row for row, result in enumerate(results) if "sequence" not in result] == [5]
    assert "refuses this request: event is 'smile'; expected one of" in results[5]["error"]["message"]

    def count_refused() -> float:
        samples = read_samples(served.server.metrics_url).items()
        name = "recommender_live_refused_events_total"  # of `observe` alone: another test has a change refused
        return sum(value for (key, labels), value in samples if key == name and "model=observe" in labels.split(","))

    until(count_refused)
    assert count_refused() == 1


def test_a_request_is_one_trace_from_the_caller_through_the_gateway_to_the_stages(served, collector):
    trace = caller = ""
    asked_s = 0.0

    def ask() -> None:
        nonlocal trace, caller, asked_s
        trace, caller, asked_s = secrets.token_hex(16), secrets.token_hex(8), time.monotonic()
        headers = {"traceparent": f"00-{trace}-{caller}-01", "x-deadline-ms": "5000"}
        served.http.get("/v1/recommendations", params={"user": USER}, headers=headers).raise_for_status()

    def is_whole() -> bool:  # gateway and server send their spans when they like
        spans = collector.of_trace(trace)
        roots = {span.parent for span in spans} - {span.id for span in spans}
        if {span.name for span in spans} >= STAGE_NAMES and roots == {caller}:
            return True
        if time.monotonic() - asked_s > 10:  # not answered by the stages in time, or tritonserver lost its spans
            ask()
        return False

    until(is_whole, lambda: str(collector.of_trace(trace)))
    spans = collector.of_trace(trace)
    by_id = {span.id: span for span in spans}
    # from a stage up to the caller: every parent is in the trace, through server and gateway
    (stage,) = [span for span in spans if span.name == "rank"]
    path = [stage]
    while path[-1].parent in by_id:
        path.append(by_id[path[-1].parent])
    assert path[-1].parent == caller
    assert [service for service in dict.fromkeys(span.service for span in path)] == [
        "recommender-server",
        "recommender-gateway",
    ]
    assert path[-1].name == "GET /v1/recommendations"
    own = {span.name: span.attributes for span in spans if span.service == "recommender-gateway"}
    assert own.keys() == {"GET /v1/recommendations", "recommend"}  # one span of the gateway, one of its client
    assert own["GET /v1/recommendations"].keys() == {"http.request.method", "http.route", "http.response.status_code"}  # no ids


def fill_windows(served: Served) -> None:
    """Send as many requests as drift and the share of shown items are measured in."""
    with open_local_client(served.server.grpc_url) as client:
        for users in np.arange(20_000, 20_000 + WINDOW_ROWS).reshape(-1, 50):
            infer(client, users)


def test_every_metric_that_is_drawn_or_alerted_on_is_served(served):
    item = served.recommend()["items"][0]["id"]
    recorded = served.http.post("/v1/events", json={"user": USER, "item": item}).raise_for_status()
    served.recommend(after=recorded.json()["sequence"])
    fill_windows(served)
    wanted = named_metrics() - GPU_METRICS - BACKEND_METRICS
    deadline_s = time.monotonic() + SPANS_S
    while True:
        server = httpx.get(served.server.metrics_url).text
        published = metric_names(server) | metric_names(served.http.get("/metrics").text)
        missing = wanted - published
        if not missing or time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    assert sorted(missing) == []
    assert {"recommender_live_events_total", "recommender_stage_rows_total", "gateway_requests_total"} <= published


def raw(port: int, *parts: bytes) -> bytes:
    """Send parts as they are, and return what comes back until the connection is closed."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        with contextlib.suppress(ConnectionError):  # the gateway may close before it has read all
            for part in parts:
                sock.sendall(part)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while block := sock.recv(65_536):
                answer += block
        return answer


def test_what_ends_tritonserver_does_not_get_past_the_gateway(served):
    chunks = b"1\r\na\r\n" * 600_000 + b"0\r\n\r\n"
    head = b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    assert raw(served.port, head, chunks)[:12] in (b"HTTP/1.1 411", b"")
    assert served.recommend()["degraded"] == []


def test_a_gateway_that_is_killed_comes_back(served):
    workers = [
        process for process in gateway.list_gateways(served.server.state.tag) if "server.supervisor" not in process.cmdline()
    ]
    os.kill(workers[0].pid, signal.SIGKILL)
    deadline = time.monotonic() + 30
    while True:
        try:
            assert served.recommend()["degraded"] == []
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_when_the_server_is_killed_popular_items_answer(served):
    """The last test: it ends the server."""
    os.kill(served.server.state.pid, signal.SIGKILL)
    for _ in range(20):
        answer = served.http.get("/v1/recommendations", params={"user": USER, "k": 5})
        assert answer.status_code == 200
        if answer.json()["degraded"] == ["gateway_fallback"]:
            assert len(answer.json()["items"]) == 5
    assert answer.json()["degraded"] == ["gateway_fallback"]
    assert served.http.post("/v1/events", json={"user": USER, "item": 1}).status_code == 503
    time.sleep(1.1)
    assert served.http.get("/readyz").status_code == 503
    assert served.http.get("/healthz").status_code == 200
