"""Fixtures: a data set whose ranker and re-ranker are trained and saved once, and the stages that load them."""

from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest

from repository.rules import compile_rules
from serving.contract.artifacts import StageInfo
from serving.contract.tensors import PAD_ID, Axes, new_lineage
from serving.stages.live.catalogue.item_features import FOLDER as PLAN_FOLDER
from serving.stages.live.content import Content
from serving.stages.rank import Rank
from serving.stages.rerank import Rerank
from serving.stages.rules.config import RulesConfig
from tests.unit.small_shops import keep_few_columns
from training.dataset import load_dataset, split_log
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.rankers.item_statistics import StatisticsSettings
from training.models.rankers.ranking_data import Requests, compute_in_blocks, find_taken, fit_item_statistics
from training.models.rankers.reranker import RerankerSettings
from training.models.rankers.train_ranker import RankerSettings
from training.models.ranking import (
    Ranking,
    RankingSettings,
    add_unlabelled,
    collect_lessons,
    fit_ranker,
    fit_reranker,
    save_ranking,
    take_sample,
)

C, K, M, HISTORY, GENERATION = 24, 5, 12, 8, 3
SETTINGS = RankingSettings(
    StatisticsSettings(neighbours=16),
    RankerSettings(epochs=2, min_examples_per_row=3),
    RerankerSettings(list_length=M, epochs=2, trusts=(0.0, 1.0)),
)


def popularity_retrieve(features, events):
    """Return a retriever of known behaviour: it gives the most popular items that the user has not met in `events`."""
    positions = features.items.find_positions(events["item_id"].to_numpy())
    counts = np.bincount(positions, minlength=features.items.n_items).astype(np.float32)
    met: dict[int, set[int]] = {user: set() for user in events["user_id"]}
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


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A data set, its ranking and both stages, saved and loaded."""
    return train(tmp_path_factory.mktemp("repository"), SETTINGS)


def fit_ranking(dataset, log, features, fit_retriever, settings):
    """Train both models as an export does, quietly."""
    statistics, rng = fit_item_statistics(features, log, settings.statistics), np.random.default_rng(0)
    lessons = collect_lessons(dataset, log, features, fit_retriever, settings, rng)
    lessons = add_unlabelled(lessons, log, features, statistics, fit_retriever(log), settings, rng)
    ranker = fit_ranker(lessons, features, settings, 0, lambda _: None)
    reranker = fit_reranker(lessons, ranker, settings.reranker, 0, lambda _: None)
    return Ranking(ranker, reranker, statistics, take_sample(lessons, features))


def train(folder, settings):
    dataset = keep_few_columns(load_dataset("synthetic:users=120,items=80,events=3000,seed=5"))
    train, test = split_log(dataset.interactions)
    features = build_features(dataset, train, FeatureSettings(history_length=HISTORY))
    ranking = fit_ranking(dataset, train, features, partial(popularity_retrieve, features), settings)
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
        save_items(folder / name, features)
    user_ids = test["user_id"].unique()
    users = features.encode_users(user_ids)
    candidates, scores = popularity_retrieve(features, train)(users, user_ids)
    cross = compute_in_blocks(ranking.statistics, users, candidates, scores)
    requests = Requests(
        users,
        candidates.astype(np.int32),
        scores,
        np.concatenate([features.item_aggregates[candidates], cross], axis=2),
        find_taken(features, test, user_ids, candidates),
        ranking.items,
        user_ids,
    )
    return SimpleNamespace(
        dataset=dataset, train=train, features=features, ranking=ranking, folder=folder, axes=axes, user_ids=user_ids,
        requests=requests, saved=saved, rank=Rank.load(folder / "rank"), rerank=Rerank.load(folder / "rerank"),
    )  # fmt: skip


def save_items(folder, features):
    """Write into a stage's folder what an export adds for items that change."""
    features.item_plan.save(folder / PLAN_FOLDER)
    Content.of([{}] * features.items.n_items).save(folder)


def tensors(trained, rows):
    """Return the inputs that rank gets from retrieve for some of the requests."""
    requests, ids = trained.requests.take(rows), np.append(trained.features.items.ids, PAD_ID)
    return {
        "user_id": trained.user_ids[rows, None],
        "user_categorical": requests.users.user_categorical,
        "user_continuous": requests.users.user_continuous,
        "history_ids": ids[requests.users.history_positions],
        "history_age_days": requests.users.history_age_days,
        "history_interests": np.zeros((len(requests), 1), np.int64),
        "candidate_ids": ids[requests.candidates],
        "retrieval_scores": requests.retrieval_scores,
        "candidate_sources": np.zeros(requests.candidates.shape, np.uint8),
        "taken_together": np.zeros(requests.candidates.shape, np.float32),
        "taken_with_latest": np.zeros(requests.candidates.shape, np.float32),
        "lineage": new_lineage(len(rows), GENERATION),
    }


def through_both(trained, rows):
    """Return the outputs of rank and the outputs of rerank for some of the requests."""
    inputs = tensors(trained, rows)
    ranked = trained.rank(inputs)
    return ranked, trained.rerank({**inputs, **ranked})
