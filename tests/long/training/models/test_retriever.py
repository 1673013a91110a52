"""The retriever end to end on a small synthetic log: fitted, retrieved from in process, saved, served by the stage."""

from dataclasses import dataclass, replace
from pathlib import Path

import faiss
import numpy as np
import pytest
import scipy.sparse as sp

from serving.contract.artifacts import StageInfo
from serving.contract.errors import ExportError
from serving.contract.tensors import PAD_ID, Axes, new_lineage
from serving.stages.live.content import Content
from serving.stages.retrieve import POPULARITY, Retrieve
from serving.stages.rules.config import CONFIG_FILE
from serving.stages.search.search import INDEX_FILE, Neighbours
from training.dataset import load_dataset, split_log
from training.evaluation.metrics import has_test_items, ndcg_at, recall_at
from training.evaluation.problem import Problem, make_problem
from training.features.build import Examples, Features, build_features
from training.models.candidates import retriever as module
from training.models.candidates.graph import GraphSettings, fit_graph
from training.models.candidates.item_item import ItemItemSettings
from training.models.candidates.retriever import (
    Retriever,
    RetrieverData,
    RetrieverSettings,
    compute_log_popularity,
    compute_repeat_shares,
    factorise,
    fit_retriever,
    prepare_data,
)
from training.models.candidates.sequence import SequenceShape
from training.models.candidates.train_sequence import SequenceSettings, cut_windows, train_sequence
from training.models.candidates.train_two_tower import TowerSettings
from training.models.parity import Parity
from training.retrieval.effort import widen_search
from training.retrieval.index import WANTED_RECALL, Choice, Sizes, extract_inverted_file
from training.retrieval.save import save_retriever

SETTINGS = RetrieverSettings(ItemItemSettings(neighbours=20), TowerSettings(width=16, epochs=3, batch=128, negatives=100))
COUNT = 40


@dataclass(frozen=True)
class Fitted:
    train: object
    features: Features
    problem: Problem
    data: RetrieverData
    retriever: Retriever


@pytest.fixture(scope="module")
def fitted() -> Fitted:
    dataset = load_dataset("synthetic:users=400,items=300,events=8000")
    problem = make_problem(dataset)
    train, _ = split_log(dataset.interactions)
    features = build_features(dataset, train)
    data = prepare_data(features, train, np.flatnonzero(train["positive"].to_numpy()))
    return Fitted(train, features, problem, data, fit_retriever(data, SETTINGS, seed=1, say=lambda _: None))


def served(fitted: Fitted) -> tuple[np.ndarray, Examples]:
    users = fitted.problem.test_users
    return users, fitted.features.encode_users(fitted.problem.user_ids[users])


def test_it_finds_more_than_popularity(fitted):
    users, examples = served(fitted)
    split = fitted.problem.test
    found, _ = fitted.retriever.retrieve(examples, split.seen[users], COUNT)
    nobody = Examples(*(values.copy() for values in examples))
    nobody.history_positions[:] = fitted.features.items.n_items
    popular = replace(fitted.retriever, tower_vectors=np.zeros_like(fitted.retriever.tower_vectors))
    popular.tower_vectors[:, -1] = compute_log_popularity(split.positives)
    plain, _ = popular.retrieve(nobody, split.seen[users], COUNT)
    relevant = split.relevant[users]
    assert has_test_items(relevant).all()
    assert ndcg_at(found, relevant, 10).mean() > 1.1 * ndcg_at(plain, relevant, 10).mean()
    assert recall_at(found, relevant, 20).mean() > 1.1 * recall_at(plain, relevant, 20).mean()


def test_seen_items_are_not_retrieved(fitted):
    users, examples = served(fitted)
    seen = fitted.problem.test.seen[users]
    found, scores = fitted.retriever.retrieve(examples, seen, COUNT)
    rows = np.repeat(np.arange(len(users)), COUNT)
    assert not np.asarray(seen[rows, found.ravel()]).any()
    assert np.isfinite(scores).all()


def test_blocks_of_users_do_not_matter(fitted):
    users, examples = served(fitted)
    seen = fitted.problem.test.seen[users]
    expected, _ = fitted.retriever.retrieve(examples, seen, COUNT)
    assert len(users) > module.USERS_PER_BLOCK
    parts = [slice(start, start + 7) for start in range(0, len(users), 7)]
    got = [fitted.retriever.retrieve(Examples(*(values[part] for values in examples)), seen[part], COUNT)[0] for part in parts]
    assert (np.concatenate(got) == expected).mean() > 0.999  # a product of another shape may differ in the last bit


