"""List the models of a merlin repository: the stage that each is a part of, and the files of that stage that it needs."""

from __future__ import annotations

from dataclasses import dataclass

from export.merlin_settings import MerlinSettings
from serving.contract.tensors import ENSEMBLE, STAGES
from serving.stages.parts.specs import (
    PREPROCESS_FEATURES,
    PREPROCESS_TENSORS,
    PREPROCESS_WORKFLOW,
    RANK_DENSE,
    RANK_EMBEDDINGS,
    RANK_FEATURES,
    RANK_ROWS,
    RANK_SCORES,
    RERANK_LIST,
    RERANK_NETWORK,
    RERANK_RULES,
    RETRIEVE_FEATURES,
    RETRIEVE_SEARCH,
    TOWERS_USER,
)

PYTHON, TENSORRT, HPS, NVTABULAR = "python", "tensorrt", "hps", "nvtabular"
WORKFLOW = "workflow"  # folder of NVTabular's saved workflow, in the version folder of its model


@dataclass(frozen=True)
class Part:
    """One model inside a nested stage. files: patterns in the stage's version folder, besides stage.json."""

    name: str
    stage: str
    kind: str
    files: tuple[str, ...] = ()


PREPROCESS_PARTS = {
    "compiled": (),
    "nvtabular": (
        Part(
            PREPROCESS_FEATURES,
            "preprocess",
            PYTHON,
            ("item_ids.npy", "item_category.npy", "item_updates*", "content/*", "store/*"),
        ),
        Part(PREPROCESS_WORKFLOW, "preprocess", NVTABULAR),
        Part(PREPROCESS_TENSORS, "preprocess", PYTHON),
    ),
}
RETRIEVE_PARTS = (
    Part(RETRIEVE_FEATURES, "retrieve", PYTHON, ("item_ids.npy", "tables/*")),
    Part(TOWERS_USER, "retrieve", TENSORRT, ("user_tower.onnx",)),
    Part(
        RETRIEVE_SEARCH,
        "retrieve",
        PYTHON,
        (
            "item_ids.npy",
            "item_vectors.npy",
            "available.npy",
            "neighbour*.npy",
            "seen*",
            "items.faiss",
            "content/*",
            "rules.json",
        ),
    ),
)
PAIR_FILES = (
    "item_ids.npy",
    "item_rows.npy",
    "item_numbers.npy",
    "neighbour*.npy",
    "popularity*.npy",
    "sold_days.npy",
    "groups.npy",
    "item_statistics.json",
    "user_categories/*",
)
RANK_PARTS = {
    "24.03": (
        Part(RANK_FEATURES, "rank", PYTHON, PAIR_FILES),
        Part(RANK_EMBEDDINGS, "rank", HPS),
        Part(RANK_DENSE, "rank", TENSORRT, ("rank.onnx",)),
        Part(RANK_SCORES, "rank", PYTHON),
    ),
    "modern": (
        Part(RANK_ROWS, "rank", PYTHON, (*PAIR_FILES, "projections.npz", "tables/*")),
        Part(RANK_DENSE, "rank", TENSORRT, ("rank.onnx",)),
        Part(RANK_SCORES, "rank", PYTHON),
    ),
}
RERANK_PARTS = (
    Part(RERANK_LIST, "rerank", PYTHON, ("item_ids.npy", "item_vectors.npy", "rules*")),
    Part(RERANK_NETWORK, "rerank", TENSORRT, ("rerank.onnx",)),
    Part(RERANK_RULES, "rerank", PYTHON, ("item_ids.npy", "rules*")),
)


def list_parts(settings: MerlinSettings) -> tuple[Part, ...]:
    """Return the parts of all stages, in the order in which a request passes them."""
    return (*PREPROCESS_PARTS[settings.preprocess], *RETRIEVE_PARTS, *RANK_PARTS[settings.triton], *RERANK_PARTS)


def list_nested_stages(settings: MerlinSettings) -> tuple[str, ...]:
    """Return the stages that are ensembles. With the compiled plan `preprocess` is the cpu profile's model."""
    return STAGES if PREPROCESS_PARTS[settings.preprocess] else STAGES[1:]


def list_models(settings: MerlinSettings) -> tuple[str, ...]:
    """Return every model of the repository; an ensemble comes after its models."""
    whole = [name for name in STAGES if name not in list_nested_stages(settings)]
    return (*whole, *(part.name for part in list_parts(settings)), *list_nested_stages(settings), ENSEMBLE)


def list_python_models(settings: MerlinSettings) -> tuple[str, ...]:
    """Return the models that run the stages' code."""
    whole = [name for name in STAGES if name not in list_nested_stages(settings)]
    return (*whole, *(part.name for part in list_parts(settings) if part.kind == PYTHON))
