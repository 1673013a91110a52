"""Keep the weights of the sequence model and of the ranker, so that the next generation starts from them.

    <folder>/earlier.npz   sequence model of the retriever whose candidates teach the ranker: it never saw the log's later part
    <folder>/served.npz    sequence model of the retriever that is served
    <folder>/ranker.npz, student.npz   the ranker's networks (warm_ranker.py)

Rows of the sequence model's table are matched by item id; new items start at random. Nothing is kept of other models. Item-item
neighbours and the graph are computed in closed form. Towers start from the factors of the neighbours, which already know the
newest events; from the weights before they find less.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch

from serving.contract.errors import ArtifactError
from training.models.candidates.sequence import SequenceModel, SequenceShape

EARLIER, SERVED = "earlier", "served"
ITEM_IDS, GENERATIONS, TABLE = "item ids", "generations", "table.weight"


def write_learned(folder: Path, item_ids: np.ndarray, models: Mapping[str, SequenceModel | None], generations: int) -> None:
    """Write the weights of sequence models into an empty or new folder.

    item_ids: int64 [n_items] ascending; models: by EARLIER and SERVED, None where a retriever has none
    generations: how many learned from one another so far
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, model in models.items():
        if model is not None:
            arrays = {key: value.numpy() for key, value in model.state_dict().items()}
            write_weights(folder, name, {**arrays, ITEM_IDS: item_ids}, generations)


def write_weights(folder: Path, name: str, arrays: Mapping[str, np.ndarray], generations: int) -> None:
    """Write the weights of one model, and how many generations learned from one another so far, into an existing folder."""
    numbers: dict[str, Any] = {**arrays, GENERATIONS: np.int64(generations)}
    np.savez(folder / f"{name}.npz", **numbers)


def count_generations(folder: Path) -> int:
    """Return how many generations have learned from one another; 0 without kept weights. Raises ArtifactError."""
    paths = sorted(folder.glob("*.npz"))
    return int(read_weights(paths[0])[GENERATIONS]) if paths else 0


def read_learned(folder: Path, name: str, item_ids: np.ndarray, shape: SequenceShape) -> SequenceModel | None:
    """Return a model with the kept weights; None where none are kept, or of another shape.

    item_ids: int64 [n_items] ascending, of the log to learn from. Raises ArtifactError for a file that cannot be read.
    """
    path = folder / f"{name}.npz"
    if not path.exists():
        return None
    kept_weights = read_weights(path, ITEM_IDS, TABLE)
    model = SequenceModel(len(item_ids), shape)
    weights = {key: value for key, value in model.state_dict().items() if key != TABLE}
    if any(key not in kept_weights or kept_weights[key].shape != tuple(value.shape) for key, value in weights.items()):
        return None
    is_known = np.isin(item_ids, kept_weights[ITEM_IDS])
    rows = np.searchsorted(kept_weights[ITEM_IDS], item_ids[is_known])
    with torch.no_grad():
        model.load_state_dict({key: torch.from_numpy(kept_weights[key]) for key in weights}, strict=False)
        model.table.weight[:-1][torch.from_numpy(is_known)] = torch.from_numpy(kept_weights[TABLE][rows])
    return model


def read_weights(path: Path, *required: str) -> dict[str, np.ndarray]:
    """Return the arrays of a file that `write_weights` wrote. Raises ArtifactError, also where one of `required` is missing."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            weights = dict(arrays)
        if missing := {GENERATIONS, *required} - weights.keys():
            raise ValueError(f"it has no {', '.join(sorted(missing))}")
        return weights
    except (OSError, ValueError, EOFError, BadZipFile) as error:
        raise ArtifactError(
            f"{path} cannot be read: {error}. Remove {path.parent}: the next generation learns from scratch."
        ) from error
