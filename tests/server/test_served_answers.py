"""The server gives the same answers as its stages in this process, and calls each stage once per batch."""

import re
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from repository.checks.recorded import RECORDED_FILE, compare_answers, read_recorded
from serving.contract.tensors import ENSEMBLE, PAD_ID, STAGES
from serving.pipeline import Pipeline
from tests.server.support.requests import ask_each, infer, narrow
from triton_recommender import Recommender


@pytest.fixture(scope="module")
def recorded(repository, info):
    return read_recorded(repository / ENSEMBLE / str(info.generation) / RECORDED_FILE)


@pytest.fixture(scope="module")
def in_process(repository, recorded):
    return Pipeline.load(repository)(recorded.inputs)


@pytest.mark.parametrize("concurrency", [1, 16])
def test_served_answers_equal_the_in_process_ones(client, recorded, in_process, concurrency):
    served = ask_each(client, recorded.inputs, concurrency)
    assert len(served["item_ids"]) == 200
    assert compare_answers(served, in_process) == ""
    np.testing.assert_array_equal(served["degraded"], in_process["degraded"])
    np.testing.assert_array_equal(served["generation"], in_process["generation"])


def test_served_answers_within_a_choice_equal_the_in_process_ones(client, repository, recorded):
    inputs = narrow(repository, recorded.inputs, count=24)
    served, expected = infer(client, **inputs), Pipeline.load(repository)(inputs)
    assert compare_answers(served, expected) == ""
    np.testing.assert_array_equal(served["degraded"], expected["degraded"])
    shown, is_named = served["item_ids"], inputs["among"].max(axis=1) > PAD_ID
    unheard_of = inputs["category"][:, 0] == b"unheard of"
    assert ((shown == PAD_ID).all(axis=1) == unheard_of)[~is_named].all()
    assert (shown[unheard_of] == PAD_ID).all()
    pairs = zip(shown[is_named].tolist(), inputs["among"][is_named].tolist(), strict=True)
    assert all(set(items) <= {PAD_ID, *named} for items, named in pairs)
    assert (shown[is_named] != PAD_ID).any()


def test_the_recorded_answers_are_the_in_process_ones(recorded, in_process):
    assert compare_answers(in_process, recorded.outputs) == ""


@pytest.mark.parametrize("users", [[1], [2, 3, 4]])
def test_an_answer_says_how_long_each_stage_took(server, users):
    with Recommender(server.grpc_url, timings=True) as shop:
        shop.recommend(1)  # connects, and reads the model's description
        began_s = time.perf_counter()
        answers = shop.recommend_many(users)
        spent_ms = 1_000 * (time.perf_counter() - began_s)
    for answer in answers:
        assert list(answer.stage_ms) == list(STAGES)
        assert all(stage_ms > 0 for stage_ms in answer.stage_ms.values())
        assert sum(answer.stage_ms.values()) < spent_ms


QUIET_S = 2.5  # longer than the second between two reports of a stage


class StageCounts:
    """Counts the calls and rows of each stage since this object was made. No other requests may run meanwhile."""

    def __init__(self, server) -> None:
        self.url = server.metrics_url
        self.before = self.read_settled()

    def read(self) -> dict[str, dict[str, float]]:
        text = urllib.request.urlopen(self.url, timeout=5).read().decode()
        samples = re.findall(r'^recommender_stage_(calls|rows)_total{stage="(\w+)"} (\S+)$', text, re.MULTILINE)
        counts: dict[str, dict[str, float]] = {"calls": {}, "rows": {}}
        for what, stage, value in samples:
            if stage in STAGES:
                counts[what][stage] = float(value)
        return counts

    def read_settled(self) -> dict[str, dict[str, float]]:
        """Return the counts once two reads in a row agree, because all calls so far have then been reported."""
        now, last = self.read(), None
        while now != last:
            time.sleep(QUIET_S)
            now, last = self.read(), now
        return now

    def wait_for_rows(self, rows: int) -> dict[str, dict[str, float]]:
        """Return the increases, once every stage has counted `rows` new rows, or after 30 s."""
        deadline = time.monotonic() + 30.0
        while True:
            now = self.read_settled()
            new = {what: {stage: n - self.before[what][stage] for stage, n in now[what].items()} for what in now}
            if new["rows"] == dict.fromkeys(STAGES, rows) or time.monotonic() > deadline:
                return new


def test_one_batch_is_one_stage_call_in_every_stage(server, client):
    counts = StageCounts(server)
    infer(client, user_id=list(range(32)))
    assert counts.wait_for_rows(32) == {"calls": dict.fromkeys(STAGES, 1), "rows": dict.fromkeys(STAGES, 32)}


def test_requests_that_wait_together_share_stage_calls(server, client):
    counts = StageCounts(server)
    with ThreadPoolExecutor(32) as pool:
        list(pool.map(lambda user: infer(client, user_id=[user]), range(320)))
    new = counts.wait_for_rows(320)
    assert new["rows"] == dict.fromkeys(STAGES, 320)
    assert new["calls"]["rank"] < 320
