"""A server follows the pin of its repository. Real servers, under load: tests/server/test_generations.py."""

from __future__ import annotations

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from repository.challenger import write_challenger
from repository.experiments import end_experiment, start_experiment
from repository.generations import pin, write_pins
from repository.lock import LOCK_FILE, hold_publication_lock
from repository.registry import RECORD_FILE, read_acts
from server.pin_follower import RETRY_S, SPREAD_S, PinFollower
from server.state import ServerState
from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.errors import ConfigError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER, ENSEMBLE
from serving.live.experiment import Experiment
from tests.clocks import PatientClock
from tests.repositories import describe_entries
from tests.triton_double import TritonDouble
from tests.unit.server.conftest import call, read_saved
from tests.unit.server.shops import make_unwritable


@pytest.fixture
def state(state, tmp_path) -> ServerState:
    """Return the saved state of a server that was asked to follow the pin."""
    following = replace(state, settings={"follow_pin": True})
    following.save(tmp_path)
    return following


@pytest.fixture
def clock(monkeypatch) -> PatientClock:
    clock = PatientClock()
    monkeypatch.setattr("server.pin_follower.time", clock)
    return clock


def follow(follower: PinFollower, clock: PatientClock) -> str:
    """Look once a pin is noticed, and again when its time has come. Return what was done."""
    assert follower.look() == ""
    clock.sleep(SPREAD_S)
    return follower.look()


def ready(double: TritonDouble) -> set[int]:
    return {version for (_, version), state in double.states.items() if state == "READY"}


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_server_moves_to_what_was_pinned_elsewhere_and_writes_its_record_only(served, clock, tmp_path, is_writable):
    state, double = served
    pin(state.repo, 2)
    if not is_writable:
        make_unwritable(state.repo)
    before = describe_entries(state.repo)
    assert follow(PinFollower(state, tmp_path), clock) == "generation 2 is pinned: moved to it from 1"
    changed = {name for name, facts in describe_entries(state.repo).items() if facts != before.get(name, "new")}
    assert changed - {f"./{LOCK_FILE}"} == ({f"./{RECORD_FILE}"} if is_writable else set())  # the lock is opened, to wait
    acts = [(act.author, act.action, act.generation, act.reason) for act in read_acts(state.repo)]
    if is_writable:
        assert acts[0][:3] == ("server", "replaced", 1)
        assert acts[1:] == [("server", "followed", 2, "in place of 1")]
    else:
        assert acts == []
    assert ready(double) == {2}
    moved = read_saved(state, tmp_path)
    assert moved.generation == 2
    pin_again = PinFollower(moved, tmp_path)
    assert follow(pin_again, clock) == ""
    if is_writable:
        pin(state.repo, 1)  # back
        assert follow(pin_again, clock) == "generation 1 is pinned: moved to it from 2"


def test_servers_do_not_move_at_the_same_moment(served, clock, tmp_path):
    """In each third of the minute, more than one of fifty servers moves."""
    state, _ = served
    shutil.rmtree(state.repo / "rank" / "2")  # so that a look says that it tried, and moves nothing
    pin_waiting = [PinFollower(state, tmp_path) for _ in range(50)]
    config = state.repo / ENSEMBLE / "config.pbtxt"
    config.write_text(config.read_text().replace("versions: 1", "versions: 2").replace("model_version: 1", "model_version: 2"))
    assert read_pinned_generation(state.repo) == 2
    moved = []
    for _ in range(4):
        moved.append(sum(bool(follower.look()) for follower in pin_waiting))
        clock.sleep(SPREAD_S / 3)
    assert moved[0] == 0
    assert min(moved[1:]) > 1
    assert sum(moved) == 50


def test_no_server_moves_while_an_experiment_runs(served, clock, tmp_path):
    state, double = served
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    pin(state.repo, 2)
    follower = PinFollower(state, tmp_path)
    assert follow(follower, clock) == ""
    clock.sleep(10 * SPREAD_S)
    assert follower.look() == ""
    assert ready(double) == {1}
    write_challenger(state.repo, 1)  # it stays loaded until its server has moved
    end_experiment(state.repo, "enough")
    assert "moved to it from 1" in follower.look()
    assert (ENSEMBLE, 2) in double.states
    assert (CHALLENGER, 1) not in double.states  # the move leaves it alone


def test_a_damaged_generation_is_tried_again_once_it_may_be_mended(served, clock, tmp_path):
    state, double = served
    pin(state.repo, 2)
    manifest = state.repo / "rank" / "2" / MANIFEST_FILE
    content = manifest.read_text()
    manifest.write_text("{damaged")
    follower = PinFollower(state, tmp_path)
    assert "stays at generation 1, and does not follow the pin: Files of generation 2" in follow(follower, clock)
    assert ready(double) == {1}
    manifest.write_text(content)
    assert follower.look() == ""
    clock.sleep(RETRY_S)
    assert "moved to it from 1" in follower.look()


def test_a_generation_that_does_not_load_leaves_the_server_where_it_is(served, clock, tmp_path):
    state, double = served
    pin(state.repo, 2)
    double.before_load = lambda model: "it is too large" if model == "rank" and (ENSEMBLE, 2) not in double.states else ""
    told = follow(PinFollower(state, tmp_path), clock)
    assert "stays at generation 1, generation 2 does not load: it is too large" in told
    assert "names 1 again" not in told  # nothing was written
    assert read_pinned_generation(state.repo) == 2


def test_a_pin_that_moves_back_while_a_publication_is_waited_for_is_not_followed(served, clock, tmp_path):
    state, _ = served
    pin(state.repo, 2)
    follower = PinFollower(state, tmp_path)
    assert follower.look() == ""
    clock.sleep(SPREAD_S)
    with ThreadPoolExecutor() as threads:
        with hold_publication_lock(state.repo):
            looking = threads.submit(follower.look)
            while count_locks(state.repo) < 2:  # until it has read the pin, and waits for the lock
                time.sleep(0.01)
            write_pins(state.repo, 1)
        assert "generation 1 is pinned by now" in looking.result()
    assert read_saved(state, tmp_path).generation == 1


def count_locks(repo: Path) -> int:
    """Return how many times this process has opened the lock of publications."""
    return [Path(file.path) for file in psutil.Process().open_files()].count((repo / LOCK_FILE).resolve())


def test_a_server_that_was_not_asked_to_stays(served, clock, tmp_path):
    state, double = served
    pin(state.repo, 2)
    assert follow(PinFollower(replace(state, settings={}), tmp_path), clock) == ""
    assert ready(double) == {1}


def test_a_server_that_nobody_can_move_is_not_asked_to_follow(run_dir):
    with pytest.raises(ConfigError, match=r"--follow-pin needs .*--unsupervised"):
        call("start", "--repo", run_dir, "--follow-pin", "--unsupervised")
