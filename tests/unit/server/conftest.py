"""Servers without a tritonserver: the state that a start saves, processes that do nothing, and a double that answers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from repository.experiments import start_experiment
from server import __main__ as commands
from server import experiment, processes
from server.generations.challenger import load_challenger
from server.processes import STUB_PROGRAM
from server.start.ports import find_free_ports
from server.state import ServerState, make_state_path, read_state
from serving.live.experiment import Experiment
from tests.present import present
from tests.tags import draw_tag, run_tagged
from tests.triton_double import TritonDouble, write_wheel
from tests.unit.server.shops import make_shop

# Options that a start saves
SETTINGS = {"threads": 1, "cache_mib": 0, "host": "127.0.0.1", "no_http": False, "tls": "", "follow_pin": False}
Served = tuple[ServerState, TritonDouble]
# Like tritonserver, it never asks what became of its children.
PARENT = """
import os, subprocess, sys, time
stubs = [subprocess.Popen([sys.argv[2], "600"]) for _ in range(int(sys.argv[3]))]
for stub in stubs:
    stub.kill()
    os.waitid(os.P_PID, stub.pid, os.WEXITED | os.WNOWAIT)
print("killed", flush=True)
time.sleep(600)
"""


@contextmanager
def run_with_dead_stubs(tag: str, folder: Path, count: int) -> Iterator[subprocess.Popen[str]]:
    """Run a process with a tag in the place of a server, `count` of whose Python models have died, while the block runs."""
    stub = shutil.copy(present(shutil.which("sleep")), folder / STUB_PROGRAM)
    command = [sys.executable, "-c", PARENT, tag, str(stub), str(count)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert present(server.stdout).readline() == "killed\n"
            yield server
        finally:
            server.kill()


def call(*arguments: object) -> Result:
    """Call `python -m server` in this process. An error of its own is raised."""
    return CliRunner().invoke(commands.app, list(map(str, arguments)), catch_exceptions=False)


def read_saved(state: ServerState, run_dir: Path) -> ServerState:
    """Return what is saved by now of the server at the ports of `state`."""
    return present(read_state(make_state_path(run_dir, state.ports.grpc)))


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    """Return the folder in which the commands find the servers that were started here."""
    for module in (commands, experiment):
        monkeypatch.setattr(module, "RUN_DIR", tmp_path)
    return tmp_path


@pytest.fixture
def installed_double(tmp_path, monkeypatch) -> None:
    """Let whatever starts a tritonserver start a double of it."""
    write_wheel(tmp_path / "wheel")
    monkeypatch.syspath_prepend(tmp_path / "wheel")


@pytest.fixture
def sleeping(tmp_path) -> Iterator[ServerState]:
    """Yield the state of a process that does nothing in the place of a server. It is not saved."""
    with run_tagged(tag := draw_tag()) as server:
        yield ServerState(server.pid, tag, tmp_path, tmp_path / "log", find_free_ports(), {"host": "127.0.0.1"})


@pytest.fixture
def state(tmp_path) -> ServerState:
    """Return the state of a server that does not run, and answered with generation 1 of two."""
    repo = make_shop(tmp_path / "repo", generations=2)
    return ServerState(1, draw_tag(), repo, tmp_path / "log", find_free_ports(), generation=1)


@pytest.fixture
def served(state) -> Iterator[Served]:
    """Yield the same state, and a double of the server that answers."""
    double = TritonDouble(state.repo, state.ports.grpc)
    yield state, double
    double.stop()
    processes.terminate(processes.find_helpers(state.tag))


@pytest.fixture
def challenged(served) -> Served:
    """Return the same, whose challenger is generation 2 in a running experiment."""
    state, _ = served
    load_challenger(state.grpc_url, state.repo, 2)
    start_experiment(state.repo, Experiment("spring", 1, 2, 0.5))
    return served
