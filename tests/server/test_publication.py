"""Real generations, exported here: a running server moves between them under load, and keeps the one it answers with."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from export import relayout as relayout_module
from export.relayout import relayout
from export.steps.reserve import insert_rows
from perf.tune.variant import seal_again
from repository.checks.recorded import RECORDED_FILE, Recorded, compare_answers, read_recorded
from repository.generations import list_published_generations
from repository.rules import compile_rules
from server.control import find_held_generations
from server.generations.activation import activate, find_served_generation
from server.launcher import TritonServer
from serving.contract.artifacts import read_json
from serving.contract.errors import ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.stages.rules.config import ITEMS_FILE, RulesConfig
from tests.server.support.caches import CachedQuestions, memory_cache, redis_cache
from tests.server.support.load import Load
from tests.server.support.requests import infer

PAUSE_S = 1.0  # of a client between two calls: load is wanted, not a server that is busy with nothing else
ROWS = 60


def with_rules(repository: Path, folder: Path, rules: RulesConfig) -> Path:
    """Return a copy of `repository` in `folder` whose first generation has other rules, and nothing else."""
    copy = shutil.copytree(repository, folder)
    rerank = copy / "rerank" / "1"
    item_ids = np.load(copy / ENSEMBLE / "1" / "item_ids.npy")
    nothing = [None] * len(item_ids)
    popularity = np.zeros(len(item_ids), np.int64)
    compile_rules(
        rerank,
        rules,
        item_ids=item_ids,
        category=nothing,
        provider=nothing,
        price=None,
        popularity=popularity,
        items_returned=read_json(rerank, "stage.json")["axes"]["items_returned"],
    )
    insert_rows(rerank / ITEMS_FILE, len(np.load(rerank / "item_ids.npy")) - len(item_ids))  # kept free for new items
    seal_again(copy, 1, "rerank")
    return copy


def answers_of(repository: Path, generation: int) -> Recorded:
    return read_recorded(repository / ENSEMBLE / str(generation) / RECORDED_FILE)


class RecordedQuestions(Load):
    """Recorded requests, one row a call. answers: (row, answer)."""

    def __init__(self, grpc_url: str, requests: dict[str, np.ndarray], clients: int) -> None:
        super().__init__(grpc_url, clients)
        self.requests = requests
        self.answers: list[tuple[int, dict[str, np.ndarray]]] = []

    def ask(self, client: grpcclient.InferenceServerClient, turn: int) -> None:
        time.sleep(PAUSE_S)
        row = turn % ROWS
        inputs = {name: array[row : row + 1] for name, array in self.requests.items()}
        self.answers.append((row, infer(client, user_id=inputs.pop("user_id"), **inputs)))


@pytest.fixture(scope="module")
def served(fused_repository, tmp_path_factory) -> Iterator[TritonServer]:
    """A server on a copy of the repository, which the tests of this file publish into one after the other.

    The layout is the fused one: a generation is then loaded in a third of the time.
    """
    repo = shutil.copytree(fused_repository, tmp_path_factory.mktemp("published") / "repo")
    with TritonServer(repo, run_dir=tmp_path_factory.mktemp("run")) as server:
        yield server


def assert_recorded(load: RecordedQuestions, expected: dict[int, dict[str, np.ndarray]]) -> None:
    """expected: outputs of the recorded requests by generation; each of them has answered"""
    assert load.errors == []
    assert {answer["generation"].item() for _, answer in load.answers} == set(expected)
    for row, answer in load.answers:
        outputs = expected[answer["generation"].item()]
        assert compare_answers(answer, {name: values[row : row + 1] for name, values in outputs.items()}) == ""


def test_two_exported_generations_under_load_never_mix_and_no_request_fails(
    repository, served, redis_server, tmp_path, monkeypatch
):
    """Meanwhile cached answers are the server's own, by either kind of cache."""
    repo = served.repo
    monkeypatch.setattr(relayout_module, "RUN_DIR", served.run_dir)
    first = answers_of(repo, 1)
    rows = {name: values[:ROWS] for name, values in first.inputs.items()}
    popular = np.unique(first.outputs["item_ids"][:ROWS, :3])  # nobody's list stays as it was
    other = with_rules(repository, tmp_path / "other", RulesConfig(blocked_items=tuple(map(int, popular))))
    with RecordedQuestions(served.grpc_url, first.inputs, clients=16) as load:
        assert [relayout(source, repo, "fused") for source in (other, repository)] == [2, 3]
        # the server goes on with what it has, and publications keep that: two later it still has a way to go
        assert find_served_generation(served.grpc_url) == 1
        assert list_published_generations(repo) == (1, 2, 3)
        assert find_held_generations(repo, served.run_dir) == {1}
        cached = CachedQuestions(served.grpc_url, rows, [memory_cache(), redis_cache(redis_server, str(tmp_path))])
        for generation in (1, 2, 1):
            activate(served.grpc_url, repo, generation)
            cached.check(generation)
        cached.close()
    expected = {1: first.outputs, 2: answers_of(repo, 2).outputs}
    assert (expected[1]["item_ids"][:ROWS] != expected[2]["item_ids"][:ROWS]).any(axis=1).all()
    assert_recorded(load, expected)
    assert find_served_generation(served.grpc_url) == read_pinned_generation(repo) == 1
    # who loads the repository in process gets what the server answers, newest or not
    in_process = Pipeline.load(repo)(rows)
    assert set(in_process["generation"].ravel().tolist()) == {1}
    # a generation that does not load leaves the one that answers
    (repo / ENSEMBLE / "2" / "rank" / "stage.json").unlink()
    (repo / ENSEMBLE / "2" / "rank" / "stage.json").write_text("{}")
    with pytest.raises(ServerError, match=r"stays at generation 1.*SHA-256"):
        activate(served.grpc_url, repo, 2)
    with grpcclient.InferenceServerClient(served.grpc_url) as client:
        assert infer(client, user_id=[1])["generation"].item() == 1


