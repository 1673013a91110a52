"""What `python -m experiments.quality.row_widths` makes of its runs."""

import numpy as np
import pytest

from experiments.quality.compression import Qualities
from experiments.quality.drops import drop_of
from experiments.quality.row_widths import Taught, verdict_of

N_USERS = 400


def runs(offset: float, seed: int = 0) -> list[Qualities]:
    rng = np.random.default_rng(seed)
    base = rng.random(N_USERS)
    base[0] = np.nan
    return [Qualities(base - offset, base, base - 2 * offset) for _ in range(3)]


def test_a_drop_is_paired_by_user():
    """Users differ far more than the ways to store rows do."""
    drop = drop_of(*(np.stack([run.auc for run in runs(offset)]) for offset in (0.01, 0.0)))
    assert (drop.mean, drop.low, drop.high) == pytest.approx((0.02, 0.02, 0.02))


def test_what_seeds_change_widens_the_interval():
    wide = np.full((3, N_USERS), 0.7)
    own = wide - np.array([0.0, 0.01, 0.02])[:, None]
    drop = drop_of(own, wide)
    assert drop.mean == pytest.approx(0.01)
    assert drop.low < 0.005 < 0.015 < drop.high


def test_verdicts_are_against_rows_of_one_width():
    verdict = verdict_of(Taught("cold rows of 4", 340, runs(0.01)), Taught("all rows of 16", 1000, runs(0.0)))
    assert verdict.share == 0.34
    assert verdict.ndcg_drop.mean == pytest.approx(0.01)
    assert verdict.auc_drop.mean == pytest.approx(0.02)
    assert verdict.auc == pytest.approx(np.nanmean(runs(0.0)[0].ndcg_at_10) - 0.02)
