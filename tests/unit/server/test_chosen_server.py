"""`diagnose` and `activate` find the server that was started here, whatever its ports are."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from server.start.ports import Ports, find_free_ports
from server.state import ServerState
from server.status import condition
from server.watch import log_path
from serving.contract.errors import RecommenderError, ServerError
from serving.contract.logs import format_json_line
from serving.live.layout import Layout
from serving.live.store import find_live_folder
from serving.live.writer import Writer
from tests.repositories import copy_lean_repository
from tests.tags import draw_tag
from tests.triton_double import TritonDouble
from tests.unit.live.batches import KINDS, purchase
from tests.unit.server import conftest

COMMANDS = (["diagnose"], ["activate", "--generation", "2"])


def call(*arguments: str) -> str:
    return conftest.call(*arguments).stdout


def test_the_only_server_is_diagnosed(run_dir):
    ports = find_free_ports()
    ServerState(2**22 + 1, draw_tag(), run_dir, run_dir / "log", ports).save(run_dir)
    told = call("diagnose")
    assert told.startswith(f"server at localhost:{ports.grpc}: its process is gone. Start it again: .venv/bin/python -m server")
    assert call("diagnose", "--grpc-port", "1").startswith("server at localhost:1: ")


def test_a_diagnosis_shows_the_supervisors_last_lines_as_text(run_dir):
    ports = find_free_ports()
    ServerState(2**22 + 1, draw_tag(), run_dir, run_dir / "log", ports).save(run_dir)
    lines = [format_json_line("INFO", "server.watch", f"fault {number}", 1_700_000_000.0) for number in range(9)]
    log = log_path(run_dir, ports.grpc)
    log.parent.mkdir(exist_ok=True)
    log.write_text("\n".join([*lines, "MemoryError", '{"time": "20']))  # Python's own, and one that is being written
    told = [line for line in call("diagnose").splitlines() if line.startswith("supervisor: ")]
    faults = [f"supervisor: 2023-11-14T22:13:20.000Z fault {number}" for number in (6, 7, 8)]
    assert told == [*faults, "supervisor: MemoryError", 'supervisor: {"time": "20']


def test_the_only_running_server_is_moved(sleeping, run_dir):
    ServerState(2**22 + 1, draw_tag(), run_dir, run_dir / "log", Ports(9, 8, 7)).save(run_dir)  # which has ended
    replace(sleeping, repo=run_dir / "shop").save(run_dir)
    with pytest.raises(RecommenderError, match=f"{run_dir / 'shop'}"):  # which holds no generation to move to
        call(*COMMANDS[1])


@pytest.fixture
def answering(sleeping, run_dir) -> Iterator[Path]:
    """Yield the repository of a server that answers."""
    repo = copy_lean_repository(run_dir / "repo")
    replace(sleeping, repo=repo).save(run_dir)
    double = TritonDouble(repo, sleeping.ports.grpc)
    yield repo
    double.stop()


@pytest.mark.parametrize("command", ["status", "diagnose"])
def test_a_disk_of_the_live_store_that_is_nearly_full_is_told(answering, monkeypatch, command):
    store = find_live_folder(answering)
    store.mkdir()
    monkeypatch.setattr(condition, "LEAST_FREE_BYTES", 0)
    assert "MiB are free" not in call(command)
    monkeypatch.setattr(condition, "LEAST_FREE_BYTES", 1 << 60)
    assert re.search(rf"only (\d+) MiB are free on the disk of the live store {store}, which refuses", call(command))


def warns_of_clock() -> bool:
    """Return whether both commands report that the clock is behind."""
    (warned,) = {"this machine's clock says" in call(command) for command in ("status", "diagnose")}
    return warned


@pytest.mark.parametrize(("hours", "warns"), [(23, False), (25, True)])
def test_a_live_store_that_is_ahead_of_the_clock_is_told(answering, hours, warns):
    later_ms = round(1_000 * (time.time() + 3_600 * hours))
    with closing(Writer(find_live_folder(answering), Layout(), KINDS.names, now_ms=lambda: later_ms)) as writer:
        writer.append(purchase(1, 2, later_ms))
        assert warns_of_clock() == warns


def test_a_generation_whose_log_is_ahead_of_the_clock_is_told(answering):
    path = answering / "retrieve" / "1" / "stage.json"
    stage = json.loads(path.read_text())
    stage["settings"]["as_of_s"] = int(time.time()) + 100_000
    path.write_text(json.dumps(stage))
    assert warns_of_clock()


@pytest.mark.parametrize("command", COMMANDS, ids=["diagnose", "activate"])
def test_of_several_servers_one_must_be_chosen(sleeping, run_dir, command):
    for ports in (Ports(9, 8, 7), Ports(5, 4, 3)):
        replace(sleeping, ports=ports).save(run_dir)
    with pytest.raises(ServerError, match=r"2 servers were started here, on the gRPC ports 5, 9\. Choose one by --grpc-port"):
        call(*command)


def test_without_a_server_nothing_is_moved(run_dir):
    with pytest.raises(ServerError, match=r"No server started here runs\. `python -m server status` lists them"):
        call(*COMMANDS[1])
