"""The rank and rerank stages on a trained pair of models: against torch, at every batch size, on short lists."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from serving.contract.artifacts import StageInfo
from serving.contract.tensors import PAD_ID, PAD_SCORE, Degraded, make_stage_specs, mark_degraded, new_lineage
from serving.stages import rank as rank_stage
from serving.stages.best_lists import LIST_FEATURES, list_features
from serving.stages.rank import Rank, RankOutputs
from tests.long.training.models.conftest import lesson_of
from tests.long.training.ranking.conftest import GENERATION, C, K, M, save_items, tensors, through_both
from training.models.rankers.reranker import Lists, compute_corrections
from training.models.rankers.save_ranker import join_item_vectors, save_ranker
from training.models.rankers.train_ranker import compute_rank_scores
from training.models.student import compress as compress_module
from training.models.student.compress import compress
from training.models.student.distill import STUDENT


def rank_slowly(inputs, logits, retrieval_part, blend):
    scores = logits + np.float32(blend) * retrieval_part
    padding = inputs["candidate_ids"] == PAD_ID
    broken = ~(np.isfinite(scores) | padding).all(axis=1, keepdims=True)
    return {
        "rank_scores": np.where(padding, PAD_SCORE, np.where(broken, inputs["retrieval_scores"], scores)).astype(np.float32),
        "lineage": mark_degraded(inputs["lineage"], broken[:, 0], Degraded.RANK),
    }


@pytest.mark.parametrize("seed", range(5))
def test_ranked_equals_its_slow_twin(seed):
    rng = np.random.default_rng(seed)
    n = 40
    inputs = {
        "candidate_ids": np.where(rng.random((n, C)) < rng.choice([0, 0.5, 1], (n, 1)), PAD_ID, rng.integers(0, 99, (n, C))),
        "retrieval_scores": rng.normal(size=(n, C)).astype(np.float32),
        "lineage": new_lineage(n, GENERATION, rng.integers(0, 4, n)),
    }
    broken = rng.random((n, C)) < rng.choice([0, 0.05], (n, 1))
    scores = np.where(broken, rng.choice([np.nan, np.inf, -np.inf], (n, C)), rng.normal(size=(n, C))).astype(np.float32)
    retrieval_part, blend = rng.normal(size=(n, C)).astype(np.float32), float(rng.choice([0.0, 0.3]))
    before = inputs["lineage"].copy()
    got = RankOutputs(blend).make_outputs(inputs, scores, retrieval_part)
    expected = rank_slowly(inputs, scores, retrieval_part, blend)
    np.testing.assert_array_equal(inputs["lineage"], before)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, strict=True)


def test_rank_scores_equal_the_trained_model(trained):
    ranked, _ = through_both(trained, np.arange(len(trained.requests)))
    expected = compute_rank_scores(trained.ranking.ranker, trained.requests)
    np.testing.assert_allclose(ranked["rank_scores"], expected, atol=1e-4)
    assert trained.saved[0].parity.max_rel < 1e-5


@pytest.mark.parametrize(("compression", "exact"), [("none", 1.0), ("distilled", 1.0), ("pruned", 1.0), ("int8", 0.95)])
def test_every_compression_is_served_as_it_was_trained(trained, tmp_path, compression, exact, monkeypatch):
    """With int8, a few scores differ, because the two round a value in different directions."""
    monkeypatch.setattr(compress_module, "LEAST_KEPT", 0.0)
    monkeypatch.setattr(compress_module, "LEAST_MEASURED", 0.0)
    ranker = trained.ranking.ranker
    if compression != "none":
        lesson = lesson_of(ranker, [trained.requests], trained.requests)
        ranker = compress(lesson, compression, replace(STUDENT, epochs=2), report=lambda _: None)
    features, ranking = trained.features, trained.ranking
    saved = save_ranker(tmp_path, ranker, features.items, ranking.statistics, ranking.sample)
    StageInfo("rank", GENERATION, trained.axes, (), saved[0]).write(tmp_path)
    save_items(tmp_path, features)
    stage = Rank.load(tmp_path)
    scores = stage(tensors(trained, np.arange(len(trained.requests))))["rank_scores"]
    stage.close()
    assert ranker.compression == compression
    errors = np.abs(scores - compute_rank_scores(ranker, trained.requests))
    assert np.mean(errors < 1e-4) >= exact


def test_served_items_equal_the_trained_list_network(trained):
    rows = np.arange(len(trained.requests))
    _, served = through_both(trained, rows)
    ranking = trained.ranking
    scores = compute_rank_scores(ranking.ranker, trained.requests)
    lists = Lists.of(trained.requests, scores, M)
    vectors = join_item_vectors(ranking.ranker.model, ranking.items)
    with torch.no_grad():
        correction = compute_corrections(ranking.reranker.network, lists, torch.from_numpy(vectors)).numpy()
    final = np.where(lists.valid, lists.rank_scores + ranking.reranker.trust * correction, -np.inf)
    np.testing.assert_allclose(served["scores"], -np.sort(-final, axis=1)[:, :K], atol=1e-4)
    for row in rows:
        expected = dict(zip(trained.features.items.ids[lists.positions[row]], final[row], strict=True))
        got = [expected[item] for item in served["item_ids"][row]]
        np.testing.assert_allclose(got, served["scores"][row], atol=1e-4)
        assert len(set(served["item_ids"][row])) == K


def test_answers_have_the_tensors_of_the_contract(trained):
    specs = make_stage_specs(trained.axes)
    for name, answer in zip(("rank", "rerank"), through_both(trained, np.arange(3)), strict=True):
        outputs, inputs = (
            {t.name: (t.dims, t.numpy_dtype) for t in side} for side in (specs[name].output_fields, specs[name].input_fields)
        )
        answered = {key: (values.shape[1:], values.dtype) for key, values in answer.items()}
        assert inputs | answered == inputs | outputs  # an output that is also an input may pass unchanged


def test_a_request_is_answered_alone_as_in_a_batch(trained):
    together = through_both(trained, np.arange(32))
    for row in (0, 7, 31):
        alone = through_both(trained, np.array([row]))
        np.testing.assert_allclose(alone[0]["rank_scores"][0], together[0]["rank_scores"][row], atol=1e-5)
        np.testing.assert_array_equal(alone[1]["item_ids"][0], together[1]["item_ids"][row])


def test_a_batch_that_fills_the_cache_is_scored_in_parts(trained, monkeypatch):
    """Three requests are scored at a time, and at the end two. The rows of all are looked up at once."""
    inputs, runs = tensors(trained, np.arange(32)), []

    class Counted:
        def run(self, names, feeds):
            runs.append(len(feeds["user_numbers"]))
            return trained.rank.network.run(names, feeds)

    whole = trained.rank(inputs)["rank_scores"]
    monkeypatch.setattr(rank_stage, "PAIRS_AT_ONCE", 3 * C + 1)
    np.testing.assert_allclose(replace(trained.rank, network=Counted())(inputs)["rank_scores"], whole, atol=1e-5)
    assert runs == [3] * 10 + [2]
    monkeypatch.setattr(rank_stage, "PAIRS_AT_ONCE", C - 1)
    np.testing.assert_allclose(trained.rank(inputs)["rank_scores"], whole, atol=1e-5)


@pytest.mark.parametrize(
    ("count", "limit", "size"), [(0, 20, 1), (1, 20, 1), (16, 15, 8), (64, 20, 16), (32, 3, 3), (7, 7, 7), (5, 1, 1)]
)
def test_chunks_are_of_similar_size(count, limit, size):
    assert rank_stage.choose_chunk_size(count, limit) == size


def test_short_empty_and_unknown_lists_are_served_as_far_as_they_go(trained):
    inputs = tensors(trained, np.arange(3))
    inputs["candidate_ids"][0, 2:], inputs["retrieval_scores"][0, 2:] = PAD_ID, -np.inf
    inputs["candidate_ids"][1], inputs["retrieval_scores"][1] = PAD_ID, -np.inf
    inputs["history_ids"][:], inputs["history_age_days"][:] = PAD_ID, 0.0  # nobody is known
    ranked = trained.rank(inputs)
    served = trained.rerank({**inputs, **ranked})
    assert (ranked["rank_scores"][0, 2:] == np.float32(PAD_SCORE)).all()
    assert (ranked["rank_scores"][1] == np.float32(PAD_SCORE)).all()
    assert np.isfinite(ranked["rank_scores"][2]).all()
    assert set(served["item_ids"][0, :2]) == set(inputs["candidate_ids"][0, :2])
    np.testing.assert_array_equal(served["item_ids"][0, 2:], PAD_ID)
    np.testing.assert_array_equal(served["item_ids"][1], PAD_ID)
    np.testing.assert_array_equal(served["scores"][1], 0.0)
    assert (served["item_ids"][2] != PAD_ID).all()


def test_requests_of_another_generation_are_refused_alone(trained):
    inputs = tensors(trained, np.arange(3))
    inputs["lineage"][1, 0] = GENERATION + 1
    for stage in (trained.rank, trained.rerank):
        faults = stage.find_faults(inputs)
        assert list(faults) == [1]
        assert "generation is 4, this stage serves 3" in faults[1]


def test_earlier_fallbacks_stay_visible(trained):
    inputs = tensors(trained, np.arange(2))
    inputs["lineage"][1, 1] = Degraded.RETRIEVE
    ranked = trained.rank(inputs)
    np.testing.assert_array_equal(ranked["lineage"][:, :2], [[GENERATION, 0], [GENERATION, Degraded.RETRIEVE]])
    served = trained.rerank({**inputs, **ranked})
    np.testing.assert_array_equal(served["degraded"], [[0], [int(Degraded.RETRIEVE)]])
    np.testing.assert_array_equal(served["generation"], GENERATION)


def test_list_features_measure_distances_within_the_list():
    scores = np.array([[3.0, 1.0, 0.5, -np.inf]], np.float32)
    valid = np.isfinite(scores)
    features = list_features(scores, np.array([[1.0, 2.0, 3.0, -np.inf]], np.float32), valid)
    assert features.shape == (1, 4, LIST_FEATURES)
    np.testing.assert_allclose(features[0, :3, 1].mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(features[0, :, 2], [0.0, 2.0, 2.5, 0.0])
    np.testing.assert_allclose(features[0, :, 3], [2.0, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(features[0, 3], 0.0)
