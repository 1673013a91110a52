"""The verdict of `make test`: what its last lines say, and that nothing which failed is missing from the total."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import judged
from tests.lanes import LANES, LaneResult, read_results, total

PROJECT = Path(__file__).parents[2]
OK, FAILED, CRASHED, EMPTY = (
    pytest.ExitCode.OK,
    pytest.ExitCode.TESTS_FAILED,
    pytest.ExitCode.INTERNAL_ERROR,
    pytest.ExitCode.NO_TESTS_COLLECTED,
)


def result(lane="unit", seconds=0.0, **counts):
    return LaneResult(lane, dict.fromkeys(("passed", "failed", "error", "skipped"), 0) | counts, seconds)


def test_the_total_is_over_all_lanes_in_pytests_form():
    lanes = [result(passed=1_300, seconds=200.0), result("server", passed=87, seconds=90.12), result("gpu", skipped=3)]
    assert total(lanes, 205.123) == "1387 passed, 3 skipped in 205.12s"
    assert total([result(failed=2, passed=5, error=1)], 0.0) == "2 failed, 5 passed, 1 error in 0.00s"
    assert total([result(error=1), result(error=1)], 0.0) == "2 errors in 0.00s"


def test_a_lane_of_skips_alone_is_only_right_for_the_gpu():
    assert judged(result("gpu", skipped=3), OK)[1] == OK
    assert judged(result("gpu"), EMPTY)[1] == OK
    lane, status = judged(result("unit", skipped=3), OK)
    assert (status, str(lane)) == (FAILED, "lane unit     ran    0  failed   1  skipped   3     0 s  FAILED: no test ran")
    assert total([lane], 0.0) == "3 skipped, 1 error in 0.00s"


def test_a_failure_that_is_no_tests_counts_as_an_error():
    lane, status = judged(result("gpu", passed=4), CRASHED)
    assert (status, total([lane], 0.0)) == (CRASHED, "4 passed, 1 error in 0.00s")
    lane, status = judged(result(passed=4, failed=1), FAILED)
    assert (status, total([lane], 0.0)) == (FAILED, "1 failed, 4 passed in 0.00s")
    assert judged(result("gpu"), CRASHED)[1] == FAILED


def test_a_lane_without_a_result_has_failed(tmp_path):
    for lane in ("unit", "long", "contract", "gpu"):
        result(lane, passed=1, seconds=1.5).write(tmp_path)
    lanes = read_results(tmp_path)
    assert total(lanes, 6.0) == "4 passed, 1 error in 6.00s"
    assert str(lanes[3]) == "lane server   ran    0  failed   1  skipped   0     0 s  FAILED: it ended without a result"


TESTS = """
import pytest

def test_right(): pass
def test_wrong(): assert False
def test_broken(absent): pass
@pytest.mark.skip(reason="to be counted")
def test_skipped(): pass
"""


def test_the_outcomes_of_all_workers_are_counted_once_for_their_lane(tmp_path):
    for lane in ("unit", "long"):
        (tmp_path / "tests" / lane).mkdir(parents=True)
    for name in ("conftest.py", "lanes.py", "memory.py"):
        shutil.copy(PROJECT / "tests" / name, tmp_path / "tests" / name)
    for name, content in {"one": TESTS, "other": TESTS, "absent": "import absent"}.items():
        (tmp_path / "tests" / "unit" / f"test_{name}.py").write_text(content)
    (tmp_path / "tests" / "long" / "test_right.py").write_text("def test_right(): pass")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--continue-on-collection-errors"]
    command += ["--lane", "unit+long", "tests/unit", "tests/long", "--basetemp", str(tmp_path / "temporary")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == FAILED, done.stdout + done.stderr
    assert "lane unit     ran    4  failed   5  skipped   2" in done.stdout
    assert "lane long     ran    1  failed   0  skipped   0" in done.stdout
    unit, long = read_results(tmp_path / ".run" / "lanes")[:2]
    assert total([unit], 1.0).startswith("2 failed, 2 passed, 2 skipped, 3 errors in ")
    assert total([long], 1.0).startswith("1 passed in ")


PYTEST = """
import sys
from tests.lanes import LaneResult
for lane in sys.argv[sys.argv.index("--lane") + 1].split("+"):
    print("what", lane, "says")
    if lane != "contract":  # which crashes
        LaneResult(lane, {"passed": 2, "failed": int(lane == "server")}, 1.0).write()
"""


def test_every_lane_runs_whatever_became_of_the_others(tmp_path):
    (tmp_path / "tests").mkdir()
    shutil.copy(PROJECT / "tests" / "lanes.py", tmp_path / "tests")
    (tmp_path / "pytest.py").write_text(PYTEST)
    command = [sys.executable, "-m", "tests.lanes", sys.executable, str(tmp_path / "pytest.py")]
    done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1
    assert {f"what {lane} says" for lane in LANES} <= set(done.stdout.splitlines())
    assert done.stdout.splitlines()[-1].startswith("1 failed, 8 passed, 1 error in ")
