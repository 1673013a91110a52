"""What an operator sees of a gateway and its server: every metric that is alerted on, and one trace of a request."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

import httpx
import pytest

from tests.monitoring import GPU_METRICS, metric_names, named_metrics
from tests.server.gateways import USER, Served, served_gateway
from tests.server.otlp import Collector, collecting

WAIT_S = 120.0  # tritonserver sends its spans every 5 s


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def served(tmp_path_factory, collector) -> Iterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with served_gateway(tmp_path_factory.mktemp("observed")) as served:
            yield served


def test_a_request_is_one_trace_from_the_caller_through_the_gateway_to_the_stages(served, collector):
    served.recommend()  # the first question of a gateway may be too late for its answer, and be answered without the stages
    trace, caller = secrets.token_hex(16), secrets.token_hex(8)
    headers = {"traceparent": f"00-{trace}-{caller}-01", "x-deadline-ms": "5000"}
    served.http.get("/v1/recommendations", params={"user": USER}, headers=headers).raise_for_status()
    deadline_s = time.monotonic() + WAIT_S
    while True:  # gateway and server send their spans when they like
        spans = collector.of_trace(trace)
        names = [span.name for span in spans]
        whole = {"preprocess", "rerank"} <= set(names) and {span.parent for span in spans} - {span.id for span in spans} == {
            caller
        }
        if whole or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    assert {"preprocess", "retrieve", "rank", "rerank"} <= set(names), names
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


# What this server has nothing to say of: the drift of features, which needs a full window of requests, and events from Kafka.
DRIFT = {f"recommender_drift_{name}" for name in ("psi", "psi_bound", "kl")}
ELSEWHERE = DRIFT | {"recommender_live_kafka_silent_seconds"}


def test_every_metric_that_is_drawn_or_alerted_on_is_served(served):
    item = served.recommend()["items"][0]["id"]
    recorded = served.http.post("/v1/events", json={"user": USER, "item": item}).raise_for_status()
    served.recommend(after=recorded.json()["sequence"])
    wanted = named_metrics() - GPU_METRICS
    deadline_s = time.monotonic() + WAIT_S
    while True:
        server = httpx.get(served.server.metrics_url).text
        published = metric_names(server) | metric_names(served.http.get("/metrics").text)
        missing = wanted - published - ELSEWHERE
        if not missing or time.monotonic() > deadline_s:
            break
        time.sleep(0.2)
    assert sorted(missing) == []
    assert {"recommender_live_events_total", "recommender_stage_rows_total", "gateway_requests_total"} <= published
