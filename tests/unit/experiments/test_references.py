"""Figures that other packages computed too: a value that is no number is a difference."""

import math

import numpy as np
import pytest

from experiments.drift import count_as_evidently, find_largest_difference
from experiments.off_policy import make_difference_figures
from serving.contract.distributions import compute_kl, compute_psi


def test_a_difference_from_evidently_is_told_also_where_one_of_its_values_is_no_number():
    rng = np.random.default_rng(0)
    columns, window = ({"price": rng.normal(size=500), "brand": rng.integers(0, 4, 500)} for _ in range(2))
    shares = {name: [counts / 500 for counts in count_as_evidently(columns[name], window[name])] for name in columns}
    evidently = {name: {"psi": compute_psi(*pair), "kl": compute_kl(*pair)} for name, pair in shares.items()}
    assert find_largest_difference(columns, window, evidently) == 0
    evidently["price"]["kl"] += 0.25
    assert find_largest_difference(columns, window, evidently) == pytest.approx(0.25)
    evidently["brand"]["psi"] = math.nan
    assert math.isnan(find_largest_difference(columns, window, evidently))


def test_an_estimate_of_obp_that_is_no_number_is_no_agreement():
    [equal, unknown] = make_difference_figures({"IPS": [0.0, 1e-9], "DR": [0.0, math.nan]})
    assert (equal.median, equal.met) == (1e-9, True)
    assert unknown.met is False
