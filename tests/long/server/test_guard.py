"""The guard of a server's experiment: it runs while the experiment does, through restarts, and says what it did."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from live.exposures import Exposure, ExposureLog
from repository.experiments import find_experiment_folder, start_experiment
from repository.registry import read_acts
from server import control, supervisor
from server.helpers import guard
from server.helpers.guard import ExperimentGuard
from server.state import ServerState
from serving.contract.errors import ArtifactError
from serving.live.experiment import Experiment, read_experiment
from tests.present import present
from tests.waiting import until

FAILED = 30  # answers, of the challenger


@pytest.fixture
def state(state, tmp_path) -> Iterator[ServerState]:
    yield state
    control.stop_server(state, tmp_path)


def test_a_harmful_challenger_is_rolled_back_though_the_server_restarts(state, tmp_path):
    keeper, log = ExperimentGuard(state, tmp_path), guard.log_path(tmp_path, state)
    assert keeper.look() == ""
    assert guard.list_guards(state.tag) == []
    experiment = start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    assert "experiment spring runs: its guard is started" in keeper.look()
    until(lambda: log.exists() and "guards experiment spring: generation 2 beside 1" in log.read_text())
    running = guard.list_guards(state.tag)
    assert len(running) == 2  # with its supervisor
    control.end_server(state)  # as a restart does
    assert ExperimentGuard(state, tmp_path).look() == ""  # of the restarted server: it has a guard
    assert guard.list_guards(state.tag) == running
    exposures = ExposureLog(find_experiment_folder(state.repo), 1.0, keep_days=1, keep_bytes=1 << 30)
    for number in range(FAILED):
        time_ms = experiment.changed_ms + 1
        exposures.add(Exposure(f"a{number}", time_ms, number, 1, [1], [1.0], ["challenger"], "spring", "challenger"))
    exposures.close()
    (worker,) = [process for process in running if supervisor.__name__ not in process.cmdline()]
    worker.kill()  # the next one, which its supervisor starts, looks at once
    until(lambda: guard.list_guards(state.tag) == [], log.read_text)
    reason = f"it failed in {FAILED} of {FAILED} answers"
    assert f"experiment spring is rolled back, because {reason}" in log.read_text()
    assert {json.loads(line)["logger"] for line in log.read_text().splitlines()} == {"trials.guard", supervisor.LOGGER}
    assert present(read_experiment(find_experiment_folder(state.repo))).state == "rolled back"
    assert read_acts(state.repo)[-1].action == "rolled back"
    assert reason in read_acts(state.repo)[-1].reason
    assert keeper.look() == ""


def test_the_guard_ends_with_its_server(state, tmp_path):
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    ExperimentGuard(state, tmp_path).look()
    until(lambda: guard.list_guards(state.tag))  # a process that was just started has no command line for a moment
    control.stop_server(state, tmp_path)
    assert guard.list_guards(state.tag) == []


def test_an_experiment_that_cannot_be_read_is_reported_once(state, tmp_path):
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    (find_experiment_folder(state.repo) / "experiment.json").write_text("{")
    keeper = ExperimentGuard(state, tmp_path)
    with pytest.raises(ArtifactError, match="cannot be read"):
        keeper.look()
    assert keeper.look() == ""


def test_a_repository_of_somebody_else_has_no_experiments(state, tmp_path):
    assert ExperimentGuard(replace(state, repo=tmp_path / "foreign"), tmp_path).look() == ""
