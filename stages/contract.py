"""The contract: axes, tensors and the five models. Everything that names a tensor imports it from here.

Axes: B requests in a batch (never written in a spec: Triton adds it), C candidates, H history, E exclusions, K items returned,
Fu / Gu categorical and continuous columns of the user. Ids are the shop's own int64 ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag

import numpy as np

PAD_ID = -1  # no item here; real item ids are >= 0, which the export checks
FROM_STORE = -2  # whole `history` row: the caller sent none, use the feature store's
MISSING_INT = np.iinfo(np.int64).min  # an integer context value that was not sent

PAD_SCORE = float(np.finfo(np.float32).min)  # beside PAD_ID between stages: below any score, and finite, as JSON knows no other

PAD_ROW, NULL_ROW, OOV_ROW = 0, 1, 2  # reserved rows of every category, as NVTabular 23.8 numbers them

ANY_GENERATION = 0  # as the generation of a request's lineage: not checked (warm-up, profiling of a single stage)

STAGES = ("preprocess", "retrieve", "rank", "rerank")
ENSEMBLE = "recommend"


NUMPY_DTYPES = {  # by Triton's name
    "INT64": np.dtype(np.int64),
    "INT32": np.dtype(np.int32),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "BYTES": np.dtype(np.object_),
}


class Degraded(IntFlag):
    """Bits of the `degraded` output: which stage answered by its fallback."""

    NONE = 0
    PREPROCESS = 1
    RETRIEVE = 2
    RANK = 4
    RERANK = 8


@dataclass(frozen=True)
class Axes:
    """Sizes fixed at export. Read once from `stage.json`, never guessed from an array."""

    candidates: int = 256  # C
    history: int = 64  # H
    exclusions: int = 64  # E
    items_returned: int = 20  # K
    user_categorical: int = 0  # Fu
    user_continuous: int = 0  # Gu


@dataclass(frozen=True)
class TensorSpec:
    """One tensor without its batch axis. `fill` stands in for an optional tensor the caller left out."""

    name: str
    dtype: str  # Triton's name: INT64, INT32, FP32, FP64, BYTES
    dims: tuple[int, ...]
    optional: bool = False
    fill: int | float | bytes | None = None

    @property
    def numpy_dtype(self) -> np.dtype:
        return NUMPY_DTYPES[self.dtype]

    def filled(self, batch: int) -> np.ndarray:
        """[batch, *dims] of the fill value."""
        return np.full((batch, *self.dims), self.fill, self.numpy_dtype)


@dataclass(frozen=True)
class ModelSpec:
    """One model: name, inputs, outputs. Serving settings (batching, instances) live with the exporter."""

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


@dataclass(frozen=True)
class ContextColumn:
    """A column known at request time. kind: "integer" and "string" are categorical, "continuous" is FP32."""

    name: str
    kind: str

    def tensor(self) -> TensorSpec:
        dtype, fill = {"integer": ("INT64", MISSING_INT), "string": ("BYTES", b""), "continuous": ("FP32", float("nan"))}[
            self.kind
        ]
        return TensorSpec(self.name, dtype, (1,), optional=True, fill=fill)


USER_ID = TensorSpec("user_id", "INT64", (1,))
DEGRADED = TensorSpec("degraded", "INT32", (1,))
GENERATION = TensorSpec("generation", "INT64", (1,))
LINEAGE = TensorSpec("lineage", "INT64", (2,))  # handed from stage to stage: the generation, and the Degraded bits so far


def stage_specs(axes: Axes, context: tuple[ContextColumn, ...] = ()) -> dict[str, ModelSpec]:
    """The four stages of the pipeline, in order, keyed by name."""
    exclude = TensorSpec("exclude", "INT64", (axes.exclusions,), optional=True, fill=PAD_ID)
    history = TensorSpec("history", "INT64", (axes.history,), optional=True, fill=FROM_STORE)
    user = (
        TensorSpec("user_categorical", "INT64", (axes.user_categorical,)),
        TensorSpec("user_continuous", "FP32", (axes.user_continuous,)),
        TensorSpec("history_ids", "INT64", (axes.history,)),
    )
    ages = TensorSpec("history_age_days", "FP32", (axes.history,))
    candidates = (
        TensorSpec("candidate_ids", "INT64", (axes.candidates,)),
        TensorSpec("retrieval_scores", "FP32", (axes.candidates,)),
    )
    rank_scores = TensorSpec("rank_scores", "FP32", (axes.candidates,))
    answer = (
        TensorSpec("item_ids", "INT64", (axes.items_returned,)),
        TensorSpec("scores", "FP32", (axes.items_returned,)),
    )
    specs = (
        ModelSpec("preprocess", (USER_ID, *(c.tensor() for c in context), history), (*user, ages, LINEAGE)),
        ModelSpec("retrieve", (USER_ID, *user, exclude, LINEAGE), (*candidates, LINEAGE)),
        ModelSpec("rank", (*user, ages, *candidates, LINEAGE), (rank_scores, LINEAGE)),
        ModelSpec("rerank", (USER_ID, *candidates, rank_scores, LINEAGE), (*answer, DEGRADED, GENERATION)),
    )
    return {spec.name: spec for spec in specs}


def ensemble_spec(stages: dict[str, ModelSpec]) -> ModelSpec:
    """`recommend`: what no stage produces comes in, what the last stage gives goes out."""
    produced = {t.name for spec in stages.values() for t in spec.outputs}
    inputs = {t.name: t for spec in stages.values() for t in spec.inputs if t.name not in produced}
    return ModelSpec(ENSEMBLE, tuple(inputs.values()), stages[STAGES[-1]].outputs)


def new_lineage(batch: int, generation: int, degraded: int = Degraded.NONE) -> np.ndarray:
    """-> int64 [batch, 2]: where requests come from that the first stage of `generation` prepares."""
    return np.tile(np.array([generation, int(degraded)], np.int64), (batch, 1))


def fallen_back(lineage: np.ndarray, rows: np.ndarray, stage: Degraded) -> np.ndarray:
    """int64 [B, 2], bool [B] -> int64 [B, 2]: with the stage's bit where it answered by its fallback."""
    if not rows.any():
        return lineage
    return lineage | np.outer(rows, (0, int(stage)))


def generation_faults(lineage: np.ndarray, own: int) -> dict[int, str]:
    """int64 [B, 2] -> row -> message where a request was prepared by another generation than this stage's."""
    generation = lineage[:, 0]
    foreign = generation != own
    if not foreign.any():
        return {}
    foreign &= generation != ANY_GENERATION
    return {
        int(row): f"generation is {generation[row]}, this stage serves {own}; send requests through the ensemble"
        for row in np.flatnonzero(foreign)
    }
