"""Starts that meet a server which is not ready, stops or restarts, and a live store that is removed under a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from repository.triton.models import hash_manifest
from server import __main__ as commands
from server.control import find_running_servers, list_supervisors, stop_server
from server.helpers.gateway import list_gateways
from server.launcher import TritonServer
from server.start.lock import hold_start_lock
from server.start.ports import Ports, find_free_port, find_free_ports
from server.state import ServerState, make_state_path, read_state
from server.status.condition import describe_removed_store
from serving.contract.errors import ServerError
from serving.live.store import DATA_FILE, find_live_folder
from tests.present import present
from tests.repositories import copy_lean_repository
from tests.server.support import toys
from tests.tags import draw_tag, run_tagged
from tests.triton_double import TritonDouble
from tests.waiting import until

HOLDER = """#!{python}
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("holds", flush=True)
time.sleep(600)
"""


@pytest.fixture
def start(run_dir, installed_double, capfd) -> Iterator[Callable[..., Start]]:
    """start(repo, ports, **options) -> a running `python -m server start`; whatever it starts is stopped after the test."""
    with ThreadPoolExecutor(1) as thread:
        yield lambda repo, ports, **options: Start(thread, capfd, repo, ports, options)
    for state in find_running_servers(run_dir):
        stop_server(state, run_dir)


@pytest.fixture
def hanging(sleeping, tmp_path) -> ServerState:
    """Return the saved state of a process that does nothing, as of a server of a toy repository that is not ready."""
    repo = toys.publish(tmp_path / "repo", 1)
    state = replace(sleeping, repo=repo, generation=1, content=hash_manifest(repo, 1))
    state.save(tmp_path)
    return state


class Start:
    """A start under way, and what it has printed so far."""

    def __init__(
        self, thread: ThreadPoolExecutor, capfd: pytest.CaptureFixture[str], repo: Path, ports: Ports, options: dict[str, Any]
    ) -> None:
        self._printed, self._capfd = "", capfd
        options = {"unsupervised": True} | options
        self._future = thread.submit(commands.start, repo, ports.grpc, ports.http, ports.metrics, **options)

    def read(self) -> str:
        self._printed += "".join(self._capfd.readouterr())
        return self._printed

    def wait_until_printed(self, text: str) -> None:
        until(lambda: self._future.done() or text in self.read())
        assert text in self.read()

    def wait(self) -> str:
        self._future.result()
        return self.read()


def test_a_server_whose_start_was_ended_is_waited_for(hanging, start):
    repo, ports = hanging.repo, hanging.ports
    starting = start(repo, ports)
    starting.wait_until_printed(f"waiting for a server that is starting, or hangs: {repo}")
    starting.wait_until_printed(f"To restart it: make stop GRPC_PORT={ports.grpc}, then this command again")
    double = TritonDouble(repo, ports.grpc)
    assert f"already running: {repo}" in starting.wait()
    double.stop()


def test_a_supervisor_may_restart_the_server_that_a_start_waits_for(hanging, tmp_path, start):
    repo, ports = hanging.repo, hanging.ports
    with run_tagged(hanging.tag) as restarted:
        starting = start(repo, ports)
        starting.wait_until_printed("waiting for a server that is starting, or hangs")
        with hold_start_lock(tmp_path, ports.grpc):
            os.kill(hanging.pid, signal.SIGKILL)
            replace(hanging, pid=restarted.pid).save(tmp_path)
            double = TritonDouble(repo, ports.grpc)
        assert f"(process {restarted.pid})" in starting.wait()
        double.stop()


def test_a_server_that_ends_before_it_is_ready_is_waited_for_no_longer(hanging, start):
    starting = start(hanging.repo, hanging.ports)
    starting.wait_until_printed("waiting for a server that is starting, or hangs")
    os.kill(hanging.pid, signal.SIGKILL)
    assert f"ready: {hanging.repo}" in starting.wait()


@pytest.mark.usefixtures("installed_double")
def test_a_server_that_is_stopped_while_it_starts_is_no_failure_of_its_models(tmp_path):
    repo, ports = toys.publish(tmp_path / "repo", 1), find_free_ports()
    path = make_state_path(tmp_path, ports.grpc)
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(TritonServer(repo, ports, run_dir=tmp_path).start)
        until(path.exists)
        os.kill(present(read_state(path)).pid, signal.SIGTERM)
        with pytest.raises(ServerError, match=r"^The server was stopped while it started \(SIGTERM, as of `make stop`\)"):
            starting.result()


@pytest.mark.parametrize("optional", [False, True])
def test_a_server_that_is_stopped_while_its_gateway_starts_is_no_failure_of_the_gateway(tmp_path, start, optional):
    ports = find_free_ports()
    path, options = make_state_path(tmp_path, ports.grpc), {"gateway_port": find_free_port(), "gateway_optional": optional}
    starting = start(copy_lean_repository(tmp_path / "repo"), ports, unsupervised=False, **options)
    until(lambda: (state := read_state(path)) is not None and list_gateways(state.tag))
    state = present(read_state(path))
    stop_server(state, tmp_path)
    with pytest.raises(ServerError, match=r"^The server was stopped while its gateway started \(as of `make stop`\)"):
        starting.wait()
    assert not list_gateways(state.tag) + list_supervisors(state.tag)  # a supervisor would start the server again


def test_status_tells_of_a_live_store_that_was_moved_or_removed_under_the_server(tmp_path):
    repo, program, tag = copy_lean_repository(tmp_path / "repo"), tmp_path / "tritonserver", draw_tag()
    store = find_live_folder(repo) / DATA_FILE
    store.parent.mkdir()
    store.write_bytes(b"events")
    program.write_text(HOLDER.format(python=sys.executable))
    program.chmod(0o700)
    with subprocess.Popen([program, store, tag], stdout=subprocess.PIPE, text=True) as server:
        assert present(server.stdout).readline() == "holds\n"
        state = ServerState(server.pid, tag, repo, tmp_path / "log", find_free_ports())
        assert describe_removed_store(state) == ""
        moved = store.parent.rename(tmp_path / "moved")
        assert f"its live store was moved to {moved / DATA_FILE}, so events are refused" in describe_removed_store(state)
        moved = moved.rename(store.parent.with_name(f"{store.parent.name}.another"))  # as it is set aside
        assert "so events are refused" in describe_removed_store(state)
        store.parent.mkdir()
        store.write_bytes(b"events of the shop that is served now")
        assert describe_removed_store(state) == ""
        (moved / DATA_FILE).unlink()
        assert describe_removed_store(state).startswith("its live store was removed, so events are refused")
        server.kill()
