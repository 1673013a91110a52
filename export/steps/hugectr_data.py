"""Write the data from which HugeCTR trains a ranker: the features and requests that an export trains its own ranker on."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from export.nvidia.hugectr.inputs import list_inputs
from export.nvidia.hugectr.training_data import write_training_data
from export.progress import Progress
from export.settings import Settings
from export.steps.training_settings import choose_retrieval_settings, find_cluster
from training.dataset import Dataset
from training.features.build import build_features
from training.features.schema import FeatureSettings
from training.models.ranking import RankingSettings, hold_out, make_requests_by_moment
from training.retrieval.fit import fit_training_retriever


def write_hugectr_data(dataset: Dataset, folder: Path, settings: Settings, console: Console) -> dict[str, int]:
    """Write the training data into `folder`. Return its number of rows by part, `train` and `validation`.

    Features and keys are those of an export of the same log and settings.
    """
    progress, pipeline, choices = Progress(console), settings.pipeline, RankingSettings()
    chosen, cluster = FeatureSettings(history_length=pipeline.history), find_cluster(settings.dask)
    features = build_features(dataset, dataset.interactions, chosen, pipeline.seed, cluster=cluster, say=progress.note_detail)
    rng = np.random.default_rng(pipeline.seed)
    fit_past = partial(fit_training_retriever, dataset, features, choose_retrieval_settings(pipeline), progress.note_detail)
    by_moment, in_visits = make_requests_by_moment(dataset, dataset.interactions, features, fit_past, choices, rng)
    teaching, without_events, validation = hold_out(by_moment, in_visits, choices.ranker.validation_share)
    teaching += without_events
    rows = write_training_data(folder, teaching, validation, list_inputs(features), choices.ranker, rng)
    progress.note(f"{rows['train']:,} rows to train on and {rows['validation']:,} to validate, in {folder}")
    return rows
