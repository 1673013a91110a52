"""Hit rates of a log, by the cache and by the log's clock, against a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from experiments.cache.log import Stretch, read_stretch
from experiments.cache.rates import hit_rate


def naive(stretch: Stretch, ttl_s: float, events: bool) -> float:
    """Nothing is given `ttl_s` after it was kept, or after the user's event."""
    kept: dict[int, int] = {}
    hits = 0
    for user, now_s, end in zip(stretch.user_id.tolist(), stretch.time_s.tolist(), stretch.ends.tolist(), strict=True):
        if user in kept and now_s < kept[user] + ttl_s:
            hits += 1
        else:
            kept[user] = now_s
        if end and events:
            del kept[user]
    return hits / len(stretch)


@pytest.mark.parametrize("events", [False, True])
@pytest.mark.parametrize("ttl_s", [1, 60, 10_000])
def test_hit_rates_are_those_of_a_dictionary(ttl_s, events):
    rng = np.random.default_rng(0)
    stretch = Stretch(rng.integers(0, 30, 3_000), np.sort(rng.integers(0, 20_000, 3_000)), rng.random(3_000) < 0.2)
    rate = hit_rate(stretch, ttl_s, events)
    assert rate == pytest.approx(naive(stretch, ttl_s, events))
    assert ttl_s == 1 or rate > 0


def test_users_asked_for_beforehand_are_hits():
    stretch = Stretch(np.array([1, 2, 3, 1]), np.array([10, 20, 30, 40]), np.array([True] * 4))
    assert hit_rate(stretch, 1_000, True, warm=[1, 3]) == 0.5
    assert hit_rate(stretch, 15, True, warm=[1, 3]) == 0.25


def test_the_last_lines_of_a_log_in_order():
    stretch = read_stretch("synthetic:small", 500)
    assert len(stretch) == 500
    assert (np.diff(stretch.time_s) >= 0).all()
    assert stretch.ends[-1]
    pairs = set(zip(stretch.user_id.tolist(), stretch.time_s.tolist(), strict=True))
    assert len(stretch.visits) == len(pairs)
