"""tritonserver traces where the environment names a collector, and costs nothing where it names none."""

import pytest

from server.start.tracing import trace_options


def test_without_a_collector_there_is_no_option():
    assert trace_options({}) == []
    assert trace_options({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}) == []


@pytest.mark.parametrize(
    "environment",
    [
        {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318/"},
        {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://collector:4318/v1/traces", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"},
    ],
)
def test_only_requests_that_carry_a_trace_are_traced(environment):
    options = trace_options(environment)
    assert "--trace-config=opentelemetry,url=http://collector:4318/v1/traces" in options
    assert "--trace-config=mode=opentelemetry" in options
    assert "--trace-config=rate=0" in options
