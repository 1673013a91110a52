"""Derive the settings of training from those of an export and the size of its log."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

from export.nvidia.hugectr.ranker import import_ranker
from export.settings import TAUGHT_WIDTH, DaskSettings, PipelineSettings, Settings
from serving.stages.features.ids import MOST_NEWCOMERS
from training.features.build import Features
from training.features.cluster import Cluster
from training.models.candidates.graph import GraphSettings
from training.models.candidates.sequence import SequenceShape
from training.models.candidates.train_sequence import SequenceSettings
from training.models.rankers.reranker import RerankerSettings
from training.models.rankers.teachers import NETWORKS
from training.models.rankers.train_ranker import RankerSettings, Start, train_ranker
from training.models.ranking import RankingSettings, TrainRanker
from training.models.student.distill import STUDENT
from training.retrieval.fit import RetrievalSettings

EVENTS_PER_MINUTE = 500_000  # from which the sequence model learns in a minute on two cores
SEQUENCE_SHARE = 0.2  # of the minutes, for the sequence model
TAUGHT_PER_MINUTE = 300  # training requests from which two more teachers learn in a quarter of the minutes
FEWEST_EVENTS, FEWEST_EPOCHS = 20_000, 3  # with fewer, the sequence model learns nothing useful
MOST_READ = 50  # latest events of a history that the sequence model reads


def find_cluster(settings: DaskSettings) -> Cluster | None:
    """Return the Dask cluster that fits NVTabular; None where this process fits it."""
    return Cluster(settings.scheduler, Path(settings.folder)) if settings.scheduler else None


def choose_retrieval_settings(
    pipeline: PipelineSettings, sequence: SequenceSettings | None = None, graph: GraphSettings | None = None
) -> RetrievalSettings:
    return RetrievalSettings(pipeline.candidates, pipeline.filter_seen, pipeline.seed, sequence, graph=graph)


def explain_no_graph(settings: Settings, n_positives: int) -> str:
    """Return why no graph model is tried, "" where one is."""
    if settings.training.graph == "never":
        return '[training] graph = "never"'
    if n_positives > settings.training.minutes * EVENTS_PER_MINUTE:
        return explain_too_large(n_positives, n_positives / EVENTS_PER_MINUTE)
    return ""


def choose_sequence_settings(settings: Settings, n_positives: int) -> SequenceSettings | None:
    """Return how to train the sequence model on trial; None where `explain_no_sequence` says why not."""
    if explain_no_sequence(settings, n_positives):
        return None
    shape = SequenceShape(length=min(settings.pipeline.history, MOST_READ))
    return SequenceSettings(shape, most_events=count_sequence_events(settings))


def explain_no_sequence(settings: Settings, n_positives: int) -> str:
    """Return why no sequence model is tried, "" where one is."""
    if settings.training.sequence == "never":
        return '[training] sequence = "never"'
    if settings.pipeline.history < 2:
        return f"it needs [pipeline] history = 2 at least, not {settings.pipeline.history}"
    if n_positives < FEWEST_EVENTS:
        return f"{n_positives:,} positive events; it needs {FEWEST_EVENTS:,}"
    if n_positives > count_sequence_events(settings) / FEWEST_EPOCHS:
        return explain_too_large(n_positives, n_positives * FEWEST_EPOCHS / SEQUENCE_SHARE / EVENTS_PER_MINUTE)
    return ""


def count_sequence_events(settings: Settings) -> int:
    """Return from how many events a sequence model may learn, repeats counted."""
    return int(settings.training.minutes * SEQUENCE_SHARE * EVENTS_PER_MINUTE)


def explain_too_large(n_positives: int, minutes: float) -> str:
    """Return what a log needs that is too large for the minutes that it has."""
    return f"{n_positives:,} positive events need [training] minutes = {math.ceil(minutes)}"


def choose_ranking_settings(settings: Settings) -> RankingSettings:
    pipeline = settings.pipeline
    width, compressed = settings.table_width, settings.compression != "none"
    return RankingSettings(
        ranker=RankerSettings(width=max(width, TAUGHT_WIDTH) if compressed else width),
        compression=settings.compression,
        student=replace(STUDENT, width=width),
        teachers=tuple(NETWORKS) if settings.training.teachers == "auto" else (),
        most_taught=int(settings.training.minutes * TAUGHT_PER_MINUTE),
        reranker=RerankerSettings(list_length=min(pipeline.candidates, max(100, pipeline.items_returned + MOST_NEWCOMERS))),
        filter_seen=pipeline.filter_seen,
    )


def choose_trainer(settings: Settings, features: Features, start: Start | None) -> TrainRanker:
    """Return the function that trains the ranker, or imports a model that HugeCTR trained. start: as in `train_ranker`"""
    if not settings.hugectr.model:
        return partial(train_ranker, start=start)
    return import_ranker(Path(settings.hugectr.model), settings.hugectr.name, features)
