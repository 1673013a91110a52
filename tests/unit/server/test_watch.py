"""The supervisor of a server: what it notices, and that it ends together with the server where it owns it."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest

from repository.registry import read_acts
from server import watch
from server.ports import find_free_ports
from server.processes import STUB_PROGRAM, is_running
from server.state import ServerState, read_state, state_path
from server.watch import HANGS_S, Observer, Watch, build_command
from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.errors import ServerError
from serving.contract.generations import pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES
from tests.repositories import copy_small_repository
from tests.waiting import until

# A parent that never asks what became of its child, as tritonserver does not.
SERVER = """
import subprocess, sys, time
stub = subprocess.Popen([sys.argv[2], "600"])
stub.kill()
print("killed", flush=True)
time.sleep(600)
"""
SLEEPS = "import time; time.sleep(600)"


@pytest.fixture
def state(tmp_path) -> Iterator[ServerState]:
    """The saved state of a process that does nothing in the place of a server."""
    tag, ports = f"triton_test_{tmp_path.name}_", find_free_ports()
    with subprocess.Popen([sys.executable, "-c", SLEEPS, tag]) as server:
        state = ServerState(server.pid, tag, tmp_path, tmp_path / "log", ports, {"host": "127.0.0.1", "fixed": False})
        state.save(tmp_path)
        yield state
        server.kill()


def catches(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (signum - 1) & 1)


def test_a_stub_that_died_before_anybody_looked_is_missed(tmp_path):
    stub = shutil.copy(shutil.which("sleep"), tmp_path / STUB_PROGRAM)
    tag = f"triton_test_{tmp_path.name}_"
    with subprocess.Popen([sys.executable, "-c", SERVER, tag, stub], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout.readline() == "killed\n"
            state = ServerState(server.pid, tag, tmp_path, tmp_path / "log", find_free_ports())
            assert Observer(state).find_fault() == "1 of its Python model process(es) died"
        finally:
            server.kill()


def test_a_supervisor_that_owns_its_server_stops_it_and_exits_itself(state, tmp_path):
    supervisor = subprocess.Popen([*build_command(state, tmp_path), "--owner"])
    try:
        until(lambda: catches(supervisor.pid, signal.SIGTERM))
        supervisor.terminate()
        assert supervisor.wait(60) == 128 + signal.SIGTERM
    finally:
        supervisor.kill()
    assert not state_path(tmp_path, state.ports.grpc).exists()
    assert not is_running(state.pid, state.tag)


def test_a_server_that_accepts_calls_and_answers_none_does_not_hold_up_its_supervisor(state):
    ended = threading.Event()

    class Silence(grpc.GenericRpcHandler):
        def service(self, handler_call_details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: ended.wait(60) or b"")

    server = grpc.server(ThreadPoolExecutor(8), handlers=[Silence()])
    server.add_insecure_port(state.grpc_url)
    server.start()
    begun_s = time.monotonic()
    try:
        assert Observer(state).find_fault() == ""
    finally:
        ended.set()
        server.stop(None)
    assert time.monotonic() - begun_s < HANGS_S


def test_a_helper_that_does_not_start_is_no_reason_to_restart_the_server_again(state, tmp_path, monkeypatch, capsys):
    def start() -> None:
        raise ServerError("The updater of generation 1 did not start")

    restarted = replace(state, pid=state.pid + 1, log=tmp_path / "new log")
    server = SimpleNamespace(start=start, process=SimpleNamespace(poll=lambda: None), state=restarted)
    monkeypatch.setattr(watch, "end_server", lambda state: None)
    monkeypatch.setattr(watch, "TritonServer", SimpleNamespace(with_settings=lambda *_, **__: server))
    Watch(tmp_path, state.ports.grpc)._restart(state, "it crashed")
    assert read_state(state_path(tmp_path, state.ports.grpc)) == restarted
    printed = capsys.readouterr().out
    assert "The updater of generation 1 did not start" in printed
    assert "answers again" in printed


def test_a_move_to_an_intact_generation_is_recorded_with_the_damage(state, tmp_path, monkeypatch):
    repo = copy_small_repository(tmp_path / "shop")
    for model in (*STAGES, *LIVE_MODELS, ENSEMBLE):
        shutil.copytree(repo / model / "1", repo / model / "2")
    moved = replace(state, repo=repo, generation=1)
    server = SimpleNamespace(start=lambda: None, process=SimpleNamespace(poll=lambda: None), state=moved)
    monkeypatch.setattr(watch, "end_server", lambda state: None)
    monkeypatch.setattr(watch, "TritonServer", SimpleNamespace(with_settings=lambda *_, **__: server))
    replace(moved, generation=2).save(tmp_path)
    (repo / "rank" / "2" / MANIFEST_FILE).write_text("{damaged")
    supervisor = threading.Thread(target=Watch(tmp_path, state.ports.grpc).run)
    supervisor.start()
    try:
        until(lambda: read_acts(repo))
    finally:
        state.forget(tmp_path)
        supervisor.join()
    act = read_acts(repo)[0]
    assert (act.action, act.generation, pinned_generation(repo)) == ("pinned", 1, 1)
    assert MANIFEST_FILE in act.reason
