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
    found = Guard(repo, patience_s=0.0).look()
    assert (found and (found.state, found.reason.partition(":")[0])) == ended


@pytest.mark.parametrize("wrong_s", [-100_000_000, 100_000_000])
def test_a_clock_that_is_wrong_for_minutes_ends_no_experiment(tmp_path, monkeypatch, wrong_s):
    repo = copy_lean_repository(tmp_path / "shop")
    start_experiment(repo, Experiment("spring", 1, 2, 0.5, days=7.0))
    guard, right_ns, began_s = Guard(repo), time.time_ns(), time.monotonic()
    states = []
    for minute, is_wrong in ((0, True), (9, True), (10, False), (11, True), (20, True), (21, True)):
        monkeypatch.setattr(time, "time_ns", lambda wrong=is_wrong: right_ns + wrong * wrong_s * 1_000_000_000)
        monkeypatch.setattr(time, "monotonic", lambda minute=minute: began_s + 60 * minute)
        ended = guard.look()
        states.append(ended.state if ended else "running")
    assert states == ["running"] * 5 + ["stopped"]
