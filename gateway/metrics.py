"""The gateway's metrics for Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from repository.rounds import EndedRound, RunningRound
from serving.live.experiment import Experiment

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
CALIBRATION = (  # (field of trials/calibration.py, end of the metric's name, description)
    ("error", "error", "Difference between the clicks of the last window and those that scores promise, as a share of these"),
    ("bound", "error_bound", "Calibration error above which chance does not explain the difference"),
    ("expected_rate", "expected_click_rate", "Clicks per shown item that scores promise"),
    ("observed_rate", "observed_click_rate", "Clicks per shown item in the last window"),
)


class Metrics:
    """The metrics of one gateway, in a registry of their own, so that tests may make several gateways."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("gateway_requests", "Requests by route and status", ["route", "status"], registry=registry)
        self.durations = Histogram(
            "gateway_request_duration_seconds", "Time of a request", ["route"], buckets=BUCKETS_S, registry=registry
        )
        self._labelled: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        self.fallbacks = Counter("gateway_fallbacks", "Answers with popular items", ["reason"], registry=registry)
        self.events = Counter("gateway_events", "Events by outcome", ["outcome"], registry=registry)
        self.changes = Counter("gateway_changes", "Changes of items and users by outcome", ["outcome"], registry=registry)
        self.unknown_items = Counter(
            "gateway_unknown_item_events", "Accepted events of items that nobody added", registry=registry
        )
        self.lost_exposures = Counter("gateway_lost_exposures", "Answers that the exposure log has lost", registry=registry)
        self.in_flight = Gauge("gateway_recommendations_in_flight", "Recommendations that wait for a server", registry=registry)
        self.limit = Gauge("gateway_recommendations_limit", "Adaptive limit of recommendations in flight", registry=registry)
        self.calls = Counter("gateway_calls", "Calls to a server, each for one or more recommendations", registry=registry)
        self.shed = Counter("gateway_shed", "Recommendations shed because of the limit", ["priority"], registry=registry)
        self._calibration = {
            field: Gauge(f"gateway_calibration_{name}", text, ["generation"], registry=registry)
            for field, name, text in CALIBRATION
        }
        self._experiment = Gauge(
            "gateway_experiment_changed_timestamp_seconds",
            "When the latest experiment began, was changed or ended",
            ["experiment", "challenger", "state"],
            registry=registry,
        )
        self._round = Gauge(
            "gateway_training_round_timestamp_seconds",
            "When the last round of continuous training ended; with the outcome running: when the present round began",
            ["outcome"],
            registry=registry,
        )
        self._newest = Gauge(
            "gateway_newest_generation_timestamp_seconds",
            "When the newest generation of the repository was published",
            ["generation"],
            registry=registry,
        )
        self.generation = Gauge("gateway_generation", "Generation whose titles and fallback are in use", registry=registry)

    def count_request(self, route: str, status: int, seconds: float) -> None:
        """Count a request. route: the path's template; seconds: from its arrival to the end of its answer"""
        if (labelled := self._labelled.get((route, status))) is None:  # `labels` costs more than counting
            labelled = self._labelled[route, status] = self.requests.labels(route, str(status)), self.durations.labels(route)
        count, durations = labelled
        count.inc()
        durations.observe(seconds)

    def show_calibration(self, measured: Mapping[str, Any]) -> None:
        """Show the latest calibration. A gauge whose field is missing shows nothing.

        measured: the JSON object that `python -m trials calibration` prints
        """
        for field, gauge in self._calibration.items():
            gauge.clear()
            if field in measured:
                gauge.labels(str(measured["generation"])).set(measured[field])

    def show_experiment(self, latest: Experiment | None) -> None:
        """Show the state of the latest experiment; nothing before the first one."""
        self._experiment.clear()
        if latest is not None:
            labels = latest.name, str(latest.challenger), latest.state
            self._experiment.labels(*labels).set(latest.changed_ms / 1_000)

    def show_rounds(self, ended: EndedRound | None, running: RunningRound | None) -> None:
        """Show the last round of continuous training that ended, and the running one. None: there is none."""
        self._round.clear()
        if ended is not None:
            self._round.labels(ended.outcome).set(ended.ended_s)
        if running is not None:
            self._round.labels("running").set(running.began_s)

    def show_newest(self, newest: tuple[int, float] | None) -> None:
        """Show the newest generation of the repository. newest: its number, and when it was published in unix seconds"""
        self._newest.clear()
        if newest is not None:
            self._newest.labels(str(newest[0])).set(newest[1])

    def render_page(self) -> bytes:
        """Return all metrics as text for Prometheus."""
        return generate_latest(self.registry)
