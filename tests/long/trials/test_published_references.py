"""A repository knows the distributions of its requests and their best items, and its stages compare themselves with them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest

from export.steps.recording import draw_requests
from export.steps.references import REFERENCE_TIMES
from repository.checks.recorded import RECORDED_FILE, read_recorded
from serving.contract.artifacts import find_stage_folder
from serving.contract.distributions import compute_psi, read_references
from serving.contract.tensors import ENSEMBLE, PAD_ID, make_ensemble_spec, make_stage_specs
from serving.pipeline import Pipeline
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.rank import Rank
from tests.repositories import small_repository
from training.dataset import load_dataset


@pytest.fixture(scope="module")
def pipeline() -> Iterator[Pipeline]:
    with closing(Pipeline.load(small_repository())) as pipeline:
        yield pipeline


def trace_drawn(pipeline: Pipeline, seed: int, *counts: int) -> list[dict[str, np.ndarray]]:
    """Return all tensors of requests like those of the log, of `counts` requests in turn from one generator."""
    dataset, generator = load_dataset(small_repository().parent / "data"), np.random.default_rng(seed)
    spec = make_ensemble_spec(make_stage_specs(pipeline.info.axes, pipeline.info.context))
    return [pipeline.trace(draw_requests(dataset, spec, count, generator)) for count in counts]


def test_the_score_of_the_best_candidate_is_described(pipeline):
    recorded = len(read_recorded(find_stage_folder(small_repository(), ENSEMBLE, 1) / RECORDED_FILE).inputs["user_id"])
    *_, reference = read_references(find_stage_folder(small_repository(), "rank", 1))
    assert (reference.name, reference.rows) == ("rank_score", REFERENCE_TIMES * recorded)
    _, watched = trace_drawn(pipeline, 0, recorded, reference.rows)  # as the export drew them
    np.testing.assert_allclose(reference.shares, reference.count_shares(watched["rank_scores"].max(axis=1)))
    assert sum(reference.shares) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def trace(pipeline) -> dict[str, np.ndarray]:
    """All tensors of a window of requests."""
    return trace_drawn(pipeline, 1, WINDOW_ROWS)[0]


def test_the_best_items_are_described_as_the_ranker_reads_them(pipeline):
    folder = find_stage_folder(small_repository(), "rank", 1)
    references = {reference.name: reference for reference in read_references(folder)}
    (trace,) = trace_drawn(pipeline, 3, WINDOW_ROWS)
    best = trace["candidate_ids"][np.arange(WINDOW_ROWS), trace["rank_scores"].argmax(axis=1)]
    assert {"item_id", "popularity_bucket", "catalogue_unit_price"} < set(references)
    column = [own.name for own in Plan.load(folder / "item_plan").continuous].index("catalogue_unit_price")
    price = np.load(folder / "item_numbers.npy")[ItemIndex.load(folder / "item_ids.npy").find_positions(best), column]
    reference = references["catalogue_unit_price"]
    assert compute_psi(np.asarray(reference.shares), reference.count_shares(price)) < reference.find_bound(WINDOW_ROWS) < np.inf


def find_alarms(rank: Rank) -> set[str]:
    """Return the features of the last window that moved by more than chance explains."""
    values = {(own.name, own.labels.get("feature", "")): own.value for own in rank.list_measurements()}
    assert values["recommender_drift_windows_total", ""] == 1
    named = [feature for name, feature in values if name == "recommender_drift_psi"]
    assert "rank_score" in named
    return {name for name in named if values["recommender_drift_psi", name] > values["recommender_drift_psi_bound", name]}


@pytest.mark.parametrize(("moved_by", "alarms"), [(0.0, False), (100.0, True)])
def test_the_rank_stage_tells_when_scores_have_moved(trace, moved_by, alarms):
    with closing(Rank.load(find_stage_folder(small_repository(), "rank", 1))) as rank:
        rank(trace | {"user_continuous": trace["user_continuous"] + np.float32(moved_by)})
        found = find_alarms(rank)
    assert ("rank_score" in found) == alarms
    assert alarms or not found


def test_the_rank_stage_tells_when_other_items_win(pipeline, trace):
    """As after a rule or an index that leaves most of the catalogue out: each list is of two items alone."""
    few = np.full_like(trace["candidate_ids"], PAD_ID)
    few[:, :2] = pipeline.stages["rank"].inputs.items.ids[-2:]
    with closing(Rank.load(find_stage_folder(small_repository(), "rank", 1))) as rank:
        rank(trace | {"candidate_ids": few})
        assert {"item_id", "catalogue_unit_price"} <= find_alarms(rank)
