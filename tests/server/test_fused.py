"""The fused layout on the real server: the ensemble's answers, faults that stay with their request, generations unmixed."""

from __future__ import annotations

import threading
import time
import urllib.request
from collections import Counter
from itertools import product

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from export.check import check_repository
from export.relayout import relayout
from perf.observe import TABLE_ROWS, read_samples
from repository.checks.recorded import RECORDED_FILE, compare_answers, read_recorded
from repository.generations import list_published_generations
from repository.triton.config import CONFIG_FILE, set_instances
from repository.triton.models import read_config, write_config
from server.launcher import TritonServer
from serving.contract.errors import ConfigError
from serving.contract.tensors import ENSEMBLE, PAD_ID, STAGES
from serving.pipeline import Pipeline
from tests.repositories import copy_small_fused_repository, copy_to_change
from tests.server.support.requests import ask_each, infer, narrow, tensor
from tests.waiting import until

REPORT_EVERY_S = 1.0  # serving/stages/adapter/triton.py, which only a server can import


@pytest.fixture(scope="module")
def served(fused_repository, tmp_path_factory):
    repo = copy_to_change(fused_repository, tmp_path_factory.mktemp("fused") / "repo")
    config = read_config(repo / ENSEMBLE / CONFIG_FILE)
    set_instances(config, 2)
    write_config(repo / ENSEMBLE / CONFIG_FILE, config)
    with TritonServer(repo, run_dir=tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture(scope="module")
def caller(served):
    with grpcclient.InferenceServerClient(served.grpc_url) as client:
        yield client


@pytest.fixture(scope="module")
def recorded(fused_repository):
    return read_recorded(fused_repository / ENSEMBLE / "1" / RECORDED_FILE)


def test_served_answers_equal_the_in_process_ones_of_the_other_layout(caller, repository, recorded):
    answers = ask_each(caller, recorded.inputs, concurrency=16)
    assert len(answers["item_ids"]) == 200
    expected = Pipeline.load(repository)(recorded.inputs)
    assert compare_answers(answers, expected) == ""
    np.testing.assert_array_equal(answers["degraded"], expected["degraded"])


def test_served_answers_within_a_choice_equal_the_in_process_ones_of_the_other_layout(caller, repository, recorded):
    inputs = narrow(repository, recorded.inputs, count=24)
    answers, expected = infer(caller, **inputs), Pipeline.load(repository)(inputs)
    assert compare_answers(answers, expected) == ""
    np.testing.assert_array_equal(answers["degraded"], expected["degraded"])


def test_the_callers_model_has_the_same_tensors_as_the_ensemble(caller, client):
    fused, ensemble = (each.get_model_metadata(ENSEMBLE) for each in (caller, client))
    assert {(t.name, t.datatype, tuple(t.shape)) for t in (*fused.inputs, *fused.outputs)} == {
        (t.name, t.datatype, tuple(t.shape)) for t in (*ensemble.inputs, *ensemble.outputs)
    }


def test_a_bad_request_fails_alone(caller):
    expected = infer(caller, user_id=[1])["item_ids"]
    answers = []
    threads = [threading.Thread(target=lambda: answers.append(infer(caller, user_id=[1])["item_ids"])) for _ in range(8)]
    for thread in threads:
        thread.start()
    with pytest.raises(InferenceServerException, match="temperature is infinite") as caught:
        infer(caller, user_id=[1], temperature=np.array([[np.inf]], np.float32))
    for thread in threads:
        thread.join()
    assert "INVALID_ARGUMENT" in caught.value.status()
    assert len(answers) == 8
    for answer in answers:
        np.testing.assert_array_equal(answer, expected)


def test_a_request_without_a_user_id_is_refused_by_name(caller, info):
    exclude = tensor("exclude", np.full((1, info.axes.exclusions), PAD_ID))
    with pytest.raises(InferenceServerException, match="has no user_id") as caught:
        caller.infer(ENSEMBLE, [exclude])
    assert "INVALID_ARGUMENT" in caught.value.status()


def test_every_stage_counts_its_calls_and_time(served, caller):
    infer(caller, user_id=list(range(8)))

    def list_missing() -> list[str]:
        text = urllib.request.urlopen(served.metrics_url, timeout=5).read().decode()
        pairs = product(("calls", "rows", "seconds"), STAGES)
        counters = [f'recommender_stage_{name}_total{{stage="{stage}"}}' for name, stage in pairs]
        counts = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in text.splitlines() if line[:1] != "#"}
        return [counter for counter in counters if not counts.get(counter)]

    until(lambda: not list_missing(), lambda: f"not counted: {list_missing()}")  # stages tell once a second


def rows_by_instance(served: TritonServer) -> Counter[str]:
    """Rows of embedding tables that each process asked for so far."""
    time.sleep(1.5 * REPORT_EVERY_S)  # they tell once a second
    rows: Counter[str] = Counter()
    for (name, labels), value in read_samples(served.metrics_url).items():
        if name == TABLE_ROWS:
            rows[dict(label.split("=", 1) for label in labels.split(","))["instance"]] += int(value)
    return rows


def test_one_callers_requests_find_the_process_that_is_warm(served, caller, server):
    """A caller who waits a moment meets the second of two processes only if the first is not back by then."""
    before = rows_by_instance(served)
    for user_id in range(40):
        infer(caller, user_id=[user_id])
        time.sleep(0.005)
    asked = rows_by_instance(served) - before
    assert asked["recommend_0_0"] > 0.9 * asked.total() > 0
    flags = [[flag for flag in psutil.Process(each.state.pid).cmdline() if "rate" in flag] for each in (served, server)]
    assert flags == [["--rate-limit=execution_count"], []]  # where no model has priorities, the server has no limiter


@pytest.fixture
def moving(tmp_path):
    """A repository that may change."""
    return copy_small_fused_repository(tmp_path / "repo")


def test_the_check_finds_nothing_and_then_what_was_broken(repository, moving):
    assert check_repository(moving) == []
    (moving / ENSEMBLE / "1" / "rank" / "item_rows.npy").write_bytes(b"")
    (finding,) = check_repository(moving)
    assert finding.level == "error"
    assert "item_rows.npy" in finding.fact
    assert list_published_generations(moving) == (1,)


def test_a_repository_is_not_laid_out_into_itself(fused_repository):
    with pytest.raises(ConfigError, match="cannot be laid out again into itself"):
        relayout(fused_repository, fused_repository, "ensemble")
