"""Durations are published as the counters of a Prometheus histogram."""

from __future__ import annotations

from serving.contract.measurements import COUNTER, Histogram


def list_values(histogram: Histogram) -> dict[str, float]:
    """Return the value of each series: by bound for buckets, else by the suffix of the name."""
    measured = list(histogram.list_measurements("waits_seconds", "Waits", model="observe"))
    assert {(each.kind, each.labels["model"]) for each in measured} == {(COUNTER, "observe")}
    return {each.labels.get("le", each.name.removeprefix("waits_seconds_")): each.value for each in measured}


def test_a_bucket_counts_all_durations_up_to_its_bound():
    histogram = Histogram((0.01, 0.5, 1.0))
    for seconds in (0.002, 0.01, 0.011, 7.0):
        histogram.add(seconds)
    assert list_values(histogram) == {"0.01": 2, "0.5": 3, "1": 3, "+Inf": 4, "sum": 7.023, "count": 4}


def test_every_counter_is_there_before_the_first_duration():
    assert list_values(Histogram((0.01, 0.5))) == {"0.01": 0, "0.5": 0, "+Inf": 0, "sum": 0, "count": 0}


def test_a_clock_that_is_behind_makes_no_counter_fall():
    histogram = Histogram((0.01, 0.5))
    histogram.add(0.4)
    before = list_values(histogram)
    histogram.add(-3.0)  # the event was received by a machine whose clock is ahead
    after = list_values(histogram)
    assert after["0.01"] == 1
    assert all(after[series] >= value for series, value in before.items())


def test_a_slow_batch_does_not_count_in_later_reports():
    """The difference of two reports holds only what came between them."""
    histogram = Histogram((0.005, 0.1, 0.25))
    histogram.add(0.25)
    before = list_values(histogram)
    for _ in range(50):
        histogram.add(0.005)
    after = list_values(histogram)
    assert [after[bound] - before[bound] for bound in ("0.005", "0.1", "0.25", "+Inf")] == [50, 50, 50, 50]
