"""The challenger of an experiment that was rolled back is unloaded, and what a person needs loaded stays."""

from __future__ import annotations

import pytest

from repository.challenger import read_challengers, remove_challenger
from repository.experiments import end_experiment, start_experiment
from repository.generations import pin
from server.generations.challenger import load_challenger
from server.generations.release import Release
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER, STAGES
from serving.live.experiment import Experiment
from tests.triton_double import TritonDouble


def is_loaded(double: TritonDouble) -> bool:
    """Return whether the challenger is loaded, which its stages must agree with."""
    (loaded,) = {double.states[name, 2] == "READY" for name in (CHALLENGER, *STAGES)}
    return loaded


@pytest.mark.parametrize("ended", ["rolled back", "stopped"])
def test_the_challenger_is_unloaded_once_its_experiment_is_over(challenged, ended):
    state, double = challenged
    release = Release(state)
    assert release.look() == ""
    assert is_loaded(double)
    end_experiment(state.repo, "its p99 is 90 ms", state=ended)
    assert release.look() == "experiment spring is over: generation 2 is unloaded"
    assert not is_loaded(double)
    assert (read_challengers(state.repo), read_pinned_generation(state.repo)) == ((), 1)
    load_challenger(state.grpc_url, state.repo, 2)  # of another experiment, which begins next
    assert release.look() == Release(state).look() == ""  # also that of a supervisor that has just been started
    assert is_loaded(double)


def test_it_is_unloaded_too_after_another_server_on_the_repository_has_unloaded_its_own(challenged):
    state, double = challenged
    end_experiment(state.repo, "harmful", "rolled back")
    remove_challenger(state.repo)
    pin(state.repo, 1)
    assert Release(state).look() == "experiment spring is over: generation 2 is unloaded"
    assert not is_loaded(double)


def test_a_promoted_challenger_and_one_of_another_experiment_stay(challenged):
    state, double = challenged
    end_experiment(state.repo, "enough", state="promoted")
    assert Release(state).look() == ""
    start_experiment(state.repo, Experiment("summer", 1, 3, 0.5))
    end_experiment(state.repo, "it failed", state="rolled back")
    assert Release(state).look() == ""
    assert is_loaded(double)


def test_a_pin_for_the_next_start_is_kept(challenged):
    """Also by `experiment stop`, which unloads it likewise."""
    state, double = challenged
    end_experiment(state.repo, "it failed", state="rolled back")
    pin(state.repo, 2)
    assert Release(state).look() == "experiment spring is over: generation 2 is unloaded"
    assert not is_loaded(double)
    assert {double.states[name, 1] for name in STAGES} == {"READY"}
    assert read_pinned_generation(state.repo) == 2


def test_a_server_that_does_not_unload_it_is_named_once(challenged):
    state, double = challenged
    end_experiment(state.repo, "it failed", state="rolled back")
    double.before_unload = lambda model: "it is busy"
    release = Release(state)
    assert "generation 2 stays loaded, because The challenger, generation 2, is not unloaded" in release.look()
    assert release.look() == ""
