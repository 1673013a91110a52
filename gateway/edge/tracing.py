"""OpenTelemetry: a span per request, in the caller's trace. The client adds a span per call, tritonserver one per stage.

Off unless the environment names a collector (OTEL_EXPORTER_OTLP_ENDPOINT, as every OpenTelemetry program reads it).
"""

from __future__ import annotations

import os

from opentelemetry import propagate, trace
from starlette.types import ASGIApp, Message, Receive, Scope, Send

SERVICE = "recommender-gateway"
ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def start_tracing() -> bool:
    """Send spans to the collector that the environment names; return whether there is one."""
    if not any(os.environ.get(name) for name in ENDPOINTS):
        return False
    from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    provider = TracerProvider(resource=Resource.create({"service.name": os.environ.get("OTEL_SERVICE_NAME", SERVICE)}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))  # the exporter reads the endpoint from the environment
    trace.set_tracer_provider(provider)
    return True


class Tracing:
    """ASGI middleware, behind the Guard, so that requests without a token start no trace."""

    def __init__(self, app: ASGIApp) -> None:
        self._app, self._tracer = app, trace.get_tracer("gateway")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        context = propagate.extract(headers)
        with self._tracer.start_as_current_span(scope["method"], context=context, kind=trace.SpanKind.SERVER) as span:

            async def traced_send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    span.set_attribute("http.response.status_code", message["status"])
                await send(message)

            try:
                await self._app(scope, receive, traced_send)
            finally:
                route = getattr(scope.get("route"), "path_format", "none")
                span.update_name(f"{scope['method']} {route}")
                span.set_attributes({"http.request.method": scope["method"], "http.route": route})
