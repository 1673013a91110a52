"""Trace calls with OpenTelemetry (`pip install './clients[tracing]'`): one span per call, and its context in headers.

Without the package, or without a configured SDK, calls have no spans and no trace headers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

try:
    from opentelemetry import propagate, trace
except ImportError:
    trace = None  # type: ignore[assignment]


@contextmanager
def client_span(name: str, attributes: Mapping[str, str | int]) -> Iterator[dict[str, str]]:
    """Yield the headers that carry the trace context to the server, such as `traceparent`; the span ends with the block."""
    if trace is None or isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):  # not set up: costs nothing
        yield {}
        return
    tracer = trace.get_tracer("triton_recommender")
    with tracer.start_as_current_span(name, kind=trace.SpanKind.CLIENT, attributes=dict(attributes)):
        headers: dict[str, str] = {}
        propagate.inject(headers)
        yield headers
