"""Split the tests into lanes, one folder each:

    unit      no tritonserver, loopback only
    long      the same, but takes seconds a test: exports, trainings, experiments, compiled machine code, processes to wait for
    contract  a fake backend
    server    a real tritonserver
    gpu       needs a GPU

With `--lane NAME` or `NAME+NAME` (from `make test`) a run keeps the results of its lanes, from which tests/lanes.py gives the
verdict over all. Such a run fails if no test of a lane ran. Only the gpu lane may skip all of its tests, each with a reason.
"""

from __future__ import annotations

import argparse
import gc
import logging
import shutil
from collections import Counter
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING

import pytest
from xdist import is_xdist_worker
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling

from tests.lanes import LANES, OUTCOMES, LaneResult
from tests.memory import FilesInMemory, has_room, remove_left_folders

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

_RESULTS = pytest.StashKey[list[LaneResult]]()
_FILES = pytest.StashKey[FilesInMemory]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--lane", type=check_lanes, help="fail when no test of a lane ran, and keep their results")


def check_lanes(run: str) -> str:
    if unknown := set(run.split("+")) - set(LANES):
        raise argparse.ArgumentTypeError(f"there is no lane {sorted(unknown)}; expected some of {LANES}, joined by +")
    return run


def pytest_configure(config: pytest.Config) -> None:
    if config.option.basetemp is None:  # a worker has been given the folder of its run
        remove_left_folders()
        if has_room():
            config.stash[_FILES] = FilesInMemory()
            config.option.basetemp = str(config.stash[_FILES].files)
    if config.getoption("--lane"):
        config.option.loadscopereorder = False  # below, or in tests/server/conftest.py, the files are put in order


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the long lane, then with the files that have the most tests: what starts last leaves a worker idle."""
    if config.getoption("--lane") == "server":
        return
    sizes = Counter(find_scope(item.nodeid) for item in items)
    items.sort(key=lambda item: (not item.nodeid.startswith("tests/long/"), -sizes[find_scope(item.nodeid)]))


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


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if exitstatus == pytest.ExitCode.OK and (files := session.config.stash.get(_FILES, None)):
        files.remove()
    run = session.config.getoption("--lane")
    if run is None or is_xdist_worker(session):  # only the process that collects all workers' reports judges
        return
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    assert reporter is not None  # pytest's own
    counted = [count_lane(lane, reporter.stats) for lane in run.split("+")]
    by_tests = exitstatus == pytest.ExitCode.TESTS_FAILED and any(result.failed for result in counted)
    results, statuses = [], []
    for result in counted:
        result, status = judged(result, pytest.ExitCode.OK if by_tests and not result.failed else exitstatus)
        result.write()
        results.append(result)
        statuses.append(status)
    session.exitstatus = max(statuses)
    session.config.stash[_RESULTS] = results


def count_lane(lane: str, reports: dict[str, list]) -> LaneResult:
    """Count what pytest reported of the tests below tests/LANE; a failure in a fixture is an "error"."""
    own = {
        outcome: [report for report in some if getattr(report, "nodeid", "").startswith(f"tests/{lane}")]
        for outcome, some in reports.items()
    }
    seconds = sum(report.duration for some in own.values() for report in some if isinstance(report, pytest.TestReport))
    return LaneResult(lane, {outcome: len(own.get(outcome, ())) for outcome in OUTCOMES}, seconds)


def judged(result: LaneResult, exitstatus: int) -> tuple[LaneResult, int]:
    """Return the result with its remark, and the exit status of the lane."""
    if result.ran == 0 and result.lane == "gpu" and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        skipped = result.counts["skipped"]
        remark = "(needs a GPU: each skip states its reason)" if skipped else "(it holds no test yet)"
        return LaneResult(result.lane, result.counts, result.seconds, remark), pytest.ExitCode.OK
    if result.ran == 0:
        return result.failed_for("no test ran"), pytest.ExitCode.TESTS_FAILED
    if exitstatus != pytest.ExitCode.OK:
        return result.failed_for(f"pytest ended with {pytest.ExitCode(exitstatus).name}"), exitstatus
    return result, exitstatus


def pytest_terminal_summary(terminalreporter) -> None:
    for result in terminalreporter.config.stash.get(_RESULTS, []):
        terminalreporter.write_line(str(result), bold=True)


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
