"""Define the names and tensors of the parts of a stage, without the batch axis.

Axes as in serving/contract/tensors.py, and Gp numbers of a (user, candidate) pair, Si item tables, W width of table rows,
M length of the re-ranked list, S = Fu + C * Si table rows per request.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serving.contract.artifacts import StageInfo, make_stage_settings
from serving.contract.tensors import USER_ID, ModelSpec, TensorSpec, make_stage_specs

PREPROCESS_FEATURES, PREPROCESS_WORKFLOW, PREPROCESS_TENSORS = (
    "preprocess_features",
    "preprocess_workflow",
    "preprocess_tensors",
)
RETRIEVE_FEATURES, TOWERS_USER, RETRIEVE_SEARCH = "retrieve_features", "towers_user", "retrieve_search"
RANK_FEATURES, RANK_ROWS, RANK_EMBEDDINGS, RANK_DENSE, RANK_SCORES = (
    "rank_features",
    "rank_rows",
    "rank_embeddings",
    "rank_dense",
    "rank_scores",
)
RERANK_LIST, RERANK_NETWORK, RERANK_RULES = "rerank_list", "rerank_network", "rerank_rules"

KEYS, NUMKEYS, HPS_OUTPUT = "KEYS", "NUMKEYS", "OUTPUT0"  # the hps backend's own names
FREE = -1  # in Triton's dims: any size


@dataclass(frozen=True)
class Sizes:
    """Sizes beyond the axes of the contract, read from the settings of a part."""

    pair_numbers: int  # Gp
    item_tables: int  # Si
    row_width: int  # W
    history_width: int  # of one history vector
    user_embeddings: int  # width of a user's concatenated table rows in the tower
    user_vector: int  # width of the user tower's output
    list_length: int  # M
    item_vector: int  # of one item in the re-ranker
    list_features: int


@dataclass(frozen=True)
class WorkflowColumns:
    """Inputs and outputs of NVTabular's user workflow.

    raw, encoded: input or output column -> Triton type
    categorical: column -> offset from NVTabular's number to the category row, in the order of user_categorical
    continuous: columns in the order of user_continuous
    """

    raw: dict[str, str] = field(default_factory=dict)
    encoded: dict[str, str] = field(default_factory=dict)
    categorical: dict[str, int] = field(default_factory=dict)
    continuous: tuple[str, ...] = ()


@dataclass(frozen=True)
class PartSettings:
    """`settings` of a part's stage.json.

    stage: settings of the whole stage; first_keys: table -> its first key in HPS; columns: fields of WorkflowColumns
    gpu: number of the GPU that the repository was exported for
    """

    name: str
    sizes: dict[str, int]
    stage: dict[str, Any] = field(default_factory=dict)
    first_keys: dict[str, int] = field(default_factory=dict)
    columns: dict[str, Any] = field(default_factory=dict)
    gpu: int = 0

    @classmethod
    def of(cls, folder: Path, info: StageInfo) -> PartSettings:
        return make_stage_settings(folder, info, cls)


def make_part_specs(info: StageInfo, sizes: Sizes) -> dict[str, ModelSpec]:
    """Return the specs of all parts but `rank_embeddings`, by name, with our own tables; for HPS see `put_behind_hps`."""
    stages = make_stage_specs(info.axes, info.context)
    known = {
        t.name: t for spec in stages.values() for t in (*spec.input_fields, *spec.output_fields, *spec.inputs, *spec.outputs)
    }
    for tensor in _list_inner_tensors(info, sizes):
        known[tensor.name] = tensor

    def make_spec(name: str, inputs: str, outputs: str) -> ModelSpec:
        return ModelSpec(name, *(tuple(known[tensor] for tensor in side.split()) for side in (inputs, outputs)))

    numbers = "user_numbers pair_numbers retrieval_part lineage"
    specs = (
        make_spec(RETRIEVE_FEATURES, "user", "history_vectors history_weights user_embeddings user_continuous"),
        make_spec(TOWERS_USER, "history_vectors history_weights user_embeddings user_continuous", "user_vectors"),
        make_spec(RETRIEVE_SEARCH, "user exclude category among user_vectors", "candidates"),
        make_spec(RANK_FEATURES, "user candidates", f"{KEYS} {NUMKEYS} {numbers}"),
        make_spec(RANK_ROWS, "user candidates", f"user_rows item_rows {numbers}"),
        make_spec(RANK_DENSE, "user_numbers user_rows pair_numbers item_rows", "logits"),
        make_spec(RANK_SCORES, "user candidates logits retrieval_part lineage", "ranked"),
        make_spec(RERANK_LIST, "ranked", "features vectors valid"),
        make_spec(RERANK_NETWORK, "features vectors valid", "correction"),
        make_spec(RERANK_RULES, "ranked correction", "item_ids scores degraded generation propensities sources stage_ms"),
    )
    return {spec.name: spec for spec in specs}


def _list_inner_tensors(info: StageInfo, sizes: Sizes) -> tuple[TensorSpec, ...]:
    """Return the tensors between the parts of a stage."""
    axes = info.axes
    candidates, listed = axes.candidates, min(sizes.list_length, axes.candidates)
    return (
        TensorSpec("history_vectors", "FP32", (axes.history, sizes.history_width)),
        TensorSpec("history_weights", "FP32", (axes.history,)),
        TensorSpec("user_embeddings", "FP32", (sizes.user_embeddings,)),
        TensorSpec("user_vectors", "FP32", (sizes.user_vector,)),
        TensorSpec(KEYS, "INT64", (FREE,)),
        TensorSpec(NUMKEYS, "INT32", (FREE,)),
        TensorSpec("user_numbers", "FP32", (axes.user_continuous,)),
        TensorSpec("user_rows", "FP32", (axes.user_categorical, sizes.row_width)),
        TensorSpec("item_rows", "FP32", (candidates, sizes.item_tables, sizes.row_width)),
        TensorSpec("pair_numbers", "FP32", (candidates, sizes.pair_numbers)),
        TensorSpec("retrieval_part", "FP32", (candidates,)),
        TensorSpec("logits", "FP32", (candidates,)),
        TensorSpec("features", "FP32", (listed, sizes.list_features)),
        TensorSpec("vectors", "FP32", (listed, sizes.item_vector)),
        TensorSpec("valid", "FP32", (listed,)),
        TensorSpec("correction", "FP32", (listed,)),
    )


def count_keys_per_request(info: StageInfo, sizes: Sizes) -> int:
    """Return S, the table rows per request: the user's, and those of all candidates."""
    return info.axes.user_categorical + info.axes.candidates * sizes.item_tables


