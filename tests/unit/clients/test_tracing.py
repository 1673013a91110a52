"""A call joins the caller's trace, where OpenTelemetry is installed."""

from __future__ import annotations

import pytest

from tests.present import present
from triton_recommender import Recommender
from triton_recommender.testing import FakeRecommender


def test_calls_carry_the_trace_and_make_one_span(server):
    reason = "opentelemetry-sdk is not installed; it is an extra of the client"
    sdk = pytest.importorskip("opentelemetry.sdk.trace", reason=reason)
    from opentelemetry import trace
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, provider = InMemorySpanExporter(), sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    with trace.get_tracer("shop").start_as_current_span("page"), Recommender(server.url) as shop:
        shop.recommend(1, request_id="r-1")
    call, page = exporter.get_finished_spans()
    assert (call.name, call.kind, present(call.parent).span_id) == ("recommend", trace.SpanKind.CLIENT, page.context.span_id)
    assert dict(present(call.attributes)) == {"triton.model": "recommend", "triton.batch": 1, "triton.request_id": "r-1"}
    assert server.metadata[0]["traceparent"].split("-")[1:3] == [
        f"{call.context.trace_id:032x}",
        f"{call.context.span_id:016x}",
    ]


def test_calls_work_without_it():
    assert FakeRecommender(lambda query: [3]).recommend(1).item_ids == (3,)
