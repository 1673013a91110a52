"""Notice a log that lost most of its events, has ids of another kind, or is another shop's, before it replaces a generation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from repository.registry import read_manifest
from serving.contract.errors import ArtifactError, ConfigError, ExportError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from training.dataset import Dataset
from training.dataset.ids import parse_integers

LEAST_SHARE = 0.5  # of the events that the pinned generation learned from


def refuse_lost_log(dataset: Dataset, repository: Path) -> None:
    """Raise ExportError where a log of the same name has less than half of the events that the pinned generation learned from.

    Such a log is usually a file that was cut off, and its generation would silently replace a good one.
    """
    generation, manifest = _read_pinned(dataset, repository)
    learned, events = manifest.get("log", {}).get("events", 0), len(dataset.interactions)
    if events < LEAST_SHARE * learned:
        raise ExportError(
            f"The log of {dataset.description.name} has {events:,} events; generation {generation} of {repository} learned "
            f"from {learned:,}, and at least {LEAST_SHARE:.0%} of them are expected. Is a file cut off, or incomplete? If the "
            "log is shorter on purpose, export it into another repository (make export REPO=…), and serve that one."
        )


def refuse_other_ids(dataset: Dataset, repository: Path) -> None:
    """Raise ExportError where ids were integers in the pinned generation of a data set of the same name, and now are text.

    A single mistyped id is enough. Every id on the wire would change: callers would name users and items that do not exist, and
    live events, sold-out items and changed prices would count for nobody. The same holds for text that became integers.
    """
    generation, manifest = _read_pinned(dataset, repository)
    if not manifest:
        return
    for kind, names in (("item", dataset.item_names), ("user", dataset.user_names)):
        was_text = (repository / ENSEMBLE / str(generation) / f"{kind}_names.json").is_file()
        if was_text == (names is not None):
            continue
        fact = "integers now, and were text" if names is None else f"text now, such as {_find_text(names)!r}, and were integers"
        raise ExportError(
            f"The {kind} ids of {dataset.description.name} are {fact} in generation {generation} of {repository}. Callers and "
            "live events would name ids that no longer exist. Correct the ids in the files of the data set. If they changed on "
            "purpose, export into another repository (make export REPO=…), and serve that one."
        )


def describe_other_shop(dataset: Dataset, repository: Path) -> str:
    """Return a warning if the pinned generation is of a data set of another name, "" otherwise: REPO may be mistaken."""
    generation, manifest = _read_pinned_of_any(repository)
    if not manifest or (pinned_name := manifest["dataset"]["name"]) == (name := dataset.description.name):
        return ""
    return (
        f"generation {generation} of {repository} is of the data set {pinned_name!r}. The new one will be of {name!r}, and a "
        "server that starts will serve it, without the live events of the other. Is REPO right? Ctrl-C ends this export"
    )


def _find_text(names: pd.DataFrame) -> str:
    """Return the name that makes all ids text; the first one if each is an integer, but together they are not."""
    return next((name for name in names["name"] if parse_integers([name]) is None), names["name"].iloc[0])


def _read_pinned(dataset: Dataset, repository: Path) -> tuple[int, dict[str, Any]]:
    """Return the pinned generation of a data set of the same name, and its manifest, {} where there is none."""
    generation, manifest = _read_pinned_of_any(repository)
    is_same = bool(manifest) and manifest["dataset"]["name"] == dataset.description.name
    return (generation, manifest) if is_same else (0, {})


def _read_pinned_of_any(repository: Path) -> tuple[int, dict[str, Any]]:
    """Return the pinned generation, and its manifest with the name of its data set, {} where there is none.

    A damaged or older generation says nothing about the log, and a new export is what mends it.
    """
    if not (repository / ENSEMBLE).is_dir():
        return 0, {}
    try:
        generation = read_pinned_generation(repository)
        manifest = read_manifest(repository, generation)
        str(manifest["dataset"]["name"])
    except (ArtifactError, ConfigError, KeyError, TypeError):
        return 0, {}
    return generation, manifest
