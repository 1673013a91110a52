"""A challenger whose files change is rolled back, before an array changes where it can be leased."""

from __future__ import annotations

import os
import queue
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from repository.challenger import read_challengers, write_challenger
from repository.experiments import end_experiment, find_experiment_folder, find_running, start_experiment
from repository.registry import read_acts
from repository.triton.models import read_repository
from server.generations.challenger import unload_challenger
from server.generations.challenger_files import ChallengerFiles, drop_damaged_challenger
from server.generations.integrity import ArtifactCheck
from serving.contract.errors import ArtifactError
from serving.contract.tensors import CHALLENGER, ENSEMBLE
from serving.live.experiment import EXPERIMENT_FILE, Experiment
from tests.unit.server.shops import begin_experiment, damage, make_shop

WRITES = "import sys; file = open(sys.argv[1], 'r+b'); file.write(b'changed!!')"


@contextmanager
def writing(path: Path) -> Iterator[subprocess.Popen]:
    """Begin to overwrite a leased file in another process. Go on when the kernel has told of it, and let the writer end."""
    told = queue.SimpleQueue[None]()  # an Event's lock must not be taken in a signal handler
    before = signal.signal(signal.SIGIO, lambda *_: told.put(None))
    path.chmod(0o644)
    with subprocess.Popen([sys.executable, "-c", WRITES, str(path)]) as writer:
        try:
            told.get(timeout=30)
            yield writer
            assert writer.wait(30) == 0
        finally:
            writer.kill()
            signal.signal(signal.SIGIO, before)


def find_vectors(repo: Path) -> Path:
    return repo / "retrieve" / "2" / "item_vectors.npy"


def test_a_changed_file_of_the_challenger_ends_its_experiment(state):
    files = ChallengerFiles(state.repo)
    assert files.look(state.grpc_url) == ""
    begin_experiment(state.repo)
    assert files.look(state.grpc_url) == ""
    path = damage(state.repo, 2)
    assert str(path) in files.look(state.grpc_url)
    last = read_acts(state.repo)[-1]
    assert (last.action, last.generation) == ("rolled back", 2)
    assert str(path) in last.reason
    assert files.look(state.grpc_url) == ""


def test_a_start_leaves_out_a_challenger_that_was_damaged_before_anybody_looked(state):
    begin_experiment(state.repo)
    path = damage(state.repo, 2)
    files = ChallengerFiles(state.repo)
    assert files.prepare_start(read_all=False) == ""  # its start fails, so the next one looks closer
    assert read_challengers(state.repo) == (2,)
    assert str(path) in files.prepare_start(read_all=True)
    assert read_acts(state.repo)[-1].action == "rolled back"
    assert read_challengers(state.repo) == ()
    assert {model.name: model.versions_loaded for model in read_repository(state.repo)}["rank"] == (1,)


@pytest.mark.parametrize(("ended", "left"), [("stopped", ()), ("rolled back", ()), ("promoted", (2,))])
def test_a_start_loads_no_challenger_whose_experiment_is_over(state, ended, left):
    begin_experiment(state.repo)
    end_experiment(state.repo, "enough", state=ended)
    files = ChallengerFiles(state.repo)
    assert files.prepare_start(read_all=True) == ""
    assert read_challengers(state.repo) == left
    write_challenger(state.repo, 2)  # of another experiment, which begins next
    assert files.prepare_start(read_all=True) == ""
    assert read_challengers(state.repo) == (2,)


def test_a_challenger_that_was_never_there_is_left_to_the_guard(state):
    files = ChallengerFiles(state.repo)
    start_experiment(state.repo, Experiment("spring", 1, 7, 0.5))
    assert files.look(state.grpc_url) == ""
    assert find_running(state.repo)


