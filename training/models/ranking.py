"""Train ranker and re-ranker on held-out requests, to be served with statistics of the whole log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pandas as pd

from serving.stages.features.item_statistics import ItemStatistics
from training.dataset import Dataset, keep_known
from training.features.build import Features
from training.models.parity import Parity
from training.models.rankers.item_statistics import StatisticsSettings
from training.models.rankers.ranking_data import (
    ItemSlots,
    Requests,
    Retrieve,
    fit_item_statistics,
    make_items_before,
    make_requests,
    make_served_items,
    make_unlabelled_requests,
    make_visit_requests,
)
from training.models.rankers.reranker import Lists, Reranker, RerankerSettings, train_reranker
from training.models.rankers.save_ranker import join_item_vectors, save_ranker
from training.models.rankers.save_reranker import save_reranker
from training.models.rankers.teachers import FEWEST_REQUESTS, choose_teachers
from training.models.rankers.train_ranker import Ranker, RankerSettings, Start, compute_rank_scores, train_ranker
from training.models.student.compress import compress
from training.models.student.distill import STUDENT, Lesson
from training.models.validation import drop_validating, split_training_log, split_validation

MOST_SAMPLES = 32  # requests for the parity reports

FitTrainingRetriever = Callable[[pd.DataFrame], Retrieve]
"""Events before a label window, with their row number in the log as "row" -> a retriever fitted on them alone.

