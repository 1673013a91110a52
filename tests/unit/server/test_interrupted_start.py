"""A start whose command is ended, a server that is stopped while it starts, and a live store that is removed under a server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Timer

import pytest
from typer.testing import CliRunner

from repository.models import hash_manifest
from server import __main__ as commands
from server.condition import describe_removed_store
from server.launcher import TritonServer
from server.ports import find_free_ports
from server.state import ServerState, make_state_path, read_state
from serving.contract.errors import ServerError
from serving.live.store import DATA_FILE, find_live_folder
from tests.repositories import link_small_repository
from tests.server import toys
from tests.tags import draw_tag, run_tagged
from tests.triton_double import TritonDouble, write_wheel
from tests.waiting import until

HOLDER = """#!{python}
import mmap, sys, time
with open(sys.argv[1], "rb") as file:
    held = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
print("holds", flush=True)
time.sleep(600)
"""


def test_a_server_whose_start_was_ended_is_waited_for(tmp_path, monkeypatch):
    repo, ports, tag = toys.publish(tmp_path / "repo", 1), find_free_ports(), draw_tag()
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    doubles: list[TritonDouble] = []
    with run_tagged(tag) as server:
        state = ServerState(server.pid, tag, repo, tmp_path / "log", ports, {"host": "127.0.0.1"}, generation=1)
        replace(state, content=hash_manifest(repo, 1)).save(tmp_path)
        begins = Timer(1.0, lambda: doubles.append(TritonDouble(repo, ports.grpc)))
        begins.start()
        numbers = ["--grpc-port", str(ports.grpc), "--http-port", str(ports.http), "--metrics-port", str(ports.metrics)]
        result = CliRunner().invoke(
            commands.app, ["start", "--repo", str(repo), *numbers, "--unsupervised"], catch_exceptions=False
        )
        begins.join()
        doubles[0].stop()
    assert f"waiting for a server that is starting, or hangs: {repo}" in result.output
    assert f"To start anew: make stop GRPC_PORT={ports.grpc}, then this again" in result.output
    assert f"already running: {repo}" in result.output
    assert result.exit_code == 0


def test_a_server_that_is_stopped_while_it_starts_is_no_failure_of_its_models(tmp_path, monkeypatch):
    repo, ports = toys.publish(tmp_path / "repo", 1), find_free_ports()
    write_wheel(tmp_path / "wheel")
    monkeypatch.syspath_prepend(tmp_path / "wheel")
    path = make_state_path(tmp_path, ports.grpc)
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(TritonServer(repo, ports, run_dir=tmp_path).start)
        until(path.exists)
        os.kill(read_state(path).pid, signal.SIGTERM)
        with pytest.raises(ServerError, match=r"^The server was stopped while it started \(SIGTERM, as of `make stop`\)"):
            starting.result()


def test_status_tells_of_a_live_store_that_was_moved_or_removed_under_the_server(tmp_path):
    repo, program, tag = link_small_repository(tmp_path / "repo"), tmp_path / "tritonserver", draw_tag()
    store = find_live_folder(repo) / DATA_FILE
    store.parent.mkdir()
    store.write_bytes(b"events")
    program.write_text(HOLDER.format(python=sys.executable))
    program.chmod(0o700)
    with subprocess.Popen([program, store, tag], stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout.readline() == "holds\n"
        state = ServerState(server.pid, tag, repo, tmp_path / "log", find_free_ports())
        assert describe_removed_store(state) == ""
        moved = store.parent.rename(tmp_path / "moved")
        assert f"its live store was moved: it writes events into {moved / DATA_FILE}" in describe_removed_store(state)
        (moved / DATA_FILE).unlink()
        assert describe_removed_store(state).startswith("its live store was removed, so events are refused")
        server.kill()
