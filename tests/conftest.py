"""Split the tests into lanes, one folder each:

    unit      no tritonserver, loopback only
    long      the same, but takes seconds a test: exports, trainings, experiments, compiled machine code, processes to wait for
    contract  a fake backend
    server    a real tritonserver
    gpu       needs a GPU

`make test` runs them all (tests/lanes.py).
"""

from __future__ import annotations

import gc
import logging
import shutil
from collections import Counter
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from tests.unit.tables.kafka_broker import MockBroker
    from tests.unit.tables.redis_server import RedisServer

# Files and folders that share what a session fixture makes, trained models or a server: one worker runs a group
SERVED = ("perf", "bad_requests", "served_answers", "fused", "tables", "other_languages")
SHARING = (
    ("tests/long/training/models/",),
    ("tests/long/training/ranking/",),
    tuple(f"tests/server/test_{name}.py" for name in SERVED),
)
LONGEST = tuple(f"tests/long/{name}.py" for name in ("test_bounds", "rounds/test_follow", "test_dask", "test_smoke"))


def pytest_configure(config: pytest.Config) -> None:
    config.option.loadscopereorder = False  # below, or in tests/server/conftest.py, the files are put in order


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the unit lane, whose tests often wait, beside a server lane, and end with files of few tests, but for LONGEST.

    What starts last leaves a worker idle.
    """
    if all(item.nodeid.startswith("tests/server/") for item in items):
        return
    sizes = Counter(find_scope(item.nodeid) for item in items)
    items.sort(key=lambda item: rank_file(find_scope(item.nodeid), sizes))


def rank_file(scope: str, sizes: Counter[str]) -> tuple[bool, bool, int]:
    """Return the sort key of a file or group of files. sizes: its number of tests"""
    return scope.startswith("tests/long/"), scope not in LONGEST, -sizes[scope]


def find_scope(nodeid: str) -> str:
    """Return what one worker runs as a whole: the file of a test, or the first entry of its group of SHARING."""
    file = nodeid.split("::")[0]
    return next((group[0] for group in SHARING if file.startswith(group)), file)


class FilesByFixture(LoadFileScheduling):
    """Gives all tests of a file to one worker, and all files of a SHARING group to one worker."""

    def _split_scope(self, nodeid: str) -> str:
        return find_scope(nodeid)


@pytest.hookimpl(optionalhook=True)  # a run may leave pytest-xdist out
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesByFixture | None:
    return FilesByFixture(config, log) if config.option.dist == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect garbage seldom, without the objects that imports create: they stay, and each pass takes up to half a second."""
    gc.disable()
    collected = yield
    gc.freeze()
    gc.set_threshold(20_000, 20)  # in place of 700, 10
    gc.enable()
    return collected


@pytest.fixture(autouse=True)
def unchanged_logging() -> Iterator[None]:
    """Undo what a test does to the root logger: a command that logs to the test's own standard output changes it."""
    root = logging.getLogger()
    level, handlers = root.level, root.handlers[:]
    yield
    root.setLevel(level)
    root.handlers[:] = handlers


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    from tests.unit.tables.kafka_broker import MockBroker

    broker = MockBroker()
    yield broker
    broker.stop()


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """Yield a Redis that tests share, because each start takes two seconds. Use names of your own, or `empty_redis`."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)")
    from tests.unit.tables.redis_server import RedisServer

    server = RedisServer(tmp_path_factory.mktemp("redis") / "shared")
    yield server
    server.stop()


@pytest.fixture
def empty_redis(redis_server: RedisServer) -> RedisServer:
    """Return the shared Redis, running and empty. The test may freeze it, stop it or fill it."""
    redis_server.restore()
    return redis_server
