"""The verdict of `make test`: what its last lines say, and that nothing which failed is missing from the total."""

import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests import lanes
from tests.lanes import LANES, Lane, read_lanes, total

PROJECT = Path(__file__).parents[2]
OK, FAILED, CRASHED, EMPTY = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)
CASES = {"passed": "", "failed": "<failure/>", "error": "<error/>", "skipped": "<skipped/>"}


def read(folder: Path, exit_code: int, run: str, **counts: int) -> list[Lane]:
    """Read the lanes of a run whose first lane has these outcomes, and whose others passed a test each."""
    first, *others = run.split("+")
    cases = [(first, CASES[outcome]) for outcome, count in counts.items() for _ in range(count)] + [(it, "") for it in others]
    tests = [f'<testcase classname="tests.{lane}.test_it" name="test_it" time="1.5">{it}</testcase>' for lane, it in cases]
    (folder / f"{run}.xml").write_text(f"<testsuites><testsuite>{''.join(tests)}</testsuite></testsuites>")
    return read_lanes(run, exit_code, folder)


def test_the_total_is_over_all_lanes_in_pytests_form():
    counts = {"unit": {"passed": 1_300}, "server": {"passed": 87}, "gpu": {"skipped": 3}}
    assert total([Lane(name, Counter(own)) for name, own in counts.items()], 205.123) == "1387 passed, 3 skipped in 205.12s"
    assert total([Lane("unit", Counter(failed=2, passed=5, error=1))], 0.0) == "2 failed, 5 passed, 1 error in 0.00s"
    assert total([Lane("unit", Counter(error=1)), Lane("long", Counter(error=1))], 0.0) == "2 errors in 0.00s"
    assert total([Lane("unit")], 0.0) == "no tests ran in 0.00s"


def test_a_lane_of_skips_alone_is_only_right_for_the_gpu(tmp_path):
    (gpu,) = read(tmp_path, OK, "gpu", skipped=3)
    assert str(gpu) == "lane gpu      ran    0  failed   0  skipped   3     4 s  (needs a GPU: each skip states its reason)"
    assert not read(tmp_path, EMPTY, "gpu")[0].failed
    (unit,) = read(tmp_path, OK, "unit", skipped=3)
    assert str(unit) == "lane unit     ran    0  failed   1  skipped   3     4 s  FAILED: no test ran"
    assert total([unit], 0.0) == "3 skipped, 1 error in 0.00s"


def test_a_failure_that_is_no_tests_counts_as_an_error(tmp_path):
    for exit_code in (CRASHED, FAILED):
        lanes = read(tmp_path, exit_code, "unit+long", passed=4)
        assert total(lanes, 0.0) == "5 passed, 2 errors in 0.00s"
        assert str(lanes[0]).endswith(f"FAILED: pytest ended with exit code {exit_code}")
    lanes = read(tmp_path, FAILED, "unit+long", passed=4, failed=1)
    assert total(lanes, 0.0) == "1 failed, 5 passed in 0.00s"
    assert [lane.failed for lane in lanes] == [1, 0]


@pytest.mark.parametrize("written", [None, "<testsuites><testsuite>"])
def test_a_run_without_a_result_has_failed(tmp_path, written):
    if written:
        (tmp_path / "server.xml").write_text(written)
    (server,) = read_lanes("server", OK, tmp_path)
    assert str(server) == "lane server   ran    0  failed   1  skipped   0     0 s  FAILED: it ended without a result"


def test_the_files_of_tests_are_in_memory_where_there_is_room(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(lanes, "ROOM_BYTES", 1)
    folder = lanes.choose_folder()
    assert folder
    (folder / "left").touch()
    assert lanes.choose_folder() == folder  # as after a run that was killed
    assert list(folder.iterdir()) == []
    monkeypatch.setattr(lanes, "ROOM_BYTES", 1 << 60)
    assert lanes.choose_folder() is None
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(lanes, "SHARED_MEMORY", tmp_path / "absent")
    assert lanes.choose_folder() is None


TESTS = """
import os
import pytest

def test_right(tmp_path): assert tmp_path.is_relative_to(os.environ["PYTEST_DEBUG_TEMPROOT"])
def test_wrong(): assert False
def test_broken(absent): pass
@pytest.mark.skip(reason="to be counted")
def test_skipped(): pass
"""


def test_every_lane_runs_and_the_outcomes_of_all_workers_are_counted_once(tmp_path):
    """The gpu lane has no test. Where something failed, its files stay in memory."""
    memory = tmp_path / "memory"
    memory.mkdir()
    for lane in LANES:
        (tmp_path / "tests" / lane).mkdir(parents=True)
    shutil.copy(PROJECT / "tests" / "conftest.py", tmp_path / "tests")
    program = (PROJECT / "tests" / "lanes.py").read_text().replace('"/dev/shm"', f'"{memory}"').replace("12 << 30", "1")
    (tmp_path / "tests" / "lanes.py").write_text(program)
    for name, content in {"one": TESTS, "other": TESTS, "absent": "import absent"}.items():
        (tmp_path / "tests" / "unit" / f"test_{name}.py").write_text(content)
    for lane in ("long", "contract", "server"):
        (tmp_path / "tests" / lane / f"test_{lane}.py").write_text("def test_right(): pass")
    command = [sys.executable, "-m", "tests.lanes", sys.executable, "-m", "pytest", "-q", "-ra", "--dist", "loadfile"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "lane unit     ran    4  failed   5  skipped   2" in done.stdout
    for lane in ("long", "contract", "server"):
        assert f"lane {lane:8s} ran    1  failed   0  skipped   0" in done.stdout
    assert done.stdout.count("to be counted") == 2
    assert list(memory.rglob("test_right0"))
    assert done.stdout.splitlines()[-1].startswith("2 failed, 5 passed, 2 skipped, 3 errors in ")
