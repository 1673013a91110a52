"""Servers for tests: real ones, on free ports, with their own run folder; whatever a test starts is gone when it ends.

`repo` and `launch` are for tests of the launcher, with toy models; `repository`, `server` and `client` are one small export,
served for the whole session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc as grpcclient

from repository.triton.models import read_config
from server.launcher import TritonServer
from server.processes import SHM_DIR, find_members
from server.start.ports import Ports, is_free
from server.status.health import open_local_client
from serving.contract.artifacts import StageInfo, find_stage_folder, read_stage
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, STAGES
from tests import repositories
from tests.server.support import toys
from tests.waiting import until

# Files that take longest, the longest first: one that starts last leaves the other workers idle
LONGEST = (
    "test_supervision",
    "test_perf",  # with the files that share its server (tests/conftest.py)
    "test_merlin",
    "test_soak",
    "test_gateway",
    "test_redis",
    "test_commands",
    "test_publication",
    "test_follow",
    "test_console",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest. Of the others, those with the fewest tests take longest."""
    sizes, places = Counter(item.path for item in items), {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: (places.get(item.path.stem, len(LONGEST)), sizes[item.path]))


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
        usual: dict[str, Any] = {"run_dir": run_dir, "ready_timeout_s": 300.0}
        server = TritonServer(repo, **usual | options)
        servers.append(server.start())
        tags.append(server.state.tag)
        return server

    yield start
    for server in servers:
        server.stop()
    for server, tag in zip(servers, tags, strict=True):
        assert find_members(tag) == []
        assert list(SHM_DIR.glob(f"{tag}*")) == []
        # Only once its last thread has ended does the kernel close the sockets of a killed process.
        until(partial(are_free, server.ports), lambda: "a port is still taken")


def are_free(ports: Ports) -> bool:
    return all(map(is_free, astuple(ports)))


@pytest.fixture(scope="session")
def repository() -> Path:
    """A real export of a small shop with context columns (store, device, temperature), which nobody may change."""
    return repositories.served_repository()


@pytest.fixture(scope="session")
def info(repository: Path) -> StageInfo:
    return read_stage(find_stage_folder(repository, STAGES[0], read_pinned_generation(repository)))


@pytest.fixture(scope="session")
def limit(repository: Path) -> int:
    """The most requests one call may carry."""
    return read_config(repository / ENSEMBLE / "config.pbtxt").max_batch_size


@pytest.fixture(scope="session")
def server(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    with TritonServer(repository, run_dir=tmp_path_factory.mktemp("run")) as server:
        yield server


@pytest.fixture(scope="session")
def fused_repository() -> Path:
    """The same models in the fused layout."""
    return repositories.fused_repository()


@pytest.fixture(scope="session")
def client(server: TritonServer) -> Iterator[grpcclient.InferenceServerClient]:
    with open_local_client(server.grpc_url) as client:  # it has the key: tests read statistics
        yield client
