"""Rank and rerank from one training log: what is learned on held-out requests, served with statistics of the whole log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd

from export.dataset import Dataset
from export.features.build import Features
from export.features.items import encode_items, item_columns, item_statistics
from export.models.item_statistics import StatisticsSettings
from export.models.parity import Parity
from export.models.ranking_data import ItemSlots, Requests, Retrieve, requests_of, split_again, statistics_of
from export.models.reranker import Lists, Reranker, RerankerSettings, save_reranker, train_reranker
from export.models.save_ranker import MOST_SAMPLES, item_vectors_of, save_ranker
from export.models.train_ranker import Ranker, RankerSettings, parts, rank_scores_of, train_ranker
from stages.ranking_features import ItemStatistics

FitRetrieve = Callable[[pd.DataFrame], Retrieve]
"""Training events -> a retriever fitted on them, which leaves out the items its users met in them."""


@dataclass(frozen=True)
class RankingSettings:
    statistics: StatisticsSettings = field(default_factory=StatisticsSettings)
    ranker: RankerSettings = field(default_factory=RankerSettings)
    reranker: RerankerSettings = field(default_factory=RerankerSettings)
    most_requests: int = 8_192  # users drawn for training


@dataclass(frozen=True)
class Ranking:
    """Both models with what they are served with. sample: real requests, for parity reports."""

    ranker: Ranker
    reranker: Reranker
    items: ItemSlots
    statistics: ItemStatistics
    sample: Requests


@dataclass(frozen=True)
class Saved:
    """What the publisher needs of a saved stage: `settings` of stage.json and the parity report for the manifest."""

    settings: dict
    parity: Parity


def fit_ranking(
    dataset: Dataset,
    train: pd.DataFrame,
    features: Features,
    fit_retrieve: FitRetrieve,
    settings: RankingSettings,
    seed: int = 0,
    say: Callable[[str], None] = print,
) -> Ranking:
    """train: the frame `features` was built from, sorted by time; fit_retrieve is called once, with the earlier part of it."""
    rng = np.random.default_rng(seed)
    earlier, later = split_again(train)
    requests = requests_of(
        features,
        train,
        later,
        statistics_of(features, earlier, settings.statistics),
        fit_retrieve(earlier),
        settings.most_requests,
        rng,
    )
    slot_names = tuple(features.item_rows)
    before = item_statistics(earlier, features.items, features.as_of_s, features.settings)
    items_before = ItemSlots.of(
        encode_items(features.item_plan, item_columns(dataset.items, features.schema.item, before)), slot_names
    )
    teaching, validation = parts(requests, settings.ranker.validation_share, rng)
    say(f"ranker: {len(teaching):,} requests to learn from, {len(validation):,} to choose by")
    tables = (dict(features.user_rows), dict(features.item_rows))
    ranker = train_ranker(teaching, validation, items_before, tables, settings.ranker, seed, say)

    length = settings.reranker.list_length
    lists = [Lists.of(part, rank_scores_of(ranker, part, items_before), length) for part in (teaching, validation)]
    reranker = train_reranker(*lists, item_vectors_of(ranker.model, items_before), settings.reranker, seed, say)
    return Ranking(
        ranker,
        reranker,
        ItemSlots.of(features.item_arrays, slot_names),
        statistics_of(features, train, settings.statistics),
        validation.take(np.arange(min(len(validation), MOST_SAMPLES))),
    )


def save_ranking(rank_folder: Path, rerank_folder: Path, ranking: Ranking, features: Features) -> tuple[Saved, Saved]:
    """Write the rank and the rerank stage, all but rules, `stage.json` and manifests -> what was saved of each."""
    index, sample = features.items, ranking.sample
    rank = Saved(*save_ranker(rank_folder, ranking.ranker, index, ranking.items, ranking.statistics, sample))
    vectors = item_vectors_of(ranking.ranker.model, ranking.items)
    scores = rank_scores_of(ranking.ranker, sample, ranking.items)
    lists = Lists.of(sample, scores, ranking.reranker.list_length)
    return rank, Saved(*save_reranker(rerank_folder, ranking.reranker, index, vectors, lists))
