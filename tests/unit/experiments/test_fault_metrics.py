"""A metrics page shows a fault by what an alert rule reads and what does not happen without faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from experiments import fault_metrics
from experiments.fault_metrics import MetricsPage
from tests.pages import serve_page
from tests.waiting import until

PAGE = """
# TYPE nv_inference_request_success counter
nv_inference_request_success{{model="recommend",version="{generation}"}} {answered}
# TYPE recommender_live_redis_down gauge
recommender_live_redis_down {redis_down}
# TYPE recommender_live_kafka_silent_seconds gauge
recommender_live_kafka_silent_seconds {silent_s}
# TYPE gateway_requests_total counter
gateway_requests_total{{route="/v1/events",status="503"}} {refused}
gateway_requests_total{{route="/readyz",status="503"}} {unready}
# TYPE recommender_of_no_alert_total counter
recommender_of_no_alert_total {unused}
"""
QUIET = {"generation": 1, "answered": 0, "redis_down": 0, "silent_s": 1.0, "refused": 0, "unready": 0, "unused": 0}


class Source(ExitStack):
    """A metrics page whose values a test sets, and which it may close."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.answered = dict(QUIET), 0
        self.url = self.enter_context(serve_page(self.render))

    def render(self) -> bytes:
        self.answered += 1  # as under load
        return PAGE.format(**self.values | {"answered": self.answered}).encode()


@pytest.fixture
def source() -> Iterator[Source]:
    with Source() as source:
        yield source


@pytest.fixture
def page(source, monkeypatch) -> Iterator[MetricsPage]:
    """A page that was learned without a fault."""
    monkeypatch.setattr(fault_metrics, "READ_EVERY_S", 0.05)
    with MetricsPage(f"{source.url}/metrics") as page:
        begun_s = time.monotonic()
        until(lambda: len(page.readings) >= 3)
        page.learn(begun_s)
        yield page


def read_on(page: MetricsPage, begun_s: float) -> set[str]:
    """Return the signals of the next two readings."""
    until(lambda: sum(reading.at_s > begun_s for reading in page.readings) >= 2)
    signals = page.find_signals(begun_s, time.monotonic())
    assert all(0.0 <= after_s < 30.0 for after_s in signals.values())
    return set(signals)


def test_without_a_fault_a_page_shows_none(source, page):
    source.values |= {"silent_s": 119.0, "unready": 5, "unused": 7, "generation": 2}
    assert read_on(page, time.monotonic()) == set()


def test_what_alerts_read_shows_a_fault(source, page):
    source.values |= {"redis_down": 1, "silent_s": 121.0, "refused": 1}
    expected = {"recommender_live_redis_down", "recommender_live_kafka_silent_seconds", "gateway_requests_total"}
    assert read_on(page, time.monotonic()) == expected
    assert read_on(page, time.monotonic()) == set()  # a further fault is not shown by what lasts since an earlier one


def test_a_page_that_cannot_be_read_shows_a_fault(source, page):
    begun_s = time.monotonic()
    source.close()
    assert read_on(page, begun_s) == {"up"}
