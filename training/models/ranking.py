"""Rank and rerank from one training log: what is learned on held-out requests, served with statistics of the whole log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from serving.stages.features.ranking import ItemStatistics
from training.dataset import Dataset
from training.features.build import Features
from training.models.distill import distil
from training.models.item_statistics import StatisticsSettings
from training.models.parity import Parity
from training.models.ranking_data import (
    ItemSlots,
    Requests,
    Retrieve,
    items_before,
    requests_of,
    split_again,
    statistics_of,
    unlabelled_requests,
)
from training.models.reranker import Lists, Reranker, RerankerSettings, train_reranker
from training.models.save_ranker import item_vectors_of, save_ranker
from training.models.save_reranker import save_reranker
from training.models.train_ranker import Ranker, RankerSettings, parts, rank_scores_of, train_ranker

MOST_SAMPLES = 32  # requests the parity reports are measured on

FitRetrieve = Callable[[pd.DataFrame], Retrieve]
"""Training events, with their row number in the training log as "row" -> a retriever fitted on them alone.

It leaves out the items that a user met in them.
"""

FitRanker = Callable[..., Ranker]
"""As `train_ranker`; or a ranker trained elsewhere, which only its blend is chosen for."""


@dataclass(frozen=True)
class RankingSettings:
    statistics: StatisticsSettings = field(default_factory=StatisticsSettings)
    ranker: RankerSettings = field(default_factory=RankerSettings)
    reranker: RerankerSettings = field(default_factory=RerankerSettings)
    student: RankerSettings | None = None  # of a smaller one that imitates the ranker and is served in its place
    most_requests: int = 8_192  # users drawn for training at each moment
    enough_requests: int = 2_048  # with fewer, requests of earlier moments are added,
    most_moments: int = 2  # as long as there are no more than this: each needs a retriever of its own


@dataclass(frozen=True)
class Ranking:
    """Both models with what they are served with. sample: real requests on the served catalogue, for parity reports."""

    ranker: Ranker
    reranker: Reranker
    statistics: ItemStatistics
    sample: Requests

    @property
    def items(self) -> ItemSlots:
        """The catalogue as it is served."""
        return self.sample.items


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
    retrieve: Retrieve,
    settings: RankingSettings,
    seed: int = 0,
    say: Callable[[str], None] = print,
    fit_ranker: FitRanker = train_ranker,
) -> Ranking:
    """train: the frame `features` was built from, sorted by time; retrieve: fitted on all of it, as it will be served."""
    rng = np.random.default_rng(seed)
    latest, *older = moments(dataset, train, features, fit_retrieve, settings, rng)
    teaching, validation = parts(latest, settings.ranker.validation_share, rng)
    tables = (dict(features.user_rows), dict(features.item_rows))
    count = sum(len(part) for part in (teaching, *older))
    say(f"ranker: {count:,} requests of {1 + len(older)} moments to learn from, {len(validation):,} to choose by")
    ranker = fit_ranker((teaching, *older), validation, tables, settings.ranker, seed, say)
    statistics = statistics_of(features, train, settings.statistics)
    if settings.student:
        unlabelled = unlabelled_requests(features, train, statistics, retrieve, settings.most_requests, rng)
        ranker = distil(ranker, (teaching, *older, unlabelled), validation, settings.student, seed, say)

    length = settings.reranker.list_length
    lists = [Lists.of(part, rank_scores_of(ranker, part), length) for part in (teaching, validation)]
    reranker = train_reranker(*lists, item_vectors_of(ranker.model, latest.items), settings.reranker, seed, say)
    served = ItemSlots.of(features.item_arrays, tuple(features.item_rows))
    sample = replace(validation.take(np.arange(min(len(validation), MOST_SAMPLES))), items=served)
    return Ranking(ranker, reranker, statistics, sample)


def moments(
    dataset: Dataset,
    train: pd.DataFrame,
    features: Features,
    fit_retrieve: FitRetrieve,
    settings: RankingSettings,
    rng: np.random.Generator,
) -> list[Requests]:
    """Requests before the last fifth of each user's events; on small logs before the last fifth of what is left, and again.

    Each moment has a retriever and statistics of its own, fitted on what came before it.
    """
    found: list[Requests] = []
    earlier = train
    while len(found) < settings.most_moments and sum(map(len, found)) < settings.enough_requests:
        before, (earlier, later) = earlier, split_again(earlier)
        if found and len(earlier) == len(before):
            break  # nobody comes back so early
        items, statistics = items_before(dataset, features, earlier), statistics_of(features, earlier, settings.statistics)
        retrieve = fit_retrieve(earlier)
        found.append(requests_of(features, train, later, items, statistics, retrieve, settings.most_requests, rng))
    return found


def save_ranking(rank_folder: Path, rerank_folder: Path, ranking: Ranking, features: Features) -> tuple[Saved, Saved]:
    """Write the rank and the rerank stage, all but rules, `stage.json` and manifests -> what was saved of each."""
    index, sample = features.items, ranking.sample
    rank = Saved(*save_ranker(rank_folder, ranking.ranker, index, ranking.statistics, sample))
    lists = Lists.of(sample, rank_scores_of(ranking.ranker, sample), ranking.reranker.list_length)
    vectors = item_vectors_of(ranking.ranker.model, ranking.items)
    return rank, Saved(*save_reranker(rerank_folder, ranking.reranker, index, vectors, lists))
