"""The limiter finds what a server can do, gives way by priority, and recovers."""

from __future__ import annotations

import pytest

from gateway.answers.limiter import LEAST, RESERVED, Limiter


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


CAPACITY, SERVICE_S = 4, 0.01  # of the server: how many requests it does at a time, and how long each takes


def run_load(limiter: Limiter, clock: Clock, per_s: float, seconds: float) -> list[float]:
    """Offer requests to a server, which does them in the order of arrival. Return the latencies."""
    due_s, until_s, latencies_s = clock.now_s, clock.now_s + seconds, []
    free_s = [clock.now_s] * CAPACITY  # when each of its places is free
    running: list[tuple[float, float]] = []  # end, start
    while due_s < until_s:
        while running and min(running)[0] <= due_s:
            end_s, began_s = min(running)
            running.remove((end_s, began_s))
            clock.now_s = end_s
            limiter.end(began_s)
            latencies_s.append(end_s - began_s)
        clock.now_s = due_s
        if limiter.admits("normal"):
            place = free_s.index(min(free_s))
            free_s[place] = max(free_s[place], due_s) + SERVICE_S
            running.append((free_s[place], limiter.begin()))
        due_s += 1 / per_s
    for end_s, began_s in sorted(running):
        clock.now_s = end_s
        limiter.end(began_s)
    return latencies_s


def answer_one(limiter: Limiter, clock: Clock, latency_s: float, failed: bool = False) -> None:
    began_s = limiter.begin()
    clock.now_s += latency_s
    limiter.end(began_s, failed=failed)


def make_calm(factor: float, least_target_s: float) -> tuple[Limiter, Clock]:
    """Return a limiter that has met few requests, and its clock."""
    clock = Clock()
    limiter = Limiter(1_000, factor, least_target_s, clock_s=clock)
    run_load(limiter, clock, per_s=50, seconds=5)
    return limiter, clock


def test_under_five_times_the_capacity_most_of_it_is_used_and_nobody_waits_long():
    limiter, clock = make_calm(factor=3.0, least_target_s=0.02)
    latencies_s = sorted(run_load(limiter, clock, per_s=2_000, seconds=20))
    assert len(latencies_s) >= 0.8 * 20 * 400
    assert latencies_s[int(0.99 * len(latencies_s))] <= 0.06
    assert limiter.in_flight == 0
    calm_s = run_load(limiter, clock, per_s=50, seconds=2)
    assert len(calm_s) >= 95  # nothing is shed when the load is over


def test_hours_of_overload_do_not_pass_for_the_latency_without_a_queue():
    limiter, clock = make_calm(factor=4.0, least_target_s=0.0)
    target_s = limiter.target_s
    run_load(limiter, clock, per_s=800, seconds=120)
    latencies_s = sorted(run_load(limiter, clock, per_s=800, seconds=10))
    assert limiter.target_s <= 1.01 * target_s
    assert latencies_s[int(0.99 * len(latencies_s))] <= 2 * target_s
    assert len(latencies_s) >= 0.9 * 10 * 400


def test_who_is_less_important_gives_way_first():
    limiter = Limiter(1_000, factor=3.0, least_target_s=0.02)
    admitted = {"low": 0, "normal": 0, "high": 0}
    for priority in admitted:
        while limiter.admits(priority):
            limiter.begin()
            admitted[priority] += 1
    assert admitted["low"] < admitted["low"] + admitted["normal"] < limiter.limit < limiter.in_flight
    assert admitted["high"] >= RESERVED


@pytest.mark.parametrize(("most", "least"), [(20, LEAST), (1, 1)])
def test_the_limit_never_falls_to_nothing_and_never_exceeds_the_most(most, least):
    clock = Clock()
    limiter = Limiter(most, factor=2.0, least_target_s=0.001, clock_s=clock)
    for latency_s in [0.001] * 2_000 + [5.0] * 20_000:
        answer_one(limiter, clock, latency_s)
        assert least <= limiter.limit <= most
    assert limiter.limit == least


def test_an_outage_whose_calls_fail_at_once_leaves_the_limit_as_it_was():
    limiter, clock = make_calm(factor=3.0, least_target_s=0.001)
    before = limiter.limit, limiter.target_s
    for _ in range(1_000):
        answer_one(limiter, clock, 0.0001, failed=True)
    assert (limiter.limit, limiter.target_s) == before
    run_load(limiter, clock, per_s=50, seconds=5)
    assert limiter.limit >= before[0]


def test_slow_failures_lower_the_limit():
    limiter, clock = make_calm(factor=3.0, least_target_s=0.02)
    for _ in range(1_000):
        answer_one(limiter, clock, 0.3, failed=True)
    assert limiter.limit == LEAST
