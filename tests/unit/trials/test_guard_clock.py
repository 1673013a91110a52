"""A clock that is set back to before an experiment's start leaves its users without protection: the experiment ends."""

import time

import pytest

from repository.experiments import start_experiment
from serving.live.experiment import Experiment
from tests.repositories import copy_lean_repository
from trials.guard import Guard

SAID = "the clock was set back to before its start, so no answer counts"


@pytest.mark.parametrize(("set_back_s", "ended"), [(50, None), (3_600, ("stopped", SAID))])
def test_an_experiment_that_began_in_the_future_is_stopped(tmp_path, monkeypatch, set_back_s, ended):
    repo = copy_lean_repository(tmp_path / "shop")
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    earlier_ns = time.time_ns() - set_back_s * 1_000_000_000
    monkeypatch.setattr(time, "time_ns", lambda: earlier_ns)
    found = Guard(repo).look()
    assert (found and (found.state, found.reason.partition(":")[0])) == ended
