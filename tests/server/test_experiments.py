"""The experiments that need a server and a gateway measure what they say. Whether bounds are met is for quiet machines.

`experiments.recovery` is not here: a round takes six minutes, and test_supervision.py and test_faults.py cause the same faults.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from experiments import overload, rest
from experiments.served import Served, serve_with_gateway
from server.processes import find_members
from tests.repositories import copy_small_fused_repository

RATE = 20.0  # requests/s, below what any machine answers


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    repo = copy_small_fused_repository(tmp_path_factory.mktemp("measured") / "repository")
    with serve_with_gateway(repo, "deadline_ms = 5_000\n") as served:
        yield served


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_overload_counts_answers_in_time_and_those_of_high_priority(served, rng):
    assert (overload.measure_idle(served, 1.0, rng).status == 200).all()
    draws = np.random.default_rng(0)  # of its own: among these 80 requests, some are of high priority
    values = overload.measure_overload(served, 1, RATE, 5_000, 4.0, draws)
    assert 0 < values["goodput over peak"] < 2
    assert 0 < values["p99 of accepted"] < 5_000
    assert (values["share of high priority accepted"], values["without any answer"]) == (1.0, 0.0)


def test_at_a_low_rate_no_deadline_is_missed_however_long_connecting_takes(served, monkeypatch):
    """The time of a request counts from the instant it is due. Whatever happens before the load begins costs none of it."""
    connect = socket.create_connection

    def connect_slowly(*args, **options) -> socket.socket:
        time.sleep(3.0)
        return connect(*args, **options)

    monkeypatch.setattr(socket, "create_connection", connect_slowly)
    values = overload.measure_grpc(served, 1.0, RATE, 2_500, 2.0, within_s=5.0)
    assert values == {"goodput over peak": 1.0, "share without an answer": 0.0}


def test_rest_is_measured_beside_grpc_and_a_plain_server_with_the_same_kernels(served, rng):
    users = served.draw_user_ids(20, rng)
    found = rest.ask_grpc(served, users, 0.5, 2)
    found |= rest.ask_rest("gateway", served.port, find_members(served.state.tag), users, 0.5, 2)
    with rest.plain_server(served.repo) as (port, process):
        found |= rest.ask_rest("plain FastAPI", port, [process], users, 0.5, 2)
    for way in ("gRPC", "gateway", "plain FastAPI"):
        own = {name: value for name, value in found.items() if name.startswith(way)}
        assert len(own) == 4
        assert all(value > 0 for value in own.values()), own


def test_the_client_of_grpc_takes_no_more_of_the_processor_than_that_of_rest(served, rng):
    """Otherwise the gateway would seem to add less than it does: a call of the Python client takes four times that of REST."""
    users, processes = served.draw_user_ids(20, rng), find_members(served.state.tag)
    ways = {
        "gRPC": lambda: rest.ask_grpc(served, users, 2.0, 1),
        "gateway": lambda: rest.ask_rest("gateway", served.port, processes, users, 2.0, 1),
    }
    spent_s = {}
    for name, ask in ways.items():
        ask()  # warm
        begun_s, begun_processor_s = time.perf_counter(), time.process_time()
        answers_per_s = ask()[f"{name}, 1 client: answers/s"]
        spent_s[name] = (time.process_time() - begun_processor_s) / (time.perf_counter() - begun_s) / answers_per_s
    assert spent_s["gRPC"] < 2 * spent_s["gateway"], spent_s
