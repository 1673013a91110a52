"""The address that the commands state for a server's gateway is the one at which it answers."""

from __future__ import annotations

import os
import socket
import ssl
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from server.helpers import gateway
from server.start.ports import find_free_port, find_free_ports
from server.state import ServerState
from serving.contract.errors import ServerError
from tests.certificates import make_certificate
from tests.repositories import small_repository
from tests.waiting import until


@contextmanager
def make_state(run_dir: Path) -> Iterator[ServerState]:
    """Yield the state of a server that does not run; its gateway does without it, with popular items."""
    state = ServerState(os.getpid(), uuid.uuid4().hex, small_repository(), run_dir / "server.log", find_free_ports())
    state.save(run_dir)
    yield state
    gateway.stop(state.tag)


@pytest.fixture
def state(tmp_path) -> Iterator[ServerState]:
    with make_state(tmp_path) as state:
        yield state


@pytest.fixture(scope="module")
def running(tmp_path_factory) -> Iterator[tuple[ServerState, Path]]:
    """Yield the state of a server with a gateway, and its run folder. Every test leaves the gateway as it was."""
    run_dir = tmp_path_factory.mktemp("running")
    with make_state(run_dir) as state:
        yield gateway.follow(state, find_free_port(), "", run_dir), run_dir


def write_settings(folder: Path) -> Path:
    make_certificate(folder, "gateway")
    settings = folder / "gateway.toml"
    settings.write_text('certificate = "gateway.pem"\nkey = "gateway.key"\n')
    return settings


def test_a_gateway_with_a_certificate_is_named_by_https(state, tmp_path):
    port = find_free_port()
    followed = gateway.follow(state, port, str(write_settings(tmp_path)), tmp_path)
    assert followed.settings["gateway_url"] == f"https://127.0.0.1:{port}"
    trusting = ssl.create_default_context(cafile=str(tmp_path / "gateway.pem"))
    assert httpx.get(f"{followed.settings['gateway_url']}/healthz", verify=trusting).status_code == 200


def test_a_gateway_that_runs_is_kept(running):
    followed, run_dir = running
    port = followed.settings["gateway_port"]
    assert followed.settings["gateway_url"] == f"http://127.0.0.1:{port}"
    pids = {process.pid for process in gateway.list_gateways(followed.tag)}
    assert gateway.follow(followed, port, "", run_dir) == followed
    assert gateway.follow(followed, find_free_port(), "", run_dir, keep_port=True) == followed
    assert {process.pid for process in gateway.list_gateways(followed.tag)} == pids


def test_a_gateway_that_does_not_start_says_why_in_one_sentence(state, tmp_path):
    absent = tmp_path / "gateway.toml"
    told = rf"its gateway does not start: {absent} cannot be read: No such file or directory\. .* lists the keys\. Whole log: "
    with pytest.raises(ServerError, match=told):
        gateway.follow(state, find_free_port(), str(absent), tmp_path)


def test_a_gateway_that_cannot_move_stays_where_it_is(running):
    followed, run_dir = running
    url = followed.settings["gateway_url"]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ServerError, match=f"its gateway stays at {url}: port .* is taken. Stop what listens there"):
            gateway.follow(followed, taken.getsockname()[1], "", run_dir)
    assert httpx.get(f"{url}/healthz").status_code == 200


def test_a_gateway_whose_new_settings_are_wrong_is_started_again_as_it_was(running, tmp_path):
    followed, run_dir = running
    wrong, url, port = tmp_path / "wrong.toml", followed.settings["gateway_url"], followed.settings["gateway_port"]
    wrong.write_text("prot = 1\n")
    with pytest.raises(ServerError, match=rf"does not start as asked: .*prot.* It is started again as it was, at {url}\."):
        gateway.follow(followed, port, str(wrong), run_dir)
    until(lambda: (run := run_dir / "logs" / f"gateway-{port}.log").exists() and gateway.LISTENS in run.read_text())
    assert httpx.get(f"{url}/healthz").status_code == 200