# Both publications fork from one process, because the imports of an export take seconds.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["export.relayout", __name__])


def publish_and_die(source: Path, repo: Path, places: set[Path], folders: int) -> None:
    """Publish, and end by SIGKILL before one folder more than `folders` is renamed to one of `places`."""
    renamed: list[Path] = []

    def count(event: str, arguments: tuple[object, ...]) -> None:
        if event == "os.rename" and (place := Path(str(arguments[1]))) in places:
            if len(renamed) == folders:
                os.kill(os.getpid(), signal.SIGKILL)
            renamed.append(place)

    sys.addaudithook(count)
    relayout(source, repo, "fused")


def kill_publication(source: Path, repo: Path, folders: int) -> None:
    """Publish, and kill that once so many version folders of the new generation are in their places."""
    number = 1 + max(int(path.name) for path in repo.glob("*/[0-9]*"))
    places = {config.with_name(str(number)) for config in repo.glob("*/config.pbtxt")}
    process = PROCESSES.Process(target=publish_and_die, args=(source, repo, places, folders))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert sum(map(Path.exists, places)) == folders


def test_a_publication_that_is_killed_leaves_the_server_and_the_next_start_with_a_whole_generation(repository, served, launch):
    """The last test: it ends the server."""
    repo = served.repo
    before = find_served_generation(served.grpc_url)
    recorded = answers_of(repo, before)
    with RecordedQuestions(served.grpc_url, recorded.inputs, clients=1) as load:
        for folders in (1, 2):
            kill_publication(repository, repo, folders)
            assert find_served_generation(served.grpc_url) == before
    assert_recorded(load, {before: recorded.outputs})
    served.stop()
    again = launch(repo)
    generation = find_served_generation(again.grpc_url)
    assert generation == read_pinned_generation(repo)
    expected = answers_of(repo, generation).outputs
    with grpcclient.InferenceServerClient(again.grpc_url) as client:
        for row in range(8):
            inputs = {name: array[row : row + 1] for name, array in recorded.inputs.items()}
            answer = infer(client, user_id=inputs.pop("user_id"), **inputs)
            assert compare_answers(answer, {name: values[row : row + 1] for name, values in expected.items()}) == ""
    newest = relayout(repository, repo, "fused")  # what was left half-written is in nobody's way, and goes
    assert newest in list_published_generations(repo)
    assert {int(path.name) for path in repo.glob("*/[0-9]*")} == set(list_published_generations(repo))
