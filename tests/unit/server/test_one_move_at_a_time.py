"""Moves of one server by several processes at once, and a server that is stopped meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from repository.experiments import end_experiment, start_experiment
from repository.generations import pin
from server import pin_follower
from server.control import activate, move_servers
from server.helpers.generation_helpers import find_helpers
from server.pin_follower import PinFollower
from server.promotion import Promotion
from server.start.lock import make_lock_folder
from server.state import ServerState
from serving.contract.errors import ServerError
from serving.contract.locks import is_locked
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import Experiment
from tests.tags import run_tagged
from tests.unit.server.conftest import call, read_saved


def activate_by_command(state: ServerState) -> None:
    call("activate", "--generation", "2")


def publish(state: ServerState) -> None:
    move_servers(state.repo, 2, state.log.parent)


def follow_pin(state: ServerState) -> None:
    pin(state.repo, 2)
    PinFollower(state, state.log.parent).look()


def promote(state: ServerState) -> None:
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5, promotes=True))
    end_experiment(state.repo, "more clicks", state="promoted")
    Promotion(state, state.log.parent).look()


@pytest.mark.parametrize("move", [activate_by_command, publish, follow_pin, promote])
def test_a_move_holds_the_start_lock_of_its_server(served, run_dir, monkeypatch, move: Callable[[ServerState], None]):
    monkeypatch.setattr(pin_follower, "SPREAD_S", 0.0)
    state, double = served
    lock = make_lock_folder(run_dir) / f"{state.ports.grpc}.start.lock"
    held = []

    def note_lock(_: str) -> str:
        held.append(is_locked(lock))
        return ""

    double.before_load = note_lock
    with run_tagged(state.tag) as process:
        state = replace(state, pid=process.pid, settings={"follow_pin": True})
        state.save(run_dir)
        move(state)
    assert set(held) == {True}
    assert not is_locked(lock)
    assert read_saved(state, run_dir).generation == 2


def test_a_server_that_is_stopped_during_a_move_leaves_no_helper(served, run_dir):
    """It has moved, and requests of the old generation are waited for: the state is gone before the helpers are to follow."""
    state, double = served
    state.save(run_dir)

    def stop_once_moved(_: str) -> str:
        if double.states.get((ENSEMBLE, 2)) == "READY":
            state.forget(run_dir)
        return ""

    double.before_index = stop_once_moved
    with pytest.raises(ServerError, match="was stopped while it moved to generation 2"):
        activate(state, 2, run_dir)
    assert find_helpers(state.tag) == []


def test_a_promotion_leaves_a_server_that_a_command_has_moved(served, run_dir):
    """The supervisor looked at the state before it waited for the command's lock."""
    state, double = served
    replace(state, generation=3).save(run_dir)
    loaded: list[str] = []
    double.before_load = lambda model: loaded.append(model) or ""  # type: ignore[func-returns-value]
    promote(state)
    assert loaded == []
