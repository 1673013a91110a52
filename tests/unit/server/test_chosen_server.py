"""`diagnose` and `activate` find the server that was started here, whatever its ports are."""

from __future__ import annotations

import json
import re
import time
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server import __main__ as commands
from server.start.ports import Ports, find_free_ports
from server.state import ServerState
from server.status import condition
from serving.contract.errors import RecommenderError, ServerError
from serving.live.layout import Layout
from serving.live.writer import Writer
from tests.repositories import copy_lean_repository
from tests.tags import draw_tag, run_tagged
from tests.triton_double import TritonDouble
from tests.unit.live.batches import KINDS, purchase

COMMANDS = (["diagnose"], ["activate", "--generation", "2"])


@pytest.fixture
def run_dir(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    return tmp_path


def call(*arguments: str) -> str:
    return CliRunner().invoke(commands.app, arguments, catch_exceptions=False).stdout


def test_the_only_server_is_diagnosed(run_dir):
    ports = find_free_ports()
    ServerState(2**22 + 1, draw_tag(), run_dir, run_dir / "log", ports).save(run_dir)
    told = call("diagnose")
    assert told.startswith(f"server at localhost:{ports.grpc}: its process is gone. Start it again: .venv/bin/python -m server")
    assert call("diagnose", "--grpc-port", "1").startswith("server at localhost:1: ")


def test_the_only_running_server_is_moved(run_dir):
    ended, running = find_free_ports(), find_free_ports()
    with run_tagged(tag := draw_tag()) as server:
        ServerState(2**22 + 1, draw_tag(), run_dir, run_dir / "log", ended).save(run_dir)
        ServerState(server.pid, tag, run_dir / "shop", run_dir / "log", running).save(run_dir)
        with pytest.raises(RecommenderError, match=f"{run_dir / 'shop'}"):  # which holds no generation to move to
            call(*COMMANDS[1])


@pytest.mark.parametrize("command", ["status", "diagnose"])
def test_a_disk_of_the_live_store_that_is_nearly_full_is_told(run_dir, monkeypatch, command):
    repo = copy_lean_repository(run_dir / "repo")
    (store := run_dir / "repo.live").mkdir()
    with run_tagged(tag := draw_tag()) as server:
        state = ServerState(server.pid, tag, repo, run_dir / "log", find_free_ports())
        state.save(run_dir)
        double = TritonDouble(repo, state.ports.grpc)
        try:
            monkeypatch.setattr(condition, "LEAST_FREE_BYTES", 0)
            assert "MiB are free" not in call(command)
            monkeypatch.setattr(condition, "LEAST_FREE_BYTES", 1 << 60)
            told = re.search(rf"only (\d+) MiB are free on the disk of the live store {store}, which refuses", call(command))
        finally:
            double.stop()
    assert told


def ask_about_clock(run_dir: Path, repo: Path) -> bool:
    """Return whether a server of the repository is reported to have a clock that is behind, by both commands."""
    with run_tagged(tag := draw_tag()) as server:
        state = ServerState(server.pid, tag, repo, run_dir / "log", find_free_ports())
        state.save(run_dir)
        double = TritonDouble(repo, state.ports.grpc)
        try:
            warned = {"this machine's clock says" in call(command) for command in ("status", "diagnose")}
        finally:
            double.stop()
    assert len(warned) == 1
    return warned.pop()


@pytest.mark.parametrize(("hours", "warns"), [(23, False), (25, True)])
def test_a_live_store_that_is_ahead_of_the_clock_is_told(run_dir, hours, warns):
    repo, later_ms = copy_lean_repository(run_dir / "repo"), round(1_000 * (time.time() + 3_600 * hours))
    with closing(Writer(run_dir / "repo.live", Layout(), KINDS.names, now_ms=lambda: later_ms)) as writer:
        writer.append(purchase(1, 2, later_ms))
        assert ask_about_clock(run_dir, repo) == warns


def test_a_generation_whose_log_is_ahead_of_the_clock_is_told(run_dir):
    repo = copy_lean_repository(run_dir / "repo")
    path = repo / "retrieve" / "1" / "stage.json"
    stage = json.loads(path.read_text())
    stage["settings"]["as_of_s"] = int(time.time()) + 100_000
    path.write_text(json.dumps(stage))
    assert ask_about_clock(run_dir, repo)


@pytest.mark.parametrize("command", COMMANDS, ids=["diagnose", "activate"])
def test_of_several_servers_one_must_be_chosen(run_dir, command):
    with run_tagged(one := draw_tag()) as first, run_tagged(other := draw_tag()) as second:
        ServerState(first.pid, one, run_dir, run_dir / "log", Ports(9, 8, 7)).save(run_dir)
        ServerState(second.pid, other, run_dir, run_dir / "log", Ports(5, 4, 3)).save(run_dir)
        with pytest.raises(
            ServerError, match=r"2 servers were started here, on the gRPC ports 5, 9\. Choose one by --grpc-port"
        ):
            call(*command)


def test_without_a_server_nothing_is_moved(run_dir):
    with pytest.raises(ServerError, match=r"No server started here runs\. `python -m server status` lists them"):
        call(*COMMANDS[1])
