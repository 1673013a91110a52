"""Servers for tests: real ones, on free ports, with their own run folder; whatever a test starts is gone when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import astuple
from pathlib import Path

import pytest

from server.launcher import TritonServer
from server.ports import is_free
from server.processes import SHM_DIR, members
from tests.server import toys


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """The toy repository, generation 1 published."""
    return toys.publish(tmp_path / "repo", 1)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def launch(run_dir: Path) -> Iterator[Callable[..., TritonServer]]:
    """launch(repo, **options) -> a started server; stopped after the test, which fails if anything of it is left."""
    servers: list[TritonServer] = []
    tags: list[str] = []

    def start(repo: Path, **options) -> TritonServer:
        server = TritonServer(repo, **{"run_dir": run_dir, "ready_timeout_s": 60.0} | options)
        servers.append(server.start())
        tags.append(server.state.tag)
        return server

    yield start
    for server in servers:
        server.stop()
    for server, tag in zip(servers, tags, strict=True):
        assert members(tag) == []
        assert list(SHM_DIR.glob(f"{tag}*")) == []
        assert all(map(is_free, astuple(server.ports)))