The retriever excludes items that the user has seen in these events.
"""

TrainRanker = Callable[..., Ranker]
"""`train_ranker`, or a function with its parameters that takes a ranker trained elsewhere and only chooses its blend weight."""


@dataclass(frozen=True)
class RankingSettings:
    """Settings of the ranking models and of the requests that they are trained on."""

    statistics: StatisticsSettings = field(default_factory=StatisticsSettings)
    ranker: RankerSettings = field(default_factory=RankerSettings)
    reranker: RerankerSettings = field(default_factory=RerankerSettings)
    compression: str = "none"  # how the ranker is made smaller (training/models/student/compress.py)
    student: RankerSettings = STUDENT  # of the small network that is distilled from the ranker
    teachers: tuple[str, ...] = ()  # networks that are tried as teachers beside the ranker (rankers/teachers.py)
    most_taught: int = 0  # requests that these learn from, those without events included; with more, the ranker teaches alone
    most_requests: int = 8_192  # users sampled for training per moment
    enough_requests: int = 2_048  # with fewer, requests of earlier moments are added
    most_moments: int = 2  # limit of moments, because each needs its own retriever
    most_visit_requests: int = 4_096  # requests in the middle of visits; no more than before visits
    filter_seen: bool = True  # nobody is asked for what they took before


@dataclass(frozen=True)
class Lessons:
    """Training and validation requests of the ranking models.

    teaching, without_events, validation: from `hold_out`
    unlabelled: requests as they will be served, for distillation; none without compression
    """

    teaching: tuple[Requests, ...]
    without_events: tuple[Requests, ...]
    validation: Requests
    unlabelled: tuple[Requests, ...]


@dataclass(frozen=True)
class Ranking:
    """Both models and their serving data. sample: real requests on the served catalogue, for parity reports."""

    ranker: Ranker
    reranker: Reranker
    statistics: ItemStatistics
    sample: Requests

    @property
    def items(self) -> ItemSlots:
        """Return the catalogue as it is served."""
        return self.sample.items


@dataclass(frozen=True)
class SavedStage:
    """The result of saving a stage: `settings` of stage.json and the parity report for the manifest."""

    settings: dict
    parity: Parity


def collect_lessons(
    dataset: Dataset,
    log: pd.DataFrame,
    features: Features,
    fit_training_retriever: FitTrainingRetriever,
    settings: RankingSettings,
    rng: np.random.Generator,
) -> Lessons:
    """Build labelled requests from candidates of past retrievers. log: the frame `features` was built from, sorted by time"""
    by_moment, in_visits = make_requests_by_moment(dataset, log, features, fit_training_retriever, settings, rng)
    return Lessons(*hold_out(by_moment, in_visits, settings.ranker.validation_share), ())


def hold_out(
    by_moment: Sequence[Requests], in_visits: Requests | None, share: float
) -> tuple[tuple[Requests, ...], tuple[Requests, ...], Requests]:
    """Return training requests with live events (latest moment first), the same without, and the validation requests.

    by_moment, in_visits: from `make_requests_by_moment`. The requests before visits teach twice, with events and without.
    Validation requests are of the latest moment, and every second one has no events. Their users teach nothing, because
    requests of other moments and of visits ask for the same items.
    """
    latest, validation = split_validation(by_moment[0], share)
    before_visits = (latest, *(drop_validating(requests, validation, share) for requests in by_moment[1:]))
    visits = () if in_visits is None else (drop_validating(in_visits, validation, share),)
    without = tuple(requests.without_events(np.ones(len(requests), bool)) for requests in before_visits)
    before_visits = tuple(replace(requests, eventless=None) for requests in before_visits)  # halves memory
    return (*before_visits, *visits), without, validation.without_events(np.arange(len(validation)) % 2 == 1)


def add_unlabelled(
    lessons: Lessons,
    log: pd.DataFrame,
    features: Features,
    statistics: ItemStatistics,
    served_retriever: Retrieve,
    settings: RankingSettings,
    rng: np.random.Generator,
) -> Lessons:
    """Add unlabelled requests from candidates of the served retriever, where the ranker is distilled from them.

    statistics, served_retriever: fitted on the whole log
    """
    if settings.compression == "none":
        return lessons
    unlabelled = make_unlabelled_requests(features, log, statistics, served_retriever, settings.most_requests, rng)
    return replace(lessons, unlabelled=(unlabelled,))


def fit_ranker(
    lessons: Lessons,
    features: Features,
    settings: RankingSettings,
    seed: int,
    say: Callable[[str], None],
    train: TrainRanker = train_ranker,
    start: Start | None = None,
) -> Ranker:
    """Train the ranker, more teachers if they help, and a smaller ranker, which is returned if it keeps enough quality.

    start: of the smaller ranker, as in `train_ranker`
    """
    once, twice = sum(map(len, lessons.teaching)), sum(map(len, lessons.without_events))
    validating = len(lessons.validation)
    say(f"ranker: {once:,} training requests, {twice:,} of them with and without live events, {validating:,} for validation")
    tables = (dict(features.user_rows), dict(features.item_rows))
    ranker = train(
        lessons.teaching, lessons.validation, tables, settings.ranker, seed, say, without_events=lessons.without_events
    )
    if not ranker.learned or settings.compression == "none":
        return ranker
    teaching = (*lessons.teaching, *lessons.without_events)
    no_teachers = explain_no_teachers(settings, once + twice, int(lessons.validation.taken.any(axis=1).sum()))
    names = () if no_teachers else settings.teachers
    teachers = choose_teachers(ranker, names, teaching, lessons.validation, settings.ranker, seed, say)
    # The student sees requests without events in the unlabelled ones; more of them made its live answers worse.
    lesson = Lesson.of(ranker, [*lessons.teaching, *lessons.unlabelled], lessons.validation, teachers.give_shares)
    smaller = compress(lesson, settings.compression, settings.student, seed, say, start=start)
    return replace(smaller, quality=smaller.quality | teachers.report(), no_teachers=no_teachers)


def explain_no_teachers(settings: RankingSettings, n_requests: int, n_validating: int) -> str:
    """Return why no network is tried as a teacher beside the DLRM, "" where some are. n_validating: with a taken candidate"""
    if not settings.teachers:
        return '[training] teachers = "one"'
    if n_requests > settings.most_taught:
        return f"{n_requests:,} training requests; [training] minutes suffice for {settings.most_taught:,}"
    if n_validating < FEWEST_REQUESTS:
        return f"{n_validating} validation requests with a taken item; expected {FEWEST_REQUESTS} at least"
    return ""


def fit_reranker(
    lessons: Lessons, ranker: Ranker, settings: RerankerSettings, seed: int, say: Callable[[str], None]
) -> Reranker:
    """Train the re-ranker on lists of the latest moment, as the ranker orders them."""
    latest = lessons.teaching[0]
    teaching, validation = (
        Lists.of(part, compute_rank_scores(ranker, part), settings.list_length) for part in (latest, lessons.validation)
    )
    return train_reranker(teaching, validation, join_item_vectors(ranker.model, latest.items), settings, seed, say)


def take_sample(lessons: Lessons, features: Features) -> Requests:
    """Return some validation requests over the catalogue as it is served."""
    validation = lessons.validation
    return replace(validation.take(np.arange(min(len(validation), MOST_SAMPLES))), items=make_served_items(features))


def make_requests_by_moment(
    dataset: Dataset,
    train: pd.DataFrame,
    features: Features,
    fit_training_retriever: FitTrainingRetriever,
    settings: RankingSettings,
    rng: np.random.Generator,
) -> tuple[list[Requests], Requests | None]:
    """Build requests before the last fifth of the events; on small logs repeat this on the rest.

    Each moment has its own retriever and statistics, fitted on the events before it.
    -> (requests of each moment, the latest first; requests in the middle of visits, None where there are none)
    """
    by_moment: list[Requests] = []
    latest = None
    earlier = train
    while len(by_moment) < settings.most_moments and sum(map(len, by_moment)) < settings.enough_requests:
        before, (earlier, later) = earlier, split_training_log(earlier)
        if by_moment and len(earlier) == len(before):
            break  # no user has events on both sides
        items, statistics = (
            make_items_before(dataset, features, earlier),
            fit_item_statistics(features, earlier, settings.statistics),
        )
        retrieve = fit_training_retriever(earlier)
        fitted, clock_s = (items, statistics, retrieve), int(earlier["timestamp"].max())
        by_moment.append(
            make_requests(features, train, keep_known(later, earlier), *fitted, clock_s, settings.most_requests, rng)
        )
        if latest is None and len(earlier) < len(before):
            latest = (later, *fitted)
    if latest is None:
        return by_moment, None
    most = min(settings.most_visit_requests, sum(map(len, by_moment)))
    return by_moment, make_visit_requests(features, train, *latest, most, rng, settings.filter_seen)


def save_ranking(rank_folder: Path, rerank_folder: Path, ranking: Ranking, features: Features) -> tuple[SavedStage, SavedStage]:
    """Write the rank and the rerank stage without rules, `stage.json` and manifests. Return what was saved of each."""
    index, sample = features.items, ranking.sample
    rank = SavedStage(*save_ranker(rank_folder, ranking.ranker, index, ranking.statistics, sample))
    lists = Lists.of(sample, compute_rank_scores(ranking.ranker, sample), ranking.reranker.list_length)
    vectors = join_item_vectors(ranking.ranker.model, ranking.items)
    return rank, SavedStage(*save_reranker(rerank_folder, ranking.reranker, index, vectors, lists))