def build_all_specs(info: StageInfo, sizes: Sizes, hps: bool) -> dict[str, ModelSpec]:
    """Return the specs of every part by name. hps: whether the `hps` backend serves the tables, as `rank_embeddings`"""
    specs = make_part_specs(info, sizes)
    if hps:
        keys, numkeys = (TensorSpec(name, dtype, (FREE, FREE)) for name, dtype in ((KEYS, "INT64"), (NUMKEYS, "INT32")))
        specs[RANK_EMBEDDINGS] = ModelSpec(RANK_EMBEDDINGS, (keys, numkeys), (TensorSpec(HPS_OUTPUT, "FP32", (FREE,)),))
        specs[RANK_DENSE] = put_behind_hps(specs[RANK_DENSE])
    return specs


def put_behind_hps(dense: ModelSpec) -> ModelSpec:
    """Return the spec of `rank_dense` behind the `hps` backend, whose output is flat and has no batch axis.

    So the dims include the batch axis B. `embeddings` is [B * S * W]; all other tensors begin with B.
    """
    inputs = [TensorSpec(t.name, t.dtype, (FREE, *t.dims)) for t in dense.inputs if t.name not in ("user_rows", "item_rows")]
    outputs = tuple(TensorSpec(t.name, t.dtype, (FREE, *t.dims)) for t in dense.outputs)
    return ModelSpec(dense.name, (*inputs, TensorSpec("embeddings", "FP32", (FREE,))), outputs)


def make_preprocess_specs(info: StageInfo, columns: WorkflowColumns) -> dict[str, ModelSpec]:
    """Return the specs of the parts of preprocess with NVTabular itself, by name.

    NVTabular's model may use one name for a raw and an encoded column, so between the parts they have prefixes.
    """
    stage = make_stage_specs(info.axes, info.context)["preprocess"]
    known = {tensor.name: tensor for tensor in stage.output_fields}
    raw, encoded = (
        {name: TensorSpec(side(name), dtype, (1,)) for name, dtype in types.items()}
        for side, types in ((name_raw_tensor, columns.raw), (name_encoded_tensor, columns.encoded))
    )
    bare = (tuple(TensorSpec(name, t.dtype, t.dims) for name, t in types.items()) for types in (raw, encoded))
    passed = tuple(known[name] for name in ("history_ids", "history_age_days", "history_interests", "lineage"))
    specs = (
        ModelSpec(PREPROCESS_FEATURES, stage.inputs, (*raw.values(), *passed)),
        ModelSpec(PREPROCESS_WORKFLOW, *bare),
        ModelSpec(PREPROCESS_TENSORS, (USER_ID, *encoded.values(), *passed), stage.outputs),
    )
    return {spec.name: spec for spec in specs}


def name_raw_tensor(column: str) -> str:
    """Return the name of a raw column's tensor between the parts of preprocess."""
    return f"raw_{column}"


def name_encoded_tensor(column: str) -> str:
    """Return the name of an encoded column's tensor between the parts of preprocess."""
    return f"encoded_{column}"
