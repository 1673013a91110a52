"""A promotion moves the right servers, once. The real move is in tests/server/test_supervision.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repository.experiments import end_experiment, start_experiment
from repository.registry import read_acts, record_act
from server.ports import Ports
from server.promotion import Promotion, awaits_move
from server.state import ServerState
from serving.live.experiment import Experiment
from tests.repositories import copy_small_repository


@pytest.fixture
def state(tmp_path) -> ServerState:
    """The state of a server that does not run, and answered with generation 1."""
    repo = copy_small_repository(tmp_path / "repo")
    return ServerState(1, "triton_test_", repo, tmp_path / "log", Ports(1, 2, 3), generation=1)


def promote(state: ServerState) -> Experiment:
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5, promotes=True))
    return end_experiment(state.repo, "more clicks", state="promoted")


def test_a_server_moves_from_the_champion_alone(state):
    experiment = promote(state)
    assert awaits_move(state, experiment)
    assert not awaits_move(replace(state, generation=2), experiment)
    assert not awaits_move(replace(state, generation=7), experiment)  # published since


def test_another_server_that_moved_changes_nothing_and_a_person_has_the_last_word(state):
    experiment = promote(state)
    record_act(state.repo, "activated", 2)
    assert awaits_move(state, experiment)
    record_act(state.repo, "activated", 1)
    assert not awaits_move(state, experiment)


@pytest.mark.parametrize("ended", ["stopped", "rolled back"])
def test_what_ended_otherwise_moves_nothing(state, ended, tmp_path):
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    assert Promotion(state, tmp_path).look() == ""
    assert not awaits_move(state, end_experiment(state.repo, "enough", state=ended))
    assert Promotion(state, tmp_path).look() == ""


def test_a_move_that_fails_is_tried_once_and_recorded(state, tmp_path):
    promote(state)
    promotion = Promotion(state, tmp_path)
    assert "generation 2 is promoted, because more clicks; generation 1 stays, because" in promotion.look()
    assert (read_acts(state.repo)[-1].action, read_acts(state.repo)[-1].generation) == ("not promoted", 2)
    assert promotion.look() == Promotion(state, tmp_path).look() == ""
