"""Real generations, exported here: a running server moves between them under load, and keeps the one it answers with."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient

from export import relayout as relayout_module
from export.relayout import relayout
from export.reserve import insert_rows
from repository.generations import published_generations
from repository.recorded import RECORDED_FILE, Recorded, compare_answers, read_recorded
from repository.rules import compile_rules
from server.environment import PROJECT
from server.generations import activate, served_generation
from server.launcher import held_generations
from serving.contract.artifacts import MANIFEST_FILE, read_json, write_manifest
from serving.contract.generations import pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.stages.rules.config import ITEMS_FILE, RulesConfig
from tests.server.load import Load
from tests.server.requests import infer

CLIENTS = 16
PAUSE_S = 0.05  # of a client between two calls: load is wanted, not a server that is busy with nothing else
ROWS = 60


def with_rules(repository: Path, folder: Path, rules: RulesConfig) -> Path:
    """-> a copy of `repository` in `folder` whose first generation has other rules, and nothing else."""
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
    facts = read_json(rerank, MANIFEST_FILE)
    write_manifest(rerank, stage=facts["stage"], generation=facts["generation"])
    return copy


def answers_of(repository: Path, generation: int) -> Recorded:
    return read_recorded(repository / ENSEMBLE / str(generation) / RECORDED_FILE)


class RecordedQuestions(Load):
    """Recorded requests, one row a call. answers: (row, answer)."""

    def __init__(self, grpc_url: str, requests: dict[str, np.ndarray], clients: int = CLIENTS) -> None:
        super().__init__(grpc_url, clients)
        self.requests = requests
        self.answers: list[tuple[int, dict[str, np.ndarray]]] = []

    def ask(self, client: grpcclient.InferenceServerClient, turn: int) -> None:
        time.sleep(PAUSE_S)
        row = turn % ROWS
        inputs = {name: array[row : row + 1] for name, array in self.requests.items()}
        self.answers.append((row, infer(client, user_id=inputs.pop("user_id"), **inputs)))


def test_two_exported_generations_under_load_never_mix_and_no_request_fails(repository, launch, tmp_path):
    repo = shutil.copytree(repository, tmp_path / "repo")
    first = answers_of(repo, 1)
    server = launch(repo)
    popular = np.unique(first.outputs["item_ids"][:ROWS, :3])  # nobody's list stays as it was
    other = with_rules(repository, tmp_path / "other", RulesConfig(blocked_items=tuple(map(int, popular))))
    with RecordedQuestions(server.grpc_url, first.inputs) as load:
        assert relayout(other, repo, "ensemble") == 2  # the server goes on with what it has
        assert served_generation(server.grpc_url) == 1
        assert activate(server.grpc_url, repo, 2) == 1
        assert activate(server.grpc_url, repo, 1) == 2
        assert activate(server.grpc_url, repo, 2) == 1
    assert load.errors == []
    expected = {1: first.outputs, 2: answers_of(repo, 2).outputs}
    assert (expected[1]["item_ids"][:ROWS] != expected[2]["item_ids"][:ROWS]).any(axis=1).all()
    answered = {1: 0, 2: 0}
    for row, answer in load.answers:
        generation = answer["generation"].item()
        answered[generation] += 1
        assert compare_answers(answer, {name: values[row : row + 1] for name, values in expected[generation].items()}) == ""
    assert min(answered.values()) > 0
    # who loads the repository in process gets what the server answers, newest or not
    activate(server.grpc_url, repo, 1)
    in_process = Pipeline.load(repo)({name: values[:ROWS] for name, values in first.inputs.items()})
    assert set(in_process["generation"].ravel().tolist()) == {1}


def test_publications_keep_what_a_running_server_answers_with(repository, launch, tmp_path, monkeypatch):
    repo = shutil.copytree(repository, tmp_path / "repo")
    server = launch(repo)
    monkeypatch.setattr(relayout_module, "RUN_DIR", server.run_dir)
    assert [relayout(repository, repo, "ensemble") for _ in range(2)] == [2, 3]
    assert published_generations(repo) == (1, 2, 3)
    assert held_generations(repo, server.run_dir) == {1}
    assert activate(server.grpc_url, repo, 3) == 1  # two publications later it still has a way to go


PUBLISHES = (
    "import sys; from pathlib import Path; from export.relayout import relayout as r; r(*map(Path, sys.argv[1:]), 'ensemble')"
)


def kill_publication(source: Path, repo: Path, folders: int, pause_s: float) -> None:
    """Publish, and kill that `pause_s` after so many version folders of the new generation are in their places."""
    before = set(repo.glob("*/[0-9]*"))
    process = subprocess.Popen([sys.executable, "-c", PUBLISHES, str(source), str(repo)], cwd=PROJECT)
    while len(set(repo.glob("*/[0-9]*")) - before) < folders and process.poll() is None:
        time.sleep(0.000_2)
    time.sleep(pause_s)
    process.kill()
    process.wait()


def test_a_publication_that_is_killed_leaves_the_server_and_the_next_start_with_a_whole_generation(
    repository, launch, tmp_path
):
    repo, rng = shutil.copytree(repository, tmp_path / "repo"), np.random.default_rng(0)
    first = answers_of(repo, 1)
    server = launch(repo)
    with RecordedQuestions(server.grpc_url, first.inputs, clients=2) as load:
        for folders in (0, 2, 6):  # 0: at a random moment, usually before the first
            kill_publication(repository, repo, folders, rng.uniform(1, 6) if folders == 0 else rng.uniform(0, 0.002))
            assert served_generation(server.grpc_url) == 1
    assert load.errors == []
    for row, answer in load.answers:
        assert compare_answers(answer, {name: values[row : row + 1] for name, values in first.outputs.items()}) == ""
    server.stop()
    again = launch(repo)
    generation = served_generation(again.grpc_url)
    assert generation == pinned_generation(repo)
    expected = answers_of(repo, generation).outputs
    with grpcclient.InferenceServerClient(again.grpc_url) as client:
        for row in range(8):
            inputs = {name: array[row : row + 1] for name, array in first.inputs.items()}
            answer = infer(client, user_id=inputs.pop("user_id"), **inputs)
            assert compare_answers(answer, {name: values[row : row + 1] for name, values in expected.items()}) == ""
    newest = relayout(repository, repo, "ensemble")  # what was left half-written is in nobody's way
    assert activate(again.grpc_url, repo, newest) == generation
