"""Options of tritonserver's own OpenTelemetry: a span per request and stage, if the environment names a collector."""

from __future__ import annotations

from collections.abc import Mapping

SERVICE = "recommender-server"


def trace_options(environment: Mapping[str, str]) -> list[str]:
    """Return tritonserver's options that send spans to the collector of OTEL_EXPORTER_OTLP_…ENDPOINT; none without one.

    Rate 0 traces only requests that carry a trace context: the caller decides how many are traced.
    """
    url = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
    if not url and (endpoint := environment.get("OTEL_EXPORTER_OTLP_ENDPOINT", "")):
        url = f"{endpoint.rstrip('/')}/v1/traces"
    if not url:
        return []
    settings = ("mode=opentelemetry", "rate=0", "level=TIMESTAMPS")
    exporter = (f"opentelemetry,url={url}", f"opentelemetry,resource=service.name={SERVICE}")
    return [f"--trace-config={setting}" for setting in (*settings, *exporter)]