def test_training_data_are_first_takings_seen_from_their_own_time(fitted):
    pairs = fitted.train.loc[fitted.train["positive"].to_numpy(), ["user_id", "item_id"]]
    first = fitted.train.loc[pairs.drop_duplicates().index]
    assert len(fitted.data.targets) == len(first) == fitted.data.positives.nnz
    assert set(fitted.data.positives.data.tolist()) == {1.0}
    examples = fitted.data.examples
    known = examples.history_positions[:, 0] < fitted.features.items.n_items
    positives = fitted.train[fitted.train["positive"].to_numpy()]
    latest_s = positives.groupby("user_id")["timestamp"].shift().loc[first.index].to_numpy()
    assert (known == ~np.isnan(latest_s)).all()
    waited_days = (first["timestamp"].to_numpy() - latest_s) / 86_400
    np.testing.assert_allclose(examples.history_age_days[known, 0], waited_days[known], rtol=1e-4, atol=1e-4)
    everything = prepare_data(fitted.features, fitted.train, np.arange(50), filter_seen=False)
    assert len(everything.targets) == 50


def test_towers_learn_from_a_part_of_a_long_log(fitted, monkeypatch):
    monkeypatch.setattr(module, "MOST_EXAMPLES", 100)
    rows = np.flatnonzero(fitted.train["positive"].to_numpy())
    data = prepare_data(fitted.features, fitted.train, rows)
    assert len(data.targets) == len(data.examples.user_continuous) == 100
    assert data.positives.nnz == fitted.data.positives.nnz
    again, other = (prepare_data(fitted.features, fitted.train, rows, seed=seed) for seed in (0, 1))
    assert again.targets.tolist() == data.targets.tolist() != other.targets.tolist()


def test_low_rank_sides_multiply_to_the_neighbours():
    rng = np.random.default_rng(0)
    positions = np.array([[1, 2], [0, 3], [3, 3], [2, 0], [4, 4]], np.int32)
    weights = rng.random((5, 2)).astype(np.float32)
    positions[2, 1], weights[2, 1], weights[4] = 4, 0.0, 0.0
    dense = sp.csr_matrix((weights[:-1].ravel(), (np.repeat(np.arange(4), 2), positions[:-1].ravel())), shape=(4, 5))
    history, item = factorise(Neighbours(positions, weights), width=6, seed=0)
    assert history.shape == item.shape == (4, 6)
    np.testing.assert_allclose(history @ item.T, module.LOGITS_PER_WEIGHT * dense.toarray()[:, :4], atol=1e-4)


def test_items_that_are_taken_again_have_a_larger_share_of_repeats():
    users, items = np.array([0, 0, 0, 1, 1, 2, 3]), np.array([0, 0, 0, 0, 1, 1, 1])
    shares = compute_repeat_shares(users, items, 3)
    overall = 1 / 5  # one of five pairs of a user and an item came again
    np.testing.assert_allclose(shares, [(1 + 10 * overall) / 12, 10 * overall / 13, overall], rtol=1e-6)


def test_a_history_item_is_retrieved_again_with_the_weight_of_repeats(fitted):
    repeats = replace(fitted.retriever, repeat_shares=np.full(fitted.data.n_items, 0.5, np.float32), repeat_weight=0.2)
    _, examples = served(fitted)
    nothing_seen = sp.csr_matrix((len(examples.user_categorical), fitted.data.n_items))
    (found, scores), (again, raised) = (
        retriever.retrieve(examples, nothing_seen, fitted.data.n_items) for retriever in (fitted.retriever, repeats)
    )
    given_way = fitted.retriever.neighbours.weights[:, -1].max() * 100 * sum(place**-0.5 for place in range(1, 65))
    n_raised = 0
    for row, history in enumerate(examples.history_positions):
        distinct = list(dict.fromkeys(item for item in history.tolist() if item < fitted.data.n_items))
        own = dict(zip(again[row].tolist(), raised[row].tolist(), strict=True))
        before = dict(zip(found[row].tolist(), scores[row].tolist(), strict=True))
        for place, item in enumerate(distinct, start=1):
            raised_by = 0.5 * 0.2 * 100 / place**0.5  # the blend is 100 logits per unit
            assert raised_by - given_way - 1e-3 <= own[item] - before[item] <= raised_by + 1e-3
            n_raised += 1
    assert n_raised > 20


@pytest.fixture(scope="module")
def with_sequence(fitted) -> Fitted:
    shape = SequenceShape(width=16, length=50)  # shorter than histories
    settings = SequenceSettings(shape, epochs=1, batch_events=512)
    windows = cut_windows(fitted.data.taken, fitted.data.n_items, shape.length)
    sequence = train_sequence(windows, fitted.data.n_items, settings, say=lambda _: None)
    return replace(fitted, retriever=replace(fitted.retriever, sequence=sequence, sequence_weight=0.5))


@pytest.fixture(scope="module")
def with_repeats(fitted) -> Fitted:
    shares = np.random.default_rng(0).random(fitted.data.n_items).astype(np.float32)
    return replace(fitted, retriever=replace(fitted.retriever, repeat_shares=shares, repeat_weight=0.3))


