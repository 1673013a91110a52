"""A promotion moves the right servers, once. The real move is in tests/server/test_supervision.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from repository.experiments import end_experiment, find_experiment_folder, start_experiment
from repository.registry import read_acts, record_act
from server.promotion import Promotion, awaits_move
from server.state import ServerState
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import Experiment, read_experiment
from tests.present import present
from tests.triton_double import accept
from tests.unit.server.conftest import read_saved
from tests.unit.server.shops import spoil_updater


def promote(state: ServerState) -> Experiment:
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5, promotes=True))
    return end_experiment(state.repo, "more clicks", state="promoted")


def test_a_server_moves_from_the_champion_alone(state):
    experiment = promote(state)
    assert awaits_move(state, experiment)
    assert not awaits_move(replace(state, generation=2), experiment)
    assert not awaits_move(replace(state, generation=7), experiment)  # published since


@pytest.mark.parametrize("action", ["activated", "followed", "pinned"])
def test_another_server_that_moved_changes_nothing_and_a_person_has_the_last_word(state, action):
    experiment = promote(state)
    record_act(state.repo, action, 2)
    assert awaits_move(state, experiment)
    record_act(state.repo, action, 1)
    assert not awaits_move(state, experiment)


@pytest.mark.parametrize("ended", ["stopped", "rolled back"])
def test_what_ended_otherwise_moves_nothing(state, ended, tmp_path):
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    assert Promotion(state, tmp_path).look() == ""
    assert not awaits_move(state, end_experiment(state.repo, "enough", state=ended))
    assert Promotion(state, tmp_path).look() == ""


def test_a_move_that_fails_is_tried_once_and_recorded(state, tmp_path):
    promote(state)
    followed = Promotion(state, tmp_path)
    assert "generation 2 is promoted, because more clicks; generation 1 stays, because" in followed.look()
    assert (read_acts(state.repo)[-1].action, read_acts(state.repo)[-1].generation) == ("not promoted", 2)
    assert followed.look() == Promotion(state, tmp_path).look() == ""
    stopped = present(read_experiment(find_experiment_folder(state.repo)))
    assert (stopped.state, stopped.reason) == ("stopped", f"not promoted: {reason_of(state)}")


def test_a_move_that_fails_while_another_experiment_begins_leaves_that_one_alone(served, tmp_path):
    state, double = served
    promote(state)

    def start_another(_: str) -> str:
        double.before_index = accept
        start_experiment(state.repo, Experiment("summer", 1, 3, 0.5))
        return "it is too busy"

    double.before_index = start_another
    assert "generation 1 stays" in Promotion(state, tmp_path).look()
    assert present(read_experiment(find_experiment_folder(state.repo))).name == "summer"
    assert "No server answers" in reason_of(state)


@pytest.mark.parametrize("failing", ["unload", "updater"])
def test_a_move_whose_rest_fails_is_a_promotion(served, tmp_path, failing):
    """The server answers with the challenger; what it served before is not unloaded, or the updater does not start."""
    state, double = served
    experiment = promote(state)
    state.save(tmp_path)
    if failing == "unload":
        double.before_load = lambda model: "it failed" if double.states.get((ENSEMBLE, 2)) == "READY" else ""
        reason = "did not unload what it served before"
    else:
        spoil_updater(state.repo, 2)
        reason = "The updater of generation 2 did not start"
    done = Promotion(state, tmp_path).look()
    assert "is promoted, because more clicks and answers, but: " in done
    assert reason in done
    saved = read_saved(state, tmp_path)
    assert saved.generation == 2
    promoted, replaced, activated = read_acts(state.repo)[-3:]
    assert [(act.action, act.generation) for act in (promoted, activated)] == [("promoted", 2), ("activated", 2)]
    assert (replaced.action, replaced.generation) == ("replaced", 1)  # where its drift is looked for
    assert "by 2: its drift is not known" in replaced.reason
    assert read_experiment(find_experiment_folder(state.repo)) == experiment
    assert Promotion(saved, tmp_path).look() == ""


def reason_of(state: ServerState) -> str:
    """Return the reason in the latest act, without the experiment's facts."""
    return read_acts(state.repo)[-1].reason.partition("not promoted: ")[2] or read_acts(state.repo)[-1].reason
