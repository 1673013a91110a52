"""A stage's own measurements reach the metrics port, and it is closed at the end: through the adapter and the fake backend."""

import threading
import time

import numpy as np
import pytest

from serving.contract.measurements import COUNTER, GAUGE, Measurement
from serving.contract.tensors import Degraded
from tests.contract import fake_backend as pb
from tests.contract.stages import Echo, request, users_of


class Measured(Echo):
    """An Echo with measurements of its own and something to close."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def list_measurements(self):
        asked = sum(len(inputs["user_id"]) for inputs in self.seen)
        yield Measurement("rows", "", COUNTER, {"table": "users"}, asked)
        yield Measurement("hit_rate", "", GAUGE, {"table": "users"}, 1 / (1 + asked))

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def loaded(arguments):
    """loaded(stage class) -> the model that serves it"""
    from serving.stages.adapter.triton import make_triton_model

    pb.MetricFamily.metrics.clear()
    pb.Logger.lines.clear()

    def load(stage, report_every_s=1.0):
        model = make_triton_model(stage)()
        model.report_every_s = report_every_s
        model.initialize(arguments)
        return model

    return load


def test_what_a_stage_measures_of_itself_reaches_the_metrics_port(loaded):
    model = loaded(Measured)
    reporter = model.reporter
    for calls in (1, 2):
        model.execute([request(1), request(2)])
        reporter.report()
        reporter.report()  # nothing new: a counter must not grow
        assert pb.MetricFamily.metrics["rows/preprocess_0_0/7/users"].value == 2 * calls
        assert pb.MetricFamily.metrics["hit_rate/preprocess_0_0/7/users"].value == 1 / (1 + 2 * calls)
    model.finalize()
    assert model.chain[0].stage.closed
    assert not any(thread.name == "reporter" for thread in threading.enumerate())


def test_stages_that_hold_nothing_are_let_go_as_well(loaded):
    model = loaded(Echo)
    model.finalize()
    assert not any(thread.name == "reporter" for thread in threading.enumerate())


def test_answers_without_live_state_are_counted_apart_from_fallbacks(loaded):
    loaded(Echo)  # which makes the module of Triton's backend known
    from serving.stages.adapter.metrics import Metrics

    metrics = Metrics("rerank")
    metrics.count(np.array([[Degraded.LIVE], [0], [Degraded.LIVE | Degraded.RERANK], [Degraded.RANK]]), 0.01)
    counted = {measured.name: measured.value for measured in metrics.list_measurements()}
    assert counted["recommender_live_missing_total"] == 2
    assert (counted["recommender_degraded_total"], counted["recommender_stage_rows_total"]) == (1, 4)


class Broken(Measured):
    """Its measurements fail."""

    def list_measurements(self):
        return 1 / 0


def test_measurements_that_fail_are_logged_and_leave_answers_alone(loaded):
    model = loaded(Broken, report_every_s=0.01)
    deadline = time.monotonic() + 10
    while len(pb.Logger.lines) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert users_of(model.execute([request(1)])[0]) == [1]
    model.finalize()
    assert len(pb.Logger.lines) >= 2
    assert all("ZeroDivisionError" in line for line in pb.Logger.lines)
