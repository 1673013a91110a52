"""Percentiles and due times against slow twins; refusals of what would not be a load."""

import math

import numpy as np
import pytest

from perf.load import schedule
from perf.observe import Latency
from serving.contract.errors import ConfigError
from tests.present import present


def slow_percentile(values: list[int], q: float) -> int:
    """The smallest value that at least q % of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q / 100 * len(ordered)) - 1, 0)]


@pytest.mark.parametrize("count", [1, 2, 3, 10, 99, 100, 101, 1000])
def test_percentiles_are_observed_values_by_the_definition(count):
    latencies_ns = np.random.default_rng(count).integers(1, 10**9, count)
    latency = present(Latency.of(latencies_ns))
    for q, value in (
        (50, latency.p50_ms),
        (95, latency.p95_ms),
        (99, latency.p99_ms),
    ):
        assert value == slow_percentile(latencies_ns.tolist(), q) / 1e6
    assert latency.count == count
    assert latency.mean_ms == pytest.approx(sum(latencies_ns.tolist()) / count / 1e6)


def test_no_requests_have_no_latency():
    assert Latency.of(np.array([], np.int64)) is None


def test_poisson_gaps_are_exponential():
    due_s = schedule.draw_poisson(500.0, 100.0, np.random.default_rng(0))
    assert (np.diff(due_s) >= 0).all()
    assert due_s[0] >= 0
    assert due_s[-1] < 100.0
    assert len(due_s) == pytest.approx(50_000, rel=0.02)
    gaps = np.diff(due_s)
    assert gaps.std() / gaps.mean() == pytest.approx(1.0, abs=0.02)  # 1 for an exponential, 0 for a metronome
    assert np.mean(gaps > 1 / 500) == pytest.approx(math.exp(-1), abs=0.01)


def test_a_seed_gives_the_same_instants():
    for draw in (schedule.draw_poisson, schedule.draw_bursts):
        one, two = (draw(50.0, 20.0, np.random.default_rng(3)) for _ in range(2))
        np.testing.assert_array_equal(one, two)


def test_bursts_are_ten_times_the_rate_and_quiet_before_the_first():
    due_s = schedule.draw_bursts(40.0, 500.0, np.random.default_rng(1))
    inside = np.array([t >= 5.0 and math.fmod(t, 5.0) < 0.5 for t in due_s])
    np.testing.assert_array_equal(schedule.is_in_burst(due_s), inside)
    burst_s = 99 * 0.5
    assert inside.sum() / burst_s == pytest.approx(400.0, rel=0.05)
    assert (~inside).sum() / (500.0 - burst_s) == pytest.approx(40.0, rel=0.05)
    assert not inside[due_s < 5.0].any()


def test_volleys_come_together_at_the_rate_asked_for():
    due_s = schedule.make_volleys(40.0, 10.0)
    assert due_s.tolist() == [volley * 0.2 for volley in range(50) for _ in range(8)]


def slow_recorded(times_s: list[float], first: int, count: int, duration_s: float) -> list[float]:
    """Walk the log from event `first`, over its end and on from its start, one mean gap later."""
    times_s, seen_s, lap = sorted(times_s), [], 0.0
    span_s = times_s[-1] - times_s[0]
    for step in range(first, first + count):
        lap = (span_s + span_s / len(times_s)) * (step // len(times_s))
        seen_s.append(times_s[step % len(times_s)] + lap)
    return [(time_s - seen_s[0]) / (seen_s[-1] - seen_s[0]) * duration_s for time_s in seen_s]


@pytest.mark.parametrize(("rate", "duration_s"), [(10.0, 3.0), (10.0, 20.0), (10.0, 45.0), (1000.0, 1.0)])
def test_recorded_arrivals_keep_the_rhythm_of_the_log(rate, duration_s):
    times_s = np.random.default_rng(2).choice(10**6, 200).astype(float)
    due_s = schedule.draw_recorded(times_s, rate, duration_s, np.random.default_rng(7))
    count = round(rate * duration_s)
    laps = math.ceil(count / 200)
    first = int(np.random.default_rng(7).integers(0, 200 * laps - count + 1))
    np.testing.assert_allclose(due_s, slow_recorded(times_s.tolist(), first, count, duration_s), atol=1e-9)
    assert (np.diff(due_s) >= 0).all()
    assert (due_s[0], due_s[-1]) == (0.0, pytest.approx(duration_s))


def test_times_are_read_from_a_file(tmp_path):
    path = tmp_path / "times.txt"
    path.write_text("3.5\n1\n2\n")
    np.testing.assert_array_equal(schedule.read_times(str(path)), [3.5, 1.0, 2.0])
    for text in ("1 2\n3 4\n", "1\nnan\n"):
        path.write_text(text)
        with pytest.raises(ConfigError, match="Expected one time per line"):
            schedule.read_times(str(path))
    path.write_text("monday\n")
    with pytest.raises(ConfigError, match="one arrival time in seconds per line"):
        schedule.read_times(str(path))


def test_times_are_read_from_a_data_set():
    times_s = schedule.read_times("synthetic:users=20,items=16,events=200")
    assert len(times_s) > 100
    assert np.ptp(times_s) > 0


def test_loads_that_are_none_or_too_many_are_refused():
    rng = np.random.default_rng(0)
    for rate, duration_s in ((0.0, 1.0), (1.0, 0.0), (-5.0, 1.0), (np.nan, 1.0)):
        with pytest.raises(ConfigError, match="must be positive"):
            schedule.draw_poisson(rate, duration_s, rng)
    with pytest.raises(ConfigError, match="Lower the rate"):
        schedule.draw_poisson(1e6, 60.0, rng)
    with pytest.raises(ConfigError, match="has no events"):
        schedule.draw_recorded(np.array([]), 10.0, 1.0, rng)
    assert len(schedule.draw_bursts(5_000.0, 12.0, rng)) > 60_000  # the sum counts, not the rate of a burst
    with pytest.raises(ConfigError, match="would send 258,000 requests"):
        schedule.draw_bursts(6_000.0, 25.0, rng)
    with pytest.raises(ConfigError, match="all came at the same time"):
        schedule.draw_recorded(np.array([5.0, 5.0]), 10.0, 1.0, rng)
