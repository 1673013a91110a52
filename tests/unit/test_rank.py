"""The rank and rerank stages on a trained pair of models: against torch, at every batch size, short lists, broken folders."""

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from export.dataset import load_dataset, split_by_time
from export.features.build import build_features
from export.features.schema import FeatureSettings
from export.models.cold_rows import ColdRows
from export.models.item_statistics import StatisticsSettings
from export.models.ranking import RankingSettings, fit_ranking, moments, save_ranking
from export.models.ranking_data import Requests, in_blocks, requests_of, split_again, taken_of
from export.models.reranker import Lists, RerankerSettings, corrections
from export.models.save_ranker import item_vectors_of, mixed_tables
from export.models.train_ranker import RankerSettings, rank_scores_of, train_ranker
from export.tables import shapes_of
from stages.artifacts import StageInfo
from stages.contract import PAD_ID, PAD_SCORE, Axes, Degraded, new_lineage, stage_specs
from stages.embeddings.mixed_widths import cold_table
from stages.embeddings.tables import EmbeddingTables
from stages.errors import ArtifactError, DependencyError
from stages.rank import TABLES_FOLDER, Rank, ranked
from stages.rerank import LIST_FEATURES, Rerank, list_features
from stages.rules_config import RulesConfig, compile_rules

C, K, M, HISTORY, GENERATION = 24, 5, 12, 8, 3
SETTINGS = RankingSettings(
    StatisticsSettings(neighbours=16),
    RankerSettings(epochs=2, min_examples_per_row=3),
    RerankerSettings(list_length=M, epochs=2, trusts=(0.0, 1.0)),
)
COLD = ColdRows(3, 0.2, least_rows=50)


