"""Define the contract: axes, tensors and models. Every module that names a tensor imports it from here.

Axes: B requests in a batch (never part of a spec, because Triton adds it), C candidates, H history, E exclusions, K items
returned, Fu / Gu categorical and continuous columns of the user. Ids are the shop's own int64 ids.

    recommend's inputs ─▶ preprocess ─[user]─▶ retrieve ─[candidates]─▶ rank ─[ranked]─▶ rerank ─▶ recommend's outputs

Between two stages passes one tensor, a record, whose rows hold several fields side by side: each further tensor would cost
Triton far more than its bytes. Stages see the fields; the adapter (serving/stages/adapter/triton.py) packs and unpacks records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from functools import cached_property
from itertools import chain

import numpy as np

from serving.contract.errors import RecommenderError

PAD_ID = -1  # no item; the export checks that real item ids are >= 0
FROM_STORE = -2  # fills a row of `history` when the caller sent none: use the feature store's history
FIRST_USER_ID = -(1 << 62)  # ids below it belong to sessions of visitors without a user id
MISSING_INT = np.iinfo(np.int64).min  # an integer context value that was not sent
PROBE_USER_ID = MISSING_INT + 1  # asks whether the server answers; counted in no measurement of the shop's requests

# Score of PAD_ID between stages: below any real score, and finite, because inf - inf is NaN.
PAD_SCORE = float(np.finfo(np.float32).min)

PAD_ROW, NULL_ROW, OOV_ROW = 0, 1, 2  # reserved rows of every category, as NVTabular 23.8 numbers them

# Bit of a lineage beside those of Degraded, for rank: the request names a category or items to choose from. rerank removes it.
NARROWED = 1 << 16

ANY_GENERATION = 0  # generation of a lineage that is not checked (warm-up, profiling of a single stage)

RECORD = "record_"  # prefix of the parameter in config.pbtxt that states a record's fields

STAGES = ("preprocess", "retrieve", "rank", "rerank")
ENSEMBLE = "recommend"
CHALLENGER = "challenger"  # the model of another generation of `recommend` while an experiment runs
OBSERVE, UPSERT = LIVE_MODELS = ("observe", "upsert")  # record an interaction; add or change an item or user
NO_SEQUENCE = -1  # as `after`: the answer need not reflect any event


NUMPY_DTYPES: dict[str, np.dtype] = {  # by Triton's name
    "INT64": np.dtype(np.int64),
    "INT32": np.dtype(np.int32),
    "FP32": np.dtype(np.float32),
    "FP64": np.dtype(np.float64),
    "UINT8": np.dtype(np.uint8),
    "BYTES": np.dtype(np.object_),
}


class Degraded(IntFlag):
    """Bits of the `degraded` output: the stages that answered with their fallback."""

    NONE = 0
    PREPROCESS = 1
    RETRIEVE = 2
    RANK = 4
    RERANK = 8
    LIVE = 16  # live state is behind the event that the caller named in `after`, or cannot be read


class Sources(IntFlag):
    """Bits of the `sources` output: the terms of the retrieval score that propose an item (docs/models.md)."""

    NONE = 0
    SEQUENCE = 1
    GRAPH = 2
    TWO_TOWER = 4
    BOUGHT_TOGETHER = 8  # with items of the history, by the item-item neighbours
    LIVE_SALES = 16  # sold since the export, for users without a history
    LIVE_PAIRS = 32  # bought together with an item of the history since the export
    NEW_ITEMS = 64  # upserted since the export
    POPULAR = 128  # sold more than the mean item, or one of the gateway's own popular items


@dataclass(frozen=True)
class Axes:
    """Sizes fixed at export, read from `stage.json`."""

    candidates: int = 256  # C
    history: int = 64  # H
    exclusions: int = 64  # E
    items_returned: int = 20  # K
    user_categorical: int = 0  # Fu
    user_continuous: int = 0  # Gu


@dataclass(frozen=True)
class TensorSpec:
    """One tensor without its batch axis. fill: the value of an optional tensor that the caller left out"""

    name: str
    dtype: str  # Triton's name: a key of NUMPY_DTYPES
    dims: tuple[int, ...]
    optional: bool = False
    fill: int | float | bytes | None = None

    @property
    def numpy_dtype(self) -> np.dtype:
        return NUMPY_DTYPES[self.dtype]

    @property
    def text(self) -> str:
        """Name, type and dims for messages."""
        return f"{self.name} {self.dtype} {list(self.dims)}"

    def fits(self, values: np.ndarray, batch: int) -> bool:
        """Return whether an array has this dtype and the shape [batch, *dims]."""
        return values.dtype == self.numpy_dtype and values.shape == (batch, *self.dims)

    def make_filled(self, batch: int) -> np.ndarray:
        """Return an array [batch, *dims] of the fill value, or of zeros or empty texts for a required tensor."""
        fill = (b"" if self.dtype == "BYTES" else 0) if self.fill is None else self.fill
        return np.full((batch, *self.dims), fill, self.numpy_dtype)


@dataclass(frozen=True)
class RecordSpec(TensorSpec):
    """Several tensors, the fields, packed into one tensor of bytes, UINT8 [n], each field aligned for its type.

    config.pbtxt states the fields in the parameter `record_<name>`, which is compared with stage.json when a model loads.
    """

    fields: tuple[TensorSpec, ...] = ()

    @property
    def text(self) -> str:
        return f"{super().text} ({self.stated_fields})"

    @property
    def parameter(self) -> str:
        """Name of the parameter in config.pbtxt that states the fields."""
        return f"{RECORD}{self.name}"

    @property
    def stated_fields(self) -> str:
        """The fields as that parameter states them."""
        return "; ".join(field.text for field in self.fields)

    @cached_property
    def layout(self) -> np.dtype:
        """The numpy structure of one row."""
        return make_row_layout(self.fields)

    def pack(self, tensors: Mapping[str, np.ndarray], validated: bool = False) -> np.ndarray:
        """Return tensors by name, each [B, *dims], as one uint8 [B, n]. Raises RecommenderError when dtype or shape differ.

        Without the check NumPy would silently broadcast or cast. validated: skip the check
        """
        batch = len(tensors[self.fields[0].name])
        rows = np.zeros(batch, self.layout)  # zeros, so that the padding between fields is deterministic
        for field in self.fields:
            values = tensors[field.name]
            if not (validated or field.fits(values, batch)):
                raise RecommenderError(
                    f"{field.name} of the record {self.name} is {values.dtype} {values.shape}; the contract says {field.dtype} "
                    f"{(batch, *field.dims)}."
                )
            rows[field.name] = values
        return rows.view(np.uint8).reshape(batch, -1)

    def unpack(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        """Return the fields of uint8 [B, n] by name, each [B, *dims]."""
        rows = packed.view(self.layout)[:, 0]
        if not rows.flags.aligned:  # compiled loops would be compiled again for unaligned arrays
            rows = rows.copy()
        return {field.name: np.ascontiguousarray(rows[field.name]) for field in self.fields}


def make_row_layout(fields: tuple[TensorSpec, ...]) -> np.dtype:
    """Return the NumPy structure of one row, padded so that every row of a batch is aligned."""
    return np.dtype([(field.name, field.numpy_dtype, field.dims) for field in fields], align=True)


def make_record(name: str, *fields: TensorSpec) -> RecordSpec:
    """Return the spec of a record with these fields."""
    return RecordSpec(name, "UINT8", (make_row_layout(fields).itemsize,), fields=fields)


def expand_records(tensors: tuple[TensorSpec, ...]) -> tuple[TensorSpec, ...]:
    """Return the tensors with records replaced by their fields, each name once."""
    fields = chain.from_iterable(t.fields if isinstance(t, RecordSpec) else (t,) for t in tensors)
    return tuple({field.name: field for field in fields}.values())


@dataclass(frozen=True)
class ModelSpec:
    """One model: name, inputs, outputs. Serving settings (batching, instances) belong to the export.

    inputs, outputs: the tensors on the wire; input_fields, output_fields: the same with records unpacked, as a stage sees them
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]

    @cached_property
    def input_fields(self) -> tuple[TensorSpec, ...]:
        return expand_records(self.inputs)

    @cached_property
    def output_fields(self) -> tuple[TensorSpec, ...]:
        return expand_records(self.outputs)

    @property
    def records(self) -> tuple[RecordSpec, ...]:
        return tuple(tensor for tensor in (*self.inputs, *self.outputs) if isinstance(tensor, RecordSpec))

    def fill_optional(self, batch: int) -> dict[str, np.ndarray]:
        """Return the optional inputs of requests that leave them out, each [batch, *dims]."""
        return {tensor.name: tensor.make_filled(batch) for tensor in self.inputs if tensor.optional}


