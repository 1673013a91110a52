"""A server serves two generations side by side: neither mixes with the other, and none of it fails a request."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
import tritonclient.grpc as grpcclient

from repository.challenger import read_challengers, remove_challenger
from repository.generations import pin
from server.generations.activation import activate, find_served_generation
from server.generations.challenger import load_challenger, unload_challenger
from server.status.health import is_ready, read_model_states
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import CHALLENGER
from tests.server.support import toys
from tests.server.support.load import Load

CLIENTS, PAUSE_S = 4, 0.005  # between two requests of a client: load is wanted, not a processor that does nothing else
BOTH = {("first", 1), ("first", 2), ("second", 1), ("second", 2), ("recommend", 1), (CHALLENGER, 2)}


class Questions(Load):
    """Questions to `recommend`, and one to the challenger with each while `challenged` is set."""

    def __init__(self, grpc_url: str) -> None:
        super().__init__(grpc_url, CLIENTS)
        self.answers: Counter = Counter()  # (model, generation of its first step, of its second)
        self.failures: list[tuple[str, Exception]] = []
        self.challenged = threading.Event()

    def ask(self, client: grpcclient.InferenceServerClient, turn: int) -> None:
        time.sleep(PAUSE_S)
        for model in ("recommend", CHALLENGER) if self.challenged.is_set() else ("recommend",):
            try:
                answer = toys.ask(client, 1, model)
            except Exception as error:
                self.failures.append((model, error))
            else:
                self.answers[model, answer // 1000 % 1000, answer % 1000] += 1


def ready(grpc_url: str) -> set[tuple[str, int]]:
    states = read_model_states(grpc_url)
    assert states is not None  # it answers
    return {key for key, (state, _) in states.items() if state == "READY"}


def test_two_generations_answer_side_by_side_and_one_again_without_a_failure_or_a_mix(repo, launch):
    server = launch(repo)
    toys.publish(repo, 2)
    with Questions(server.grpc_url) as load:
        assert load_challenger(server.grpc_url, repo, 2) == 1
        assert ready(server.grpc_url) == BOTH
        load.challenged.set()
        while load.answers[CHALLENGER, 2, 2] < 200:
            assert not load.failures
        load.challenged.clear()
        assert unload_challenger(server.grpc_url, repo) == 2
    assert [error for model, error in load.failures if model == "recommend"] == []
    assert set(load.answers) == {("recommend", 1, 1), (CHALLENGER, 2, 2)}
    assert ready(server.grpc_url) == {("first", 1), ("second", 1), ("recommend", 1)}
    assert is_ready(server.grpc_url)
    assert not (repo / CHALLENGER).exists()
    assert unload_challenger(server.grpc_url, repo) is None


def test_a_generation_that_was_published_meanwhile_stays_pinned_and_is_not_loaded(repo, launch):
    server = launch(repo)
    toys.publish(repo, 2)
    with Questions(server.grpc_url) as load:
        load_challenger(server.grpc_url, repo, 2)
        toys.publish(repo, 3)
        pin(repo, 3)  # as a publication does
        assert unload_challenger(server.grpc_url, repo) == 2
        assert ready(server.grpc_url) == {("first", 1), ("second", 1), ("recommend", 1)}
        assert read_pinned_generation(repo) == 3
        assert activate(server.grpc_url, repo, 3) == 1
    assert load.failures == []
    assert set(load.answers) == {("recommend", 1, 1), ("recommend", 3, 3)}


def test_a_restart_serves_both_and_a_move_waits_for_the_end_of_the_experiment(repo, launch):
    """A published generation changes nothing."""
    server = launch(repo)
    toys.publish(repo, 2)
    pin(repo, 2)  # as a publication does
    load_challenger(server.grpc_url, repo, 2)
    assert read_pinned_generation(repo) == find_served_generation(server.grpc_url) == 1
    server.stop()
    again = launch(repo)
    assert ready(again.grpc_url) == BOTH
    with grpcclient.InferenceServerClient(again.grpc_url) as client:
        assert toys.ask(client, 4, CHALLENGER) == toys.expected(4, generation=2)
        assert toys.ask(client, 4) == toys.expected(4, generation=1)
    with pytest.raises(ServerError, match=r"Generation 2 is served beside 1 as challenger. Stop the experiment"):
        activate(again.grpc_url, repo, 2)
    toys.publish(repo, 3)
    with pytest.raises(ServerError, match="Generation 2 is served as challenger"):
        load_challenger(again.grpc_url, repo, 3)
    remove_challenger(repo)  # as another server on it does
    assert unload_challenger(again.grpc_url, repo) == 2
    assert activate(again.grpc_url, repo, 2) == 1


def test_a_challenger_that_does_not_load_or_cannot_be_one_leaves_the_champion_alone(repo, launch):
    server = launch(repo)
    toys.publish(repo, 2)
    for generation, said in ((1, "is the one that the server serves"), (7, "Generation 7 is not in")):
        with pytest.raises(ConfigError, match=said):
            load_challenger(server.grpc_url, repo, generation)
    (repo / "second" / "2" / "model.py").write_text("raise RuntimeError('manifest does not match: publish again')")
    with Questions(server.grpc_url) as load, pytest.raises(ServerError, match=r"generation 1 is served as before: .*manifest"):
        load_challenger(server.grpc_url, repo, 2)
    assert load.failures == []
    assert set(load.answers) == {("recommend", 1, 1)}
    assert read_challengers(repo) == ()
    assert is_ready(server.grpc_url)
