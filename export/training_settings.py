"""Derive the settings of training from those of an export and the size of its log."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

from export.nvidia.hugectr.ranker import import_ranker
from export.settings import TAUGHT_WIDTH, DaskSettings, PipelineSettings, Settings
from training.features.build import Features
from training.features.cluster import Cluster
from training.models.distill import STUDENT
from training.models.graph import GraphSettings
from training.models.ranking import RankingSettings, TrainRanker
from training.models.reranker import RerankerSettings
from training.models.sequence import SequenceShape
from training.models.teachers import NETWORKS
from training.models.train_ranker import RankerSettings, Start, train_ranker
from training.models.train_sequence import SequenceSettings
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


def choose_graph_settings(settings: Settings, n_positives: int) -> GraphSettings | None:
    """Return how to fit the graph model on trial; None where it is switched off, or the log is too large for the minutes."""
    training = settings.training
    if training.graph == "never" or n_positives > training.minutes * EVENTS_PER_MINUTE:
        return None
    return GraphSettings()


def choose_sequence_settings(settings: Settings, n_positives: int) -> SequenceSettings | None:
    """Return how to train the sequence model on trial; None where it is off, the log too small, or the minutes too few."""
    pipeline, training = settings.pipeline, settings.training
    most_events = int(training.minutes * SEQUENCE_SHARE * EVENTS_PER_MINUTE)
    if training.sequence == "never" or pipeline.history < 2 or not FEWEST_EVENTS <= n_positives <= most_events / FEWEST_EPOCHS:
        return None
    return SequenceSettings(SequenceShape(length=min(pipeline.history, MOST_READ)), most_events=most_events)


def choose_ranking_settings(settings: Settings) -> RankingSettings:
    pipeline = settings.pipeline
    width, compressed = settings.table_width, settings.compression != "none"
    return RankingSettings(
        ranker=RankerSettings(width=max(width, TAUGHT_WIDTH) if compressed else width),
        compression=settings.compression,
        student=replace(STUDENT, width=width),
        teachers=tuple(NETWORKS) if settings.training.teachers == "auto" else (),
        most_taught=int(settings.training.minutes * TAUGHT_PER_MINUTE),
        reranker=RerankerSettings(list_length=max(pipeline.items_returned, min(100, pipeline.candidates))),
    )


def choose_trainer(settings: Settings, features: Features, start: Start | None) -> TrainRanker:
    """Return the function that trains the ranker, or imports a model that HugeCTR trained. start: as of `train_ranker`"""
    if not settings.hugectr.model:
        return partial(train_ranker, start=start)
    return import_ranker(Path(settings.hugectr.model), settings.hugectr.name, features)
