"""A running server moves between generations under load: no request fails, no answer mixes two generations."""

from __future__ import annotations

import shutil
import time
from collections import Counter

import pytest
import tritonclient.grpc as grpcclient

from repository.generations import list_published_generations, pin, write_pins
from repository.triton.models import read_config
from server.control import find_held_generations
from server.generations.activation import activate, find_served_generation
from server.status.health import read_model_states
from serving.contract.errors import ConfigError, ServerError
from serving.contract.generations import read_pinned_generation
from tests.interrupting import called_on_return
from tests.present import present
from tests.repositories import describe_entries
from tests.server.support import toys
from tests.server.support.load import Load

CLIENTS, PAUSE_S = 4, 0.005  # between two requests of a client: load is wanted, not a processor that does nothing else


class Questions(Load):
    """Questions to `recommend`. generations: number of answers by the generation of the first step, of the second."""

    def __init__(self, grpc_url: str) -> None:
        super().__init__(grpc_url, CLIENTS)
        self.generations: Counter = Counter()

    def ask(self, client: grpcclient.InferenceServerClient, turn: int) -> None:
        time.sleep(PAUSE_S)
        answer = toys.ask(client, 1)
        self.generations[answer // 1000 % 1000, answer % 1000] += 1


def loads_of(server, name: str) -> list[str]:
    """Versions of a step the server was asked to bring up as new processes, in order, as its log says."""
    lines = server.log_path.read_text().splitlines()
    return [line for line in lines if f"TRITONBACKEND_ModelInstanceInitialize: {name}_0_0" in line]


def test_moves_forward_and_back_under_load_without_a_failure_or_a_mix(repo, launch):
    """A publisher moved the configs to generation 2 first: the old one comes from the server, not from disk.

    The next start serves the generation that was activated last.
    """
    server = launch(repo)
    toys.publish(repo, 2)
    toys.publish(repo, 3)
    pin(repo, 2)
    with Questions(server.grpc_url) as load:
        assert activate(server.grpc_url, repo, 2) == 1
        assert activate(server.grpc_url, repo, 3) == 2
        assert activate(server.grpc_url, repo, 1) == 3
    assert load.errors == []
    assert set(load.generations) == {(1, 1), (2, 2), (3, 3)}
    assert find_served_generation(server.grpc_url) == read_pinned_generation(repo) == 1
    # one load per step and move: the generation being served is never loaded a second time
    assert len(loads_of(server, "first")) == len(loads_of(server, "second")) == 4
    activate(server.grpc_url, repo, 3)
    server.stop()
    again = launch(repo)
    with grpcclient.InferenceServerClient(again.grpc_url) as client:
        assert toys.ask(client, 4) == toys.expected(4, generation=3)


def test_a_server_moves_and_starts_by_configs_that_it_is_sent(repo, launch):
    """As where the repository cannot be written: its own configs name generation 2 all the time."""
    server = launch(repo)
    toys.publish(repo, 2)
    pin(repo, 2)
    before = describe_entries(repo)
    with Questions(server.grpc_url) as load:
        assert activate(server.grpc_url, repo, 2, writes=False) == 1
        assert activate(server.grpc_url, repo, 1, writes=False) == 2
    assert load.errors == []
    assert set(load.generations) == {(1, 1), (2, 2)}
    assert len(loads_of(server, "first")) == len(loads_of(server, "second")) == 3
    server.stop()
    server.start(generation=1)
    assert (server.state.generation, find_served_generation(server.grpc_url), read_pinned_generation(repo)) == (1, 1, 2)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert toys.ask(client, 4) == toys.expected(4, generation=1)
    assert describe_entries(repo) == before


def test_a_generation_that_does_not_load_or_is_not_published_changes_nothing(repo, launch):
    """Nor does a move from a generation that was removed."""
    server = launch(repo)
    toys.publish(repo, 2)
    (repo / "second" / "2" / "model.py").write_text("raise RuntimeError('manifest does not match: publish again')")
    with (
        Questions(server.grpc_url) as load,
        pytest.raises(ServerError, match=r"stays at generation 1.*does not match") as caught,
    ):
        activate(server.grpc_url, repo, 2)
    assert str(caught.value).count("\n") == 1  # a reason and a remedy: the traceback is in the server's log
    assert load.errors == []
    assert set(load.generations) == {(1, 1)}
    assert find_served_generation(server.grpc_url) == read_pinned_generation(repo) == 1
    states = present(read_model_states(server.grpc_url))
    assert {key for key, (state, _) in states.items() if state == "READY"} == {("first", 1), ("second", 1), ("recommend", 1)}

    shutil.rmtree(repo / "second" / "2")
    assert list_published_generations(repo) == (1,)
    with pytest.raises(ConfigError, match=r"Generation 2 is not in .*, which holds \[1\]"):
        activate(server.grpc_url, repo, 2)
    toys.publish(repo, 3)
    pin(repo, 3)
    toys.remove(repo, 1)
    with pytest.raises(ServerError, match=r"answers with generation 1, which is no longer in .*make stop, then make serve"):
        activate(server.grpc_url, repo, 3)
    with grpcclient.InferenceServerClient(server.grpc_url) as client:
        assert toys.ask(client, 2) == toys.expected(2, generation=1)


def test_an_old_generation_that_does_not_go_costs_no_answer(repo, launch):
    """The last step of a move fails: the new generation answers already, and goes on doing so."""
    server = launch(repo)
    toys.publish(repo, 2)
    second = repo / "second" / "2" / "model.py"

    def break_at_the_end() -> None:
        if list(read_config(repo / "second" / "config.pbtxt").version_policy.specific.versions) == [2]:
            second.write_text("raise RuntimeError('no memory left')")

    with (
        Questions(server.grpc_url) as load,
        called_on_return(break_at_the_end, write_pins),
        pytest.raises(ServerError, match=r"answers with generation 2, but did not unload .*Try again.*no memory left"),
    ):
        activate(server.grpc_url, repo, 2)
    assert load.errors == []
    assert set(load.generations) <= {(1, 1), (2, 2)}
    assert find_served_generation(server.grpc_url) == read_pinned_generation(repo) == 2
    assert find_held_generations(repo, server.run_dir) == {1, 2}
    second.write_text((repo / "second" / "1" / "model.py").read_text())
    assert activate(server.grpc_url, repo, 2) == 2  # trying again is the remedy
    deadline = time.monotonic() + 10
    while find_held_generations(repo, server.run_dir) != {2}:  # unloading goes on after the answer
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_no_server_to_move(repo):
    with pytest.raises(ServerError, match="No server answers at localhost:1"):
        activate("localhost:1", repo, 1)
