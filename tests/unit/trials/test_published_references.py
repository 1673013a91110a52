"""A repository knows the distributions of its requests' features and scores, and its stages compare themselves with them."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from repository.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import stage_folder
from serving.contract.distributions import read_references
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.rank import Rank
from tests.repositories import small_repository


@pytest.fixture(scope="module")
def trace() -> dict[str, np.ndarray]:
    """All tensors of the recorded requests."""
    repo = small_repository()
    with closing(Pipeline.load(repo)) as pipeline:
        return pipeline.trace(read_recorded(stage_folder(repo, ENSEMBLE, 1) / RECORDED_FILE).inputs)


def test_the_score_of_the_best_candidate_is_described(trace):
    (reference,) = read_references(stage_folder(small_repository(), "rank", 1))
    assert reference.name == "rank_score"
    best = trace["rank_scores"].max(axis=1)
    assert reference.rows == len(best)
    np.testing.assert_allclose(reference.shares, reference.count_shares(best))
    assert sum(reference.shares) == pytest.approx(1.0)


@pytest.mark.parametrize(("moved_by", "alarms"), [(0.0, False), (100.0, True)])
def test_the_rank_stage_tells_when_scores_have_moved(trace, moved_by, alarms):
    inputs = trace | {"user_continuous": trace["user_continuous"] + np.float32(moved_by)}
    with closing(Rank.load(stage_folder(small_repository(), "rank", 1))) as rank:
        for _ in range(-(-WINDOW_ROWS // len(inputs["user_id"]))):
            rank(inputs)
        found = {measured.name: measured.value for measured in rank.measurements()}
    assert found["recommender_drift_windows_total"] == 1
    assert (found["recommender_drift_psi"] > found["recommender_drift_psi_bound"]) == alarms
