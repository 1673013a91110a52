"""A server is examined by a question that is nobody's, and by looking at the disk of its live store."""

from __future__ import annotations

import shutil
from collections import namedtuple
from dataclasses import replace

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2

from repository.experiments import end_experiment, start_experiment
from repository.generations import pin
from server import keys
from server.start.ports import find_free_ports
from server.state import ServerState
from server.status.condition import ask, describe_network_disk, describe_other_pin, examine, list_start_warnings
from serving.contract.artifacts import read_stage
from serving.contract.errors import ServerError
from serving.contract.tensors import PROBE_USER_ID
from serving.live.experiment import Experiment
from tests.repositories import copy_lean_repository
from tests.tags import draw_tag, run_tagged
from tests.unit.clients.grpc_double import GrpcDouble
from tests.waiting import until

Mount = namedtuple("Mount", "mountpoint fstype")


def test_the_question_is_of_no_user_of_the_shop():
    double = GrpcDouble(lambda query: [3])
    try:
        ask(double.url)
    finally:
        double.stop()
    [call] = double.fake.calls
    assert call.inputs["user_id"].tolist() == [[PROBE_USER_ID]]


def test_a_live_store_on_a_network_file_system_is_told(tmp_path, monkeypatch):
    repo, mounts = copy_lean_repository(tmp_path / "repo"), [Mount("/", "ext4"), Mount("/elsewhere", "nfs4")]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: mounts)
    assert describe_network_disk(repo) == ""
    mounts.append(Mount(str(tmp_path), "nfs4"))
    assert "repo.live is on a network file system (nfs4)" in describe_network_disk(repo)
    assert describe_network_disk(tmp_path / "absent") == ""
    shutil.rmtree(repo / "observe")
    assert describe_network_disk(repo) == ""


def test_live_settings_of_another_version_are_told_because_no_helper_of_the_store_runs_with_them(tmp_path):
    repo = copy_lean_repository(tmp_path / "repo")
    assert list_start_warnings(repo) == []
    info = read_stage(repo / "observe" / "1")
    replace(info, settings=info.settings | {"of_a_later_version": 1}).write(repo / "observe" / "1")
    [told] = list_start_warnings(repo)
    assert told.startswith("the live store is not maintained, and no events come from Kafka or go to Redis, because ")
    assert "has other settings than observe expects" in told
    assert "'of_a_later_version'. Export the repository again (`make export`), or move" in told
    shutil.rmtree(repo / "observe")
    assert list_start_warnings(repo) == []


def test_another_generation_than_the_pinned_one_is_told(state):
    """With what a restart would do to an experiment, which holds the server where it is."""
    assert describe_other_pin(state) == ""
    pin(state.repo, 2)
    told = describe_other_pin(state)
    assert "generation 2 is pinned, and generation 1 is served" in told
    assert f"activate --generation 2 --grpc-port {state.ports.grpc})" in told
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    told = describe_other_pin(state)
    assert "A restart would serve 2, and end experiment spring" in told
    assert f"python -m export pin 1 --repo {state.repo}" in told
    end_experiment(state.repo, "enough")
    assert "generation 2 is pinned" in describe_other_pin(state)
    (state.repo / "recommend" / "config.pbtxt").unlink()
    assert describe_other_pin(state) == ""


class Guarded(GrpcDouble):
    """Lists its models to those who show the key, as tritonserver does."""

    key = ""

    def ServerLive(self, request, context):
        return service_pb2.ServerLiveResponse(live=True)

    def RepositoryIndex(self, request, context):
        if (keys.GRPC_HEADER, self.key) not in list(context.invocation_metadata()):
            context.abort(grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header")
        return service_pb2.RepositoryIndexResponse()


@pytest.mark.parametrize("content", [None, b"", b"tag key", b"\xff a b"])
def test_a_key_that_was_removed_or_damaged_is_told(content, tmp_path, monkeypatch):
    """The server goes on answering, but nobody can move it."""
    monkeypatch.setattr(keys, "KEYS_DIR", tmp_path / "keys")
    double = Guarded(lambda query: [3])
    try:
        port, others = int(double.url.rpartition(":")[2]), find_free_ports()
        with run_tagged(tag := draw_tag()) as server:
            state = ServerState(server.pid, tag, tmp_path, tmp_path / "log", replace(others, grpc=port))
            double.key = keys.new_key(state.grpc_url, tag, "")
            assert "nobody can move it" not in str(examine(state.grpc_url, state))
            (path,) = keys.KEYS_DIR.iterdir()
            path.unlink() if content is None else path.write_bytes(content)
            condition = examine(state.grpc_url, state)
        assert keys.find_key(state.grpc_url) == ""
    finally:
        double.stop()
    assert condition.fault == ""
    assert "nobody can move it" in condition.facts


def test_a_question_that_is_answered_late_is_not_cancelled():
    """A cancelled call can crash tritonserver 2.51."""
    server = GrpcDouble(lambda query: [1])
    try:
        ask(server.url, timeout_s=20.0)
        server.delay_s = 2.0
        with pytest.raises(ServerError, match=r"recommend does not answer a request within 0\.1 s: Deadline Exceeded"):
            ask(server.url, timeout_s=0.1)
        until(lambda: server.n_ended == 2)
        assert server.n_cancelled == 0
    finally:
        server.stop()


def test_who_asks_is_told_why_there_is_no_answer():
    server = GrpcDouble(lambda query: [1])
    server.failures = [(grpc.StatusCode.UNAVAILABLE, "the queue is full")]
    try:
        with pytest.raises(ServerError, match=r"recommend does not answer a request within 20 s: the queue is full"):
            ask(server.url, timeout_s=20.0)
    finally:
        server.stop()