@pytest.fixture(scope="module")
def with_graph(with_sequence) -> Fitted:
    graph = fit_graph(with_sequence.data.positives, GraphSettings(width=12), 5.0, seed=0)
    return replace(with_sequence, retriever=replace(with_sequence.retriever, graph=graph, graph_weight=0.3))


def info_of(stage: str, fitted: Fitted, **settings: object) -> StageInfo:
    plan = fitted.features.user_plan
    axes = Axes(candidates=COUNT, user_categorical=len(fitted.features.user_rows), user_continuous=len(plan.continuous))
    return StageInfo(stage, 1, axes, fitted.features.context, settings)


def save_stage(folder: Path, fitted: Fitted, exact_up_to: int) -> tuple[list[Parity], Choice]:
    """Write the retrieve stage of a retriever. exact_up_to: items of a catalogue that needs no index"""
    available, (_, examples) = np.ones(fitted.features.items.n_items, bool), served(fitted)
    fit, sizes = (fitted.retriever, fitted.features), Sizes(exact_up_to)
    settings, parities, choice = save_retriever(folder, *fit, available, examples, COUNT, sizes=sizes)
    info_of("retrieve", fitted, **settings).write(folder)
    np.save(folder / f"{POPULARITY}.npy", np.zeros(fitted.features.items.n_items + 1, np.float32))
    Content.of([{}] * fitted.features.items.n_items).save(folder)
    (folder / CONFIG_FILE).write_text("{}")
    return parities, choice


@pytest.mark.parametrize("exact_up_to", [20_000, 50])
@pytest.mark.parametrize("of", ["fitted", "with_sequence", "with_graph", "with_repeats"])
def test_the_published_stage_retrieves_the_same(of, request, tmp_path, exact_up_to):
    fitted = request.getfixturevalue(of)
    users, examples = served(fitted)
    parities, choice = save_stage(tmp_path, fitted, exact_up_to)
    assert len(parities) == (1 if of in ("fitted", "with_repeats") else 2)
    assert max(parity.max_rel for parity in parities) < 1e-5
    assert (choice.kind == "exact") == (exact_up_to > 300)
    batch = len(users)
    inputs = {
        "user_id": fitted.problem.user_ids[users][:, None],
        "user_categorical": examples.user_categorical,
        "user_continuous": examples.user_continuous,
        "history_ids": fitted.features.items.take_ids(examples.history_positions),
        "history_age_days": examples.history_age_days,
        "exclude": np.full((batch, 64), PAD_ID),
        "category": np.full((batch, 1), b"", object),
        "among": np.full((batch, COUNT), PAD_ID),
        "lineage": new_lineage(batch, 1),
    }
    got = Retrieve.load(tmp_path)(inputs)
    found, scores = fitted.retriever.retrieve(examples, fitted.problem.test.seen[users], COUNT)
    same = got["candidate_ids"] == fitted.features.items.take_ids(found)
    assert same.mean() > (0.999 if choice.kind == "exact" else 0.95)
    np.testing.assert_allclose(got["retrieval_scores"][same], scores[same], atol=1e-4)


@pytest.fixture
def staged(fitted, tmp_path) -> tuple[Path, Path]:
    """The folders of preprocess and retrieve, whose index searches one list."""
    preprocess, retrieve = tmp_path / "preprocess", tmp_path / "retrieve"
    fitted.features.save_preprocess(preprocess)
    Content.of([{}] * fitted.features.items.n_items).save(preprocess)
    info_of("preprocess", fitted, interests=[], repeats=False).write(preprocess)
    save_stage(retrieve, fitted, exact_up_to=50)
    index = faiss.read_index(str(retrieve / INDEX_FILE))
    extract_inverted_file(index).nprobe = 1
    faiss.write_index(index, str(retrieve / INDEX_FILE))
    return preprocess, retrieve


def requests_of(fitted: Fitted) -> dict[str, np.ndarray]:
    user_ids = fitted.problem.user_ids[fitted.problem.test_users]
    return info_of("preprocess", fitted).spec.fill_optional(len(user_ids)) | {"user_id": user_ids[:, None]}


def test_a_staged_index_is_widened_until_requests_find_enough(fitted, staged):
    trials = widen_search(staged[0], staged[1], requests_of(fitted), fixed=False)
    assert trials[-1].recall_lower_bound >= WANTED_RECALL > trials[0].recall
    assert extract_inverted_file(faiss.read_index(str(staged[1] / INDEX_FILE))).nprobe == trials[-1].effort


def test_a_set_effort_that_finds_too_little_is_refused(fitted, staged):
    with pytest.raises(ExportError, match=r"lower bound 0\.\d+.*at effort 1\. Expected 0\.98\. Set a larger compute"):
        widen_search(staged[0], staged[1], requests_of(fitted), fixed=True)


def test_a_catalogue_without_an_index_needs_no_effort(fitted, staged):
    save_stage(staged[1], fitted, exact_up_to=20_000)
    assert widen_search(staged[0], staged[1], requests_of(fitted), fixed=False) == []