def pack_records(
    specs: tuple[TensorSpec, ...], tensors: Mapping[str, np.ndarray], validated: bool = False
) -> dict[str, np.ndarray]:
    """Return the tensors of `specs` by name, packed from their fields. validated: as in `RecordSpec.pack`."""
    return {t.name: t.pack(tensors, validated) if isinstance(t, RecordSpec) else tensors[t.name] for t in specs}


def unpack_records(specs: tuple[TensorSpec, ...], tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return the tensors of `specs` by name, records unpacked. A field that two records hold comes from the later one."""
    fields: dict[str, np.ndarray] = {}
    for tensor in specs:
        fields |= tensor.unpack(tensors[tensor.name]) if isinstance(tensor, RecordSpec) else {tensor.name: tensors[tensor.name]}
    return fields


@dataclass(frozen=True)
class ContextColumn:
    """A column known at request time. kind: "integer" or "string" (categorical), or "continuous" (FP32)."""

    name: str
    kind: str

    @property
    def tensor(self) -> TensorSpec:
        """The spec of the column's optional input tensor."""
        kinds: dict[str, tuple[str, int | float | bytes]] = {
            "integer": ("INT64", MISSING_INT),
            "string": ("BYTES", b""),
            "continuous": ("FP32", float("nan")),
        }
        dtype, fill = kinds[self.kind]
        return TensorSpec(self.name, dtype, (1,), optional=True, fill=fill)


USER_ID = TensorSpec("user_id", "INT64", (1,))
DEGRADED = TensorSpec("degraded", "INT32", (1,))
GENERATION = TensorSpec("generation", "INT64", (1,))
STAGE_MS = TensorSpec("stage_ms", "FP32", (len(STAGES),))  # from the end of the stage before; 0 unless the caller asked for it
# Passed from stage to stage: the generation; the Degraded bits so far; and the monotonic microseconds when the first stage
# began and when each stage ended, 0 unless the caller asked for timings.
LINEAGE = TensorSpec("lineage", "INT64", (2 + 1 + len(STAGES),))
BEGAN = 2  # column of a lineage; those of the stages' ends follow


def make_stage_specs(axes: Axes, context: tuple[ContextColumn, ...] = ()) -> dict[str, ModelSpec]:
    """Return the specs of the four stages by name, in order. context: the data set's context columns"""
    after = TensorSpec("after", "INT64", (1,), optional=True, fill=NO_SEQUENCE)
    exclude = TensorSpec("exclude", "INT64", (axes.exclusions,), optional=True, fill=PAD_ID)
    category = TensorSpec("category", "BYTES", (1,), optional=True, fill=b"")  # the whole catalogue
    among = TensorSpec("among", "INT64", (axes.candidates,), optional=True, fill=PAD_ID)  # likewise
    history = TensorSpec("history", "INT64", (axes.history,), optional=True, fill=FROM_STORE)
    user = make_record(
        "user",
        USER_ID,
        TensorSpec("user_categorical", "INT64", (axes.user_categorical,)),
        TensorSpec("user_continuous", "FP32", (axes.user_continuous,)),
        TensorSpec("history_ids", "INT64", (axes.history,)),
        TensorSpec("history_age_days", "FP32", (axes.history,)),
        TensorSpec("history_interests", "INT64", (1,)),
        LINEAGE,
    )
    ids, scores, rank_scores = (
        TensorSpec(name, dtype, (axes.candidates,))
        for name, dtype in (("candidate_ids", "INT64"), ("retrieval_scores", "FP32"), ("rank_scores", "FP32"))
    )
    sources = TensorSpec("candidate_sources", "UINT8", (axes.candidates,))
    pairs = (TensorSpec(name, "FP32", (axes.candidates,)) for name in ("taken_together", "taken_with_latest"))
    candidates = make_record("candidates", ids, scores, sources, *pairs, LINEAGE)
    ranked = make_record("ranked", USER_ID, ids, scores, sources, rank_scores, LINEAGE)
    answer = (
        TensorSpec("item_ids", "INT64", (axes.items_returned,)),
        TensorSpec("scores", "FP32", (axes.items_returned,)),
        DEGRADED,
        GENERATION,
        TensorSpec("propensities", "FP32", (axes.items_returned,)),
        TensorSpec("sources", "INT32", (axes.items_returned,)),
        STAGE_MS,
    )
    specs = (
        ModelSpec("preprocess", (USER_ID, *(c.tensor for c in context), history, after), (user,)),
        ModelSpec("retrieve", (user, exclude, category, among), (candidates,)),
        ModelSpec("rank", (user, candidates), (ranked,)),
        ModelSpec("rerank", (ranked,), answer),
    )
    return {spec.name: spec for spec in specs}


def make_live_specs(context: tuple[TensorSpec, ...] = ()) -> dict[str, ModelSpec]:
    """Return the specs of `observe` and `upsert` by name. context: the tensors of the context columns."""
    sequence = (TensorSpec("sequence", "INT64", (1,)),)
    event = (
        USER_ID,
        TensorSpec("item_id", "INT64", (1,)),
        TensorSpec("event", "BYTES", (1,), optional=True, fill=b""),
        TensorSpec("timestamp_ms", "INT64", (1,), optional=True, fill=MISSING_INT),
        TensorSpec("value", "FP32", (1,), optional=True, fill=float("nan")),
        TensorSpec("event_id", "BYTES", (1,), optional=True, fill=b""),
        TensorSpec("request_id", "BYTES", (1,), optional=True, fill=b""),
        *context,
    )
    change = (TensorSpec("kind", "BYTES", (1,)), TensorSpec("id", "INT64", (1,)), TensorSpec("columns", "BYTES", (1,)))
    return {OBSERVE: ModelSpec(OBSERVE, event, sequence), UPSERT: ModelSpec(UPSERT, change, sequence)}


def make_ensemble_spec(stages: dict[str, ModelSpec]) -> ModelSpec:
    """Return the spec of `recommend`: the inputs that no stage produces, and the outputs of the last stage."""
    produced = {t.name for spec in stages.values() for t in spec.outputs}
    inputs = {t.name: t for spec in stages.values() for t in spec.inputs if t.name not in produced}
    return ModelSpec(ENSEMBLE, tuple(inputs.values()), stages[STAGES[-1]].outputs)


def new_lineage(batch: int, generation: int, degraded: int | np.ndarray = Degraded.NONE) -> np.ndarray:
    """Return the initial lineage of a batch, int64 [batch, 7]: generation and degraded bits, without timings.

    degraded: bits for all rows, or int64 [batch]
    """
    lineage = np.zeros((batch, *LINEAGE.dims), np.int64)
    lineage[:, 0], lineage[:, 1] = generation, degraded
    return lineage


def mark_degraded(lineage: np.ndarray, rows: np.ndarray, stage: int) -> np.ndarray:
    """Return the lineage, int64 [B, 7], with a bit set in the rows that are True in `rows`, bool [B].

    stage: a bit of Degraded, or NARROWED
    """
    if not np.count_nonzero(rows):  # five times as fast as `any`, in every stage of every batch
        return lineage
    marked = lineage.copy()
    marked[rows, 1] |= int(stage)
    return marked


def mark_end(lineage: np.ndarray, stage: str, began_us: int, ended_us: int) -> np.ndarray:
    """Return the lineage, int64 [B, 7], with the monotonic microseconds of a stage's end, and of the first stage's begin.

    began_us: 0 if the lineage has it, or nobody timed it
    """
    marked, place = lineage.copy(), STAGES.index(stage)
    if place == 0 and began_us:
        marked[:, BEGAN] = began_us
    marked[:, BEGAN + 1 + place] = ended_us
    return marked


def compute_stage_ms(lineage: np.ndarray) -> np.ndarray:
    """Return STAGE_MS, float32 [B, 4], of a lineage, int64 [B, 7]. A stage is 0 if it or the one before was not timed."""
    times_us = lineage[:, BEGAN:]
    return np.where((times_us[:, 1:] == 0) | (times_us[:, :-1] == 0), 0.0, np.diff(times_us) / 1_000).astype(np.float32)


def find_generation_faults(lineage: np.ndarray, stage_generation: int) -> dict[int, str]:
    """Return a message for each row of the lineage, int64 [B, 7], whose generation is not the stage's, by row."""
    generations = lineage[:, 0].tolist()
    return {
        row: f"generation is {generation}, this stage serves {stage_generation}; send requests through the ensemble"
        for row, generation in enumerate(generations)
        if generation not in (stage_generation, ANY_GENERATION)
    }
