"""The verdict of `make test`: what its last lines say, and that nothing which failed is missing from the total."""

import pytest

from tests.conftest import judged
from tests.lanes import LaneResult, read_results, total

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
    assert total(lanes) == "1387 passed, 3 skipped in 290.12s"
    assert total([result(failed=2, passed=5, error=1)]) == "2 failed, 5 passed, 1 error in 0.00s"
    assert total([result(error=1), result(error=1)]) == "2 errors in 0.00s"


def test_a_lane_of_skips_alone_is_only_right_for_the_gpu():
    assert judged(result("gpu", skipped=3), OK)[1] == OK
    assert judged(result("gpu"), EMPTY)[1] == OK
    lane, status = judged(result("unit", skipped=3), OK)
    assert (status, str(lane)) == (FAILED, "lane unit     ran    0  failed   1  skipped   3  FAILED: no test ran")
    assert total([lane]) == "3 skipped, 1 error in 0.00s"


def test_a_failure_that_is_no_tests_counts_as_an_error():
    lane, status = judged(result("gpu", passed=4), CRASHED)
    assert (status, total([lane])) == (CRASHED, "4 passed, 1 error in 0.00s")
    lane, status = judged(result(passed=4, failed=1), FAILED)
    assert (status, total([lane])) == (FAILED, "1 failed, 4 passed in 0.00s")
    assert judged(result("gpu"), CRASHED)[1] == FAILED


def test_a_lane_without_a_result_has_failed(tmp_path):
    for lane in ("unit", "contract", "gpu"):
        result(lane, passed=1, seconds=1.5).write(tmp_path)
    lanes = read_results(tmp_path)
    assert total(lanes) == "3 passed, 1 error in 4.50s"
    assert str(lanes[2]) == "lane server   ran    0  failed   1  skipped   0  FAILED: it ended without a result"
