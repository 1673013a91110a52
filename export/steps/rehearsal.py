"""Rehearse before publication: the staged files must answer recorded requests alike, alone and in batches."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import numpy as np

from repository.checks.recorded import RECORDED_FILE, Recorded, compare_answers
from repository.publish import Staging
from repository.triton.config import WARMUP_ROWS
from serving.contract.errors import ExportError
from serving.contract.tensors import ANY_GENERATION, ENSEMBLE, OOV_ROW, PAD_ID, new_lineage
from serving.pipeline import Pipeline
from training.dataset import Dataset

BATCH = 32

Arrays = dict[str, np.ndarray]


def rehearse(staging: Staging, dataset: Dataset, requests: Arrays) -> tuple[Recorded, dict[str, Any]]:
    """Answer requests, check the answers, and record both beside the ensemble. Return them and a report.

    Raises ExportError on an invalid answer.
    """
    recorded = record(staging, requests)
    refuse_unsound(recorded.outputs, dataset.items["item_id"].to_numpy())
    full = (recorded.outputs["item_ids"] != PAD_ID).all(axis=1)
    return recorded, {
        "requests": len(full),
        "full_lists": float(full.mean()),
        "degraded": int((recorded.outputs["degraded"] != 0).sum()),
    }


def record(staging: Staging, inputs: Arrays) -> Recorded:
    """Answer requests from the staged files and return both. Raises ExportError when an answer depends on its batch."""
    with closing(Pipeline.load(staging.root, staging.generation, as_exported=True)) as pipeline:
        outputs, alone = answer(pipeline, inputs, BATCH), answer(pipeline, inputs, 1)
    if difference := compare_answers(alone, outputs):
        raise ExportError(
            f"A request is answered differently alone and in a batch of {BATCH}: {difference}. Report this as a bug."
        )
    recorded = Recorded(inputs, outputs)
    recorded.write(staging.folder(ENSEMBLE) / RECORDED_FILE)
    return recorded


def answer(pipeline: Pipeline, inputs: Arrays, batch: int) -> Arrays:
    """Return the outputs of all rows, `batch` at a time."""
    count = len(inputs["user_id"])
    parts = [pipeline({n: v[start : start + batch] for n, v in inputs.items()}) for start in range(0, count, batch)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def refuse_unsound(outputs: Arrays, item_ids: np.ndarray) -> None:
    """Raise ExportError unless every list has distinct items of the catalogue, int64 [n_items], with finite scores."""
    ids, is_served = outputs["item_ids"], outputs["item_ids"] != PAD_ID
    if not np.isin(ids[is_served], item_ids).all():
        raise ExportError("An answer names an item that is not in the catalogue. Report this as a bug.")
    if not np.isfinite(outputs["scores"][is_served]).all():
        raise ExportError("An answer has a score that is not finite: training diverged. Check continuous columns for extremes.")
    ordered = np.sort(np.where(is_served, ids, -np.arange(1, ids.shape[1] + 1)), axis=1)
    if (ordered[:, 1:] == ordered[:, :-1]).any():
        raise ExportError("An answer names an item twice. Report this as a bug.")


def make_warmup_tensors(staging: Staging, recorded: Recorded) -> Arrays:
    """Return all tensors of all stages for a few recorded requests by name, [WARMUP_ROWS, *dims], valid in any generation."""
    with closing(Pipeline.load(staging.root, staging.generation, as_exported=True)) as pipeline:
        tensors = pipeline.trace({name: values[:WARMUP_ROWS] for name, values in recorded.inputs.items()})
    return tensors | {
        # A repository keeps the warm-up of its first generation, and later ones may have fewer categories.
        "user_categorical": np.minimum(tensors["user_categorical"], OOV_ROW),
        "lineage": new_lineage(len(tensors["lineage"]), ANY_GENERATION),
    }
