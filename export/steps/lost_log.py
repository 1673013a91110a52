"""Notice a log that lost most of its events since the last export, before its generation takes over."""

from __future__ import annotations

from pathlib import Path

from repository.registry import read_manifest
from serving.contract.errors import ArtifactError, ConfigError, ExportError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from training.dataset import Dataset

LEAST_SHARE = 0.5  # of the events that the pinned generation learned from


def refuse_lost_log(dataset: Dataset, repository: Path) -> None:
    """Raise ExportError where a log of the same name has less than half of the events that the pinned generation learned from.

    Such a log is usually a file that was cut off, and its generation would silently replace a good one.
    """
    if not (repository / ENSEMBLE).is_dir():
        return
    try:
        generation = read_pinned_generation(repository)
        manifest = read_manifest(repository, generation)
        name, learned = manifest["dataset"]["name"], manifest["log"]["events"]
    except (ArtifactError, ConfigError, KeyError):
        return  # a damaged or older generation says nothing about the log, and a new export replaces it
    events = len(dataset.interactions)
    if name == dataset.description.name and events < LEAST_SHARE * learned:
        raise ExportError(
            f"The log of {name} has {events:,} events; generation {generation} of {repository} learned from {learned:,}, and "
            f"at least {LEAST_SHARE:.0%} of them are expected. Is a file cut off, or incomplete? If the log is shorter on "
            "purpose, export it into another repository (make export REPO=…), and serve that one."
        )
