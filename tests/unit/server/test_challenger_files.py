"""A challenger whose files change is rolled back."""

from __future__ import annotations

import os

import pytest

from repository.experiments import find_running, start_experiment
from repository.registry import read_acts
from server.challenger_files import ChallengerFiles
from server.ports import Ports
from server.state import ServerState
from serving.live.experiment import Experiment
from tests.repositories import copy_generation, copy_small_repository
from tests.tags import draw_tag


@pytest.fixture
def state(tmp_path) -> ServerState:
    """The state of a server that does not run, whose repository has two generations."""
    repo = copy_small_repository(tmp_path / "repo")
    copy_generation(repo)
    return ServerState(1, draw_tag(), repo, tmp_path / "log", Ports(1, 2, 3), generation=1)


def test_a_changed_file_of_the_challenger_ends_its_experiment(state):
    files, path = ChallengerFiles(state), state.repo / "rank" / "2" / "stage.json"
    assert files.look() == ""
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    assert files.look() == ""
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-2] + b"\n\n")
    os.utime(path)
    assert str(path) in files.look()
    last = read_acts(state.repo)[-1]
    assert (last.action, last.generation) == ("rolled back", 2)
    assert str(path) in last.reason
    assert files.look() == ""


def test_a_challenger_that_was_never_there_is_left_to_the_guard(state):
    files = ChallengerFiles(state)
    start_experiment(state.repo, Experiment("spring", 1, 7, 0.5))
    assert files.look() == ""
    assert find_running(state.repo)
