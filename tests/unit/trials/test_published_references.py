"""A repository knows the distributions of its requests' features and scores, and its stages compare themselves with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from export.recording import requests_like
from export.references import REFERENCE_TIMES
from repository.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import stage_folder
from serving.contract.distributions import read_references
from serving.contract.tensors import ENSEMBLE, ensemble_spec, stage_specs
from serving.pipeline import Pipeline
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.rank import Rank
from tests.repositories import small_repository
from training.dataset import load_dataset


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with closing(Pipeline.load(small_repository())) as pipeline:
        yield pipeline


def draw_requests(pipeline: Pipeline, seed: int, *counts: int) -> list[dict[str, np.ndarray]]:
    """Return all tensors of requests like those of the log, of `counts` requests in turn from one generator."""
    dataset, generator = load_dataset(small_repository().parent / "data"), np.random.default_rng(seed)
    spec = ensemble_spec(stage_specs(pipeline.info.axes, pipeline.info.context))
    return [pipeline.trace(requests_like(dataset, spec, count, generator)) for count in counts]


def test_the_score_of_the_best_candidate_is_described(pipeline):
    recorded = len(read_recorded(stage_folder(small_repository(), ENSEMBLE, 1) / RECORDED_FILE).inputs["user_id"])
    (reference,) = read_references(stage_folder(small_repository(), "rank", 1))
    assert (reference.name, reference.rows) == ("rank_score", REFERENCE_TIMES * recorded)
    _, watched = draw_requests(pipeline, 0, recorded, reference.rows)  # as the export drew them
    np.testing.assert_allclose(reference.shares, reference.count_shares(watched["rank_scores"].max(axis=1)))
    assert sum(reference.shares) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def trace(pipeline) -> dict[str, np.ndarray]:
    """All tensors of a window of requests."""
    return draw_requests(pipeline, 1, WINDOW_ROWS)[0]


@pytest.mark.parametrize(("moved_by", "alarms"), [(0.0, False), (100.0, True)])
def test_the_rank_stage_tells_when_scores_have_moved(trace, moved_by, alarms):
    with closing(Rank.load(stage_folder(small_repository(), "rank", 1))) as rank:
        rank(trace | {"user_continuous": trace["user_continuous"] + np.float32(moved_by)})
        found = {measured.name: measured.value for measured in rank.measurements()}
    assert found["recommender_drift_windows_total"] == 1
    assert (found["recommender_drift_psi"] > found["recommender_drift_psi_bound"]) == alarms