def popularity_retrieve(features, events):
    """A retriever of known behaviour: the most popular items the user has not met in `events`."""
    positions = features.items.positions(events["item_id"].to_numpy())
    counts = np.bincount(positions, minlength=features.items.n_items).astype(np.float32)
    met = {user: set() for user in events["user_id"]}
    for user, position in zip(events["user_id"], positions, strict=True):
        met[user].add(position)

    def retrieve(users, user_ids):
        order = np.argsort(-counts, kind="stable")
        lists = [[item for item in order if item not in met.get(user, ())][:C] for user in user_ids]
        candidates = np.full((len(lists), C), features.items.n_items)
        for row, items in enumerate(lists):
            candidates[row, : len(items)] = items
        return candidates, np.append(counts, -np.inf)[candidates].astype(np.float32)

    return retrieve


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A data set, its ranking and both stages, saved and loaded."""
    return train(tmp_path_factory.mktemp("repository"), SETTINGS)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """The same with tables of two widths."""
    settings = replace(SETTINGS, ranker=replace(SETTINGS.ranker, cold=COLD))
    return train(tmp_path_factory.mktemp("mixed"), settings)


def train(folder, settings):
    dataset = load_dataset("synthetic:users=120,items=80,events=3000,seed=5")
    train, test = split_by_time(dataset.interactions)
    features = build_features(dataset, train, FeatureSettings(history_length=HISTORY))
    ranking = fit_ranking(
        dataset, train, features, lambda events: popularity_retrieve(features, events), settings, say=lambda _: None
    )
    saved = save_ranking(folder / "rank", folder / "rerank", ranking, features)
    axes = Axes(C, HISTORY, 4, K, len(features.user_rows), len(features.user_plan.continuous))
    compile_rules(
        folder / "rerank",
        RulesConfig(),
        item_ids=features.items.ids,
        category=list(dataset.items["category"]),
        provider=list(dataset.items["provider"]),
        price=None,
        popularity=np.arange(features.items.n_items),
        items_returned=K,
    )
    for name, stage in zip(("rank", "rerank"), saved, strict=True):
        StageInfo(name, GENERATION, axes, (), stage.settings).write(folder / name)
    user_ids = test["user_id"].unique()
    users = features.encode_users(user_ids)
    candidates, scores = popularity_retrieve(features, train)(users, user_ids)
    requests = Requests(
        users,
        candidates.astype(np.int32),
        scores,
        in_blocks(ranking.statistics, users, candidates, scores),
        taken_of(features, test, user_ids, candidates),
        ranking.items,
    )
    return SimpleNamespace(
        dataset=dataset, train=train, features=features, ranking=ranking, folder=folder, axes=axes, user_ids=user_ids,
        requests=requests, saved=saved, rank=Rank.load(folder / "rank"), rerank=Rerank.load(folder / "rerank"),
    )  # fmt: skip


def tensors(trained, rows):
    """What retrieve hands to rank for some of the requests."""
    requests, ids = trained.requests.take(rows), np.append(trained.features.items.ids, PAD_ID)
    return {
        "user_id": trained.user_ids[rows, None],
        "user_categorical": requests.users.user_categorical,
        "user_continuous": requests.users.user_continuous,
        "history_ids": ids[requests.users.history_positions],
        "history_age_days": requests.users.history_age_days,
        "candidate_ids": ids[requests.candidates],
        "retrieval_scores": requests.retrieval_scores,
        "lineage": new_lineage(len(rows), GENERATION),
    }


def through_both(trained, rows):
    """-> (outputs of rank, outputs of rerank)"""
    inputs = tensors(trained, rows)
    ranked = trained.rank(inputs)
    return ranked, trained.rerank({**inputs, **ranked})


def ranked_slowly(inputs, logits, retrieval_part, blend):
    scores = logits + np.float32(blend) * retrieval_part
    padding = inputs["candidate_ids"] == PAD_ID
    broken = ~(np.isfinite(scores) | padding).all(axis=1, keepdims=True)
    return {
        "rank_scores": np.where(padding, PAD_SCORE, np.where(broken, inputs["retrieval_scores"], scores)).astype(np.float32),
        "lineage": inputs["lineage"] | np.where(broken, [0, Degraded.RANK], 0),
    }


@pytest.mark.parametrize("seed", range(5))
def test_ranked_equals_its_slow_twin(seed):
    rng = np.random.default_rng(seed)
    n = 40
    inputs = {
        "candidate_ids": np.where(rng.random((n, C)) < rng.choice([0, 0.5, 1], (n, 1)), PAD_ID, rng.integers(0, 99, (n, C))),
        "retrieval_scores": rng.normal(size=(n, C)).astype(np.float32),
        "lineage": new_lineage(n, GENERATION) | np.outer(rng.integers(0, 4, n), (0, 1)),
    }
    broken = rng.random((n, C)) < rng.choice([0, 0.05], (n, 1))
    scores = np.where(broken, rng.choice([np.nan, np.inf, -np.inf], (n, C)), rng.normal(size=(n, C))).astype(np.float32)
    retrieval_part, blend = rng.normal(size=(n, C)).astype(np.float32), float(rng.choice([0.0, 0.3]))
    before = inputs["lineage"].copy()
    got, expected = (rule(inputs, scores, retrieval_part, blend) for rule in (ranked, ranked_slowly))
    np.testing.assert_array_equal(inputs["lineage"], before)
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values, strict=True)


def test_rank_scores_equal_the_trained_model(trained):
    ranked, _ = through_both(trained, np.arange(len(trained.requests)))
    expected = rank_scores_of(trained.ranking.ranker, trained.requests)
    np.testing.assert_allclose(ranked["rank_scores"], expected, atol=1e-4)
    assert trained.saved[0].parity.max_rel < 1e-5


def test_rows_of_two_widths_score_as_the_trained_model_does(mixed):
    """In one batch, alone, and over plain tables."""
    rows = np.arange(len(mixed.requests))
    ranked, _ = through_both(mixed, rows)
    expected = rank_scores_of(mixed.ranking.ranker, mixed.requests)
    np.testing.assert_allclose(ranked["rank_scores"], expected, atol=1e-5)
    plain = replace(mixed.rank, tables=EmbeddingTables.load(mixed.folder / "rank" / TABLES_FOLDER))
    inputs = tensors(mixed, rows)
    np.testing.assert_array_equal(plain(inputs)["rank_scores"], ranked["rank_scores"])
    hot = mixed.rank.settings.first_cold
    assert {name for name in hot if name.startswith("user_")}
    assert {name for name in hot if name.startswith("item_")}
    item_rows = mixed.rank.item_rows[mixed.rank.items.positions(inputs["candidate_ids"])]
    for slot, name in enumerate(mixed.rank.settings.item_tables):  # both kinds of rows were asked for
        if name in hot:
            assert 0 < (item_rows[..., slot] < hot[name]).mean() < 1


def test_rows_of_two_widths_are_the_trained_ones_bit_for_bit(mixed):
    """As they are stored, and as wide as torch makes them."""
    tables = mixed.rank.tables
    for name, table in mixed_tables(mixed.ranking.ranker.model, mixed.ranking.items).items():
        np.testing.assert_array_equal(tables.lookup(name, np.arange(table.first_cold)), table.array())
        cold = table.cold_array()
        np.testing.assert_array_equal(tables.lookup(cold_table(name), np.arange(len(cold))), cold)
        keys = torch.arange(len(table.shared))[:, None]
        (wide,) = mixed.rank.widths.gather(tables, ((name,), keys.numpy()))
        with torch.no_grad():
            np.testing.assert_allclose(wide[:, 0], table(keys).numpy(), atol=1e-6)


def test_served_items_equal_the_trained_list_network(trained):
    rows = np.arange(len(trained.requests))
    _, served = through_both(trained, rows)
    ranking = trained.ranking
    scores = rank_scores_of(ranking.ranker, trained.requests)
    lists = Lists.of(trained.requests, scores, M)
    vectors = item_vectors_of(ranking.ranker.model, ranking.items)
    with torch.no_grad():
        correction = corrections(ranking.reranker.network, lists, torch.from_numpy(vectors)).numpy()
    final = np.where(lists.valid, lists.rank_scores + ranking.reranker.trust * correction, -np.inf)
    np.testing.assert_allclose(served["scores"], -np.sort(-final, axis=1)[:, :K], atol=1e-4)
    for row in rows:
        expected = dict(zip(trained.features.items.ids[lists.positions[row]], final[row], strict=True))
        got = [expected[item] for item in served["item_ids"][row]]
        np.testing.assert_allclose(got, served["scores"][row], atol=1e-4)
        assert len(set(served["item_ids"][row])) == K


def test_answers_have_the_tensors_of_the_contract(trained):
    specs = stage_specs(trained.axes)
    for name, answer in zip(("rank", "rerank"), through_both(trained, np.arange(3)), strict=True):
        assert {t.name: (t.dims, t.numpy_dtype) for t in specs[name].outputs} == {
            key: (values.shape[1:], values.dtype) for key, values in answer.items()
        }


def test_a_request_is_answered_alone_as_in_a_batch(trained):
    together = through_both(trained, np.arange(32))
    for row in (0, 7, 31):
        alone = through_both(trained, np.array([row]))
        np.testing.assert_allclose(alone[0]["rank_scores"][0], together[0]["rank_scores"][row], atol=1e-5)
        np.testing.assert_array_equal(alone[1]["item_ids"][0], together[1]["item_ids"][row])


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
        faults = stage.faults(inputs)
        assert list(faults) == [1]
        assert "generation is 4, this stage serves 3" in faults[1]


def test_earlier_fallbacks_stay_visible(trained):
    inputs = tensors(trained, np.arange(2))
    inputs["lineage"][1, 1] = Degraded.RETRIEVE
    ranked = trained.rank(inputs)
    np.testing.assert_array_equal(ranked["lineage"], [[GENERATION, 0], [GENERATION, Degraded.RETRIEVE]])
    served = trained.rerank({**inputs, **ranked})
    np.testing.assert_array_equal(served["degraded"], [[0], [Degraded.RETRIEVE]])
    np.testing.assert_array_equal(served["generation"], GENERATION)


def test_tables_that_cannot_be_read_leave_retrievals_order(trained):
    class Down:
        degraded = False

        def gather(self, *wanted):
            raise DependencyError("the parameter server is down")

    inputs = tensors(trained, np.arange(4))
    rank = Rank(**{**vars(trained.rank), "tables": Down()})
    ranked = rank(inputs)
    np.testing.assert_array_equal(ranked["lineage"][:, 1], Degraded.RANK)
    np.testing.assert_array_equal(ranked["rank_scores"], inputs["retrieval_scores"])


def test_a_level_that_is_down_shows(trained):
    """Scores are still those of the rows that are left."""
    inputs = tensors(trained, np.arange(4))
    half_down = SimpleNamespace(gather=trained.rank.tables.gather, degraded=True)
    ranked = replace(trained.rank, tables=half_down)(inputs)
    np.testing.assert_array_equal(ranked["lineage"][:, 1], Degraded.RANK)
    np.testing.assert_array_equal(ranked["rank_scores"], trained.rank(inputs)["rank_scores"])


def test_rows_from_the_tiers_score_as_plain_tables_do_bit_for_bit(trained):
    inputs = tensors(trained, np.arange(32))
    plain = replace(trained.rank, tables=EmbeddingTables.load(trained.folder / "rank" / TABLES_FOLDER))
    for name, tensor in plain(inputs).items():
        np.testing.assert_array_equal(trained.rank(inputs)[name], tensor)


def test_the_shapes_of_tables_are_known_before_training(trained):
    tables = EmbeddingTables.load(trained.folder / "rank" / TABLES_FOLDER).tables
    assert shapes_of(trained.features, SETTINGS.ranker.width) == {name: table.shape for name, table in tables.items()}


def test_the_shapes_of_tables_of_two_widths_are_known_before_training(mixed):
    tables = EmbeddingTables.load(mixed.folder / "rank" / TABLES_FOLDER).tables
    assert shapes_of(mixed.features, SETTINGS.ranker.width, COLD) == {name: table.shape for name, table in tables.items()}


def test_training_twice_gives_the_same_models(trained):
    again = fit_ranking(
        trained.dataset,
        trained.train,
        trained.features,
        lambda events: popularity_retrieve(trained.features, events),
        SETTINGS,
        say=lambda _: None,
    )
    np.testing.assert_allclose(
        rank_scores_of(again.ranker, trained.requests),
        rank_scores_of(trained.ranking.ranker, trained.requests),
        atol=1e-5,
    )


def test_training_requests_know_nothing_of_what_they_predict(trained):
    """The state is the one before the first later event; what was taken is later, and was not met earlier."""
    features, train = trained.features, trained.train
    earlier, later = split_again(train)
    rng = np.random.default_rng(0)
    statistics = trained.ranking.statistics
    requests = requests_of(
        features, train, later, trained.ranking.items, statistics, popularity_retrieve(features, earlier), 10**6, rng
    )
    firsts = later[later["user_id"].isin(later.loc[later["positive"], "user_id"])].drop_duplicates("user_id")
    assert len(requests) == len(firsts)
    ids = np.append(features.items.ids, PAD_ID)
    for row, user in enumerate(firsts["user_id"]):
        past = earlier[(earlier["user_id"] == user) & earlier["positive"]]["item_id"].to_numpy()[::-1][:HISTORY]
        np.testing.assert_array_equal(ids[requests.users.history_positions[row]][: len(past)], past)
        coming = set(later[(later["user_id"] == user) & later["positive"]]["item_id"])
        taken = set(ids[requests.candidates[row][requests.taken[row]]])
        assert taken == coming & set(ids[requests.candidates[row]])
        assert not taken & set(earlier[earlier["user_id"] == user]["item_id"])


def test_small_logs_teach_with_requests_of_several_moments(trained):
    """Each moment is before the one found first, and learns from a retriever that knows still less."""
    features, known = trained.features, []

    def fit_retrieve(events):
        known.append(len(events))
        return popularity_retrieve(features, events)

    def found(**changes):
        settings = replace(SETTINGS, **changes)
        return moments(trained.dataset, trained.train, features, fit_retrieve, settings, np.random.default_rng(0))

    parts = found(most_moments=3)
    assert len(parts) == 3
    assert known == sorted(known, reverse=True)
    assert known[0] == len(split_again(trained.train)[0])
    assert (parts[0].items.numbers != parts[1].items.numbers).any()
    assert len(found(enough_requests=1)) == 1


def test_a_number_that_was_constant_while_teaching_does_not_rule_what_is_served(trained):
    """Sales of the last week, say: none in a log that was cut off earlier, some in the served one."""

    def with_last_number(requests, values):
        numbers = requests.items.numbers.copy()
        numbers[:, -1] = values
        return replace(requests, items=replace(requests.items, numbers=numbers))

    taught, constant = trained.requests, np.float32(0.5)
    teaching = with_last_number(taught, constant)
    tables = (dict(trained.features.user_rows), dict(trained.features.item_rows))
    ranker = train_ranker([teaching], teaching, tables, SETTINGS.ranker, report=lambda _: None)
    before = rank_scores_of(ranker, teaching)
    served = with_last_number(taught, constant + np.random.default_rng(0).normal(size=len(taught.items.numbers)))
    moved = np.abs(rank_scores_of(ranker, served) - before)
    assert moved.max() > 0
    assert moved.mean() < before.std()


def test_a_log_in_which_nobody_comes_back_serves_retrievals_order():
    dataset = load_dataset("synthetic:users=40,items=20,events=400,seed=1")
    train = dataset.interactions.drop_duplicates("user_id").reset_index(drop=True)
    features = build_features(dataset, train, FeatureSettings(history_length=HISTORY))
    retrieve = popularity_retrieve(features, train.iloc[:0])
    ranking = fit_ranking(dataset, train, features, lambda events: retrieve, SETTINGS, say=lambda _: None)
    sample = ranking.sample
    scores = rank_scores_of(ranking.ranker, sample)
    places = np.argsort(-scores, axis=1, kind="stable")
    np.testing.assert_array_equal(places, np.tile(np.arange(C), (len(sample), 1)))
    assert ranking.reranker.trust == 0.0


def test_list_features_measure_distances_within_the_list():
    scores = np.array([[3.0, 1.0, 0.5, -np.inf]], np.float32)
    valid = np.isfinite(scores)
    features = list_features(scores, np.array([[1.0, 2.0, 3.0, -np.inf]], np.float32), valid)
    assert features.shape == (1, 4, LIST_FEATURES)
    np.testing.assert_allclose(features[0, :3, 1].mean(), 0.0, atol=1e-6)
    np.testing.assert_allclose(features[0, :, 2], [0.0, 2.0, 2.5, 0.0])
    np.testing.assert_allclose(features[0, :, 3], [2.0, 0.5, 0.0, 0.0])
    np.testing.assert_array_equal(features[0, 3], 0.0)


def rewritten(folder, name, tmp_path, **changes):
    """A copy of a stage folder with settings of stage.json replaced."""
    copy = tmp_path / name
    shutil.copytree(folder / name, copy)
    stage = json.loads((copy / "stage.json").read_text())
    stage["settings"].update(changes)
    stage["settings"] = {key: value for key, value in stage["settings"].items() if value is not None}
    (copy / "stage.json").write_text(json.dumps(stage))
    return copy


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"blend": None}, "lacks a setting of rank"),
        ({"user_tables": ["user_0", "user_99"]}, r"lacks the tables \['user_99'\]"),
        ({"user_tables": ["user_0"]}, "names 1 user and"),
        ({"first_cold": {"user_0": 20}}, r"projections\.npz does not widen the cold rows of user_0"),
    ],
)
def test_a_rank_folder_that_disagrees_with_itself_is_refused(trained, tmp_path, changes, message):
    with pytest.raises(ArtifactError, match=message):
        Rank.load(rewritten(trained.folder, "rank", tmp_path, **changes))


def test_item_arrays_of_another_catalogue_are_refused(trained, tmp_path):
    rank, rerank = (rewritten(trained.folder, name, tmp_path) for name in ("rank", "rerank"))
    np.save(rank / "item_numbers.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(ArtifactError, match=r"items need .* rows, found"):
        Rank.load(rank)
    np.save(rerank / "item_vectors.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(ArtifactError, match=r"item_vectors\.npy 2"):
        Rerank.load(rerank)


def test_a_rerank_folder_without_its_settings_is_refused(trained, tmp_path):
    with pytest.raises(ArtifactError, match="lacks a setting of rerank"):
        Rerank.load(rewritten(trained.folder, "rerank", tmp_path, list_length=None))
