"""Publish the distributions of the features that requests have, so that serving notices when they change."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from serving.contract.distributions import write_references
from serving.stages.features.drift import WINDOW_ROWS
from serving.stages.preprocess import Preprocess
from trials.drift import bound_psi, describe_categories, describe_numbers


def write_feature_references(preprocess: Path, requests: dict[str, np.ndarray]) -> None:
    """Write references.json into the staged stage's folder. requests: the inputs of the ensemble, each [R, *dims]."""
    stage = Preprocess.load(preprocess)
    outputs = stage({tensor.name: requests[tensor.name] for tensor in stage.info.spec.inputs})
    categories = [column.name for column in stage.plan.categorical]
    numbers = [column.name for column in stage.plan.continuous]
    references = [
        *(describe_categories(name, outputs["user_categorical"][:, place]) for place, name in enumerate(categories)),
        *(describe_numbers(name, outputs["user_continuous"][:, place]) for place, name in enumerate(numbers)),
    ]
    write_references(preprocess, bound_psi(references, WINDOW_ROWS))
