"""Leave one out: logs that leave nothing to find are refused, and served lists are compared with the best baseline."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from experiments.leave_one_out import SASREC, SERVED, Measured, Quality, make_figures, measure
from serving.contract.errors import DataError
from training.dataset import load_dataset


def test_a_log_with_one_event_per_user_is_refused(tmp_path):
    dataset = load_dataset("synthetic:tiny")
    once = dataset.interactions.drop_duplicates("user_id", ignore_index=True)
    with pytest.raises(DataError, match=r"no user has 3 events.* Leave one out needs users with at least 3 events"):
        measure(replace(dataset, interactions=once), [0], Measured(tmp_path / "measured.json"), Console(quiet=True))


def test_served_lists_are_compared_with_the_best_baseline_of_each_measure():
    served = [Quality(0.06, 0.03, 0.3), Quality(0.08, 0.05, 0.2), Quality(0.07, 0.02, 0.25)]
    sasrec = [Quality(0.04, 0.04, 0.1), Quality(0.05, 0.06, 0.1), Quality(0.05, 0.05, 0.2)]
    qualities = {SERVED: served, SASREC: sasrec, "item-kNN": [Quality(0.056, 0.02, 0.5)]}
    found = {figure.name: (figure.median, figure.met) for figure in make_figures("a-shop", qualities)}
    assert found["served over the best baseline: Recall@10"] == (pytest.approx(0.07 / 0.056), None)
    assert found["served over the best baseline: NDCG@10"] == (pytest.approx(0.03 / 0.05), None)
    assert found["served over the best baseline: coverage"] == (pytest.approx(0.25 / 0.5), None)
    assert found["served over SASRec: Recall@10"] == (pytest.approx(1.5), True)