@pytest.mark.parametrize(
    ("is_over", "action", "said"),
    [
        (False, "rolled back", "experiment spring is rolled back: {} was opened for writing"),
        (True, "experiment stopped", "{} was opened for writing, and its experiment was over already"),
    ],
)
def test_the_experiment_is_over_and_the_challenger_stopped_before_an_array_changes(challenged, is_over, action, said):
    """After its end, requests in flight, and those that ask for its generation, are still answered by the challenger."""
    state, double = challenged
    files, path = ChallengerFiles(state.repo), find_vectors(state.repo)
    published, seen = path.read_bytes(), []

    def see(model: str) -> str:
        seen.append((model, read_acts(state.repo)[-1].action, path.read_bytes() == published))
        return ""

    double.before_unload = see
    assert files.look(state.grpc_url) == files.end_before_change(state.grpc_url) == ""
    if is_over:
        end_experiment(state.repo, "enough")
    with writing(path) as writer:
        if is_over:
            assert files.look(state.grpc_url) == ""
        assert writer.poll() is None
        assert files.end_before_change(state.grpc_url) == said.format(path)
    assert seen == [(CHALLENGER, action, True)]
    assert is_over or read_acts(state.repo)[-1].reason.endswith(f"{path} was opened for writing")
    assert (double.states[CHALLENGER, 2], double.states[ENSEMBLE, 1]) == ("UNAVAILABLE", "READY")
    assert path.read_bytes() != published
    assert files.look(state.grpc_url) == files.end_before_change(state.grpc_url) == ""


def test_a_challenger_is_stopped_too_where_the_rollback_cannot_be_recorded(challenged):
    state, double = challenged
    files, path = ChallengerFiles(state.repo), find_vectors(state.repo)
    assert files.look(state.grpc_url) == ""
    (find_experiment_folder(state.repo) / EXPERIMENT_FILE).write_text("{damaged")
    with writing(path):
        assert "is not rolled back" in files.end_before_change(state.grpc_url)
    assert double.states[CHALLENGER, 2] == "UNAVAILABLE"


def test_a_server_that_does_not_stop_its_challenger_is_named_and_the_writer_goes_on(challenged):
    state, double = challenged
    files, path = ChallengerFiles(state.repo), find_vectors(state.repo)
    assert files.look(state.grpc_url) == ""
    double.before_unload = lambda model: "it is busy"
    with writing(path):
        assert "is not unloaded: it is busy" in files.end_before_change(state.grpc_url)
    assert find_running(state.repo) is None


def test_nobody_waits_to_write_to_a_challenger_that_is_unloaded(challenged):
    state, _ = challenged
    files, path = ChallengerFiles(state.repo), find_vectors(state.repo)
    assert files.look(state.grpc_url) == ""
    end_experiment(state.repo, "enough")
    unload_challenger(state.grpc_url, state.repo)
    assert files.look(state.grpc_url) == ""
    path.chmod(0o644)
    os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))  # raises BlockingIOError for a leased file


def test_a_start_leaves_out_a_challenger_that_was_removed(state):
    begin_experiment(state.repo)
    (state.repo / ENSEMBLE / "2").rename(state.repo.parent / "gone")
    done = ChallengerFiles(state.repo).prepare_start(read_all=False)
    assert done.startswith("experiment spring is rolled back: ")
    assert done.endswith("is missing")
    assert read_challengers(state.repo) == ()


def test_an_experiment_is_followed_once_the_repository_can_be_read(state):
    stage = state.repo / "preprocess" / "1" / "stage.json"
    stage.rename(state.repo.parent / "stage.json")
    files = ChallengerFiles(state.repo)
    assert files.look(state.grpc_url) == ""
    (state.repo.parent / "stage.json").rename(stage)
    begin_experiment(state.repo)
    assert files.look(state.grpc_url) == ""
    find_vectors(state.repo).unlink()
    assert files.look(state.grpc_url).startswith("experiment spring is rolled back: ")


@pytest.mark.parametrize("runs", [True, False])
@pytest.mark.parametrize("layout", ["ensemble", "fused"])
def test_a_start_leaves_out_a_challenger_whose_generation_was_removed(tmp_path, layout, runs):
    """In the fused layout, no command could read the repository any more. runs: whether its experiment has begun"""
    repo = make_shop(tmp_path / "repo", 2, layout)
    write_challenger(repo, 2)
    assert len(mapped := ArtifactCheck(repo, 2).mapped) == len({path.resolve() for path in mapped}) > 0  # each is read once
    assert drop_damaged_challenger(repo) == ""
    if runs:
        start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    shutil.rmtree(repo / ENSEMBLE / "2")
    if layout == "fused":
        with pytest.raises(ArtifactError, match=r"challenger has no version to load: .* python -m server experiment stop"):
            read_repository(repo)
    said = drop_damaged_challenger(repo)
    assert said.startswith(f"{repo / ENSEMBLE / '2'} is missing. So the challenger, generation 2, is left out.")
    assert ("Its experiment spring is rolled back." in said) == runs
    assert (read_challengers(repo), find_running(repo)) == ((), None)
    assert CHALLENGER not in {model.name for model in read_repository(repo)}
