"""The pipeline that merlin-systems 23.8 exports: features, networks with random weights, and the graph in its variants.

Widths are those of the reference (shared by all variants). Axes: N rows, F categorical and G continuous columns, D = 16 the
width of an embedding.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd
from onnx import TensorProto

from experiments import merlin_operators as operators
from repository.triton.config import set_instances
from repository.triton.models import read_config, write_config
from serving.contract.errors import DataError
from training.dataset import Dataset
from training.features.quiet_nvtabular import Dataset as NvtDataset
from training.features.quiet_nvtabular import Workflow, ops
from training.models.onnx_graph import Graph


@dataclass(frozen=True)
class Side:
    """One side's columns. frame: the ids ascending, int64 codes (0 = missing), float32 numbers with gaps (NaN)."""

    id: str
    categorical: tuple[str, ...]  # without the id, which is categorical too
    continuous: tuple[str, ...]
    frame: pd.DataFrame

    @property
    def encoded(self) -> tuple[str, ...]:
        """Columns that NVTabular gives integers to: a table of embeddings each."""
        return (self.id, *self.categorical)

    @property
    def raw_id(self) -> str:
        return f"{self.id}_raw"


def read_sides(dataset: Dataset) -> tuple[Side, Side]:
    """Return users and items. Synthetic data have 5 + 6 categorical columns with the ids and 3 + 2 continuous ones.

    Raises DataError for a data set that lacks numbers of users or of items, which the graph of Merlin needs.
    """
    users, items = dataset.description.users, dataset.description.items
    if not (users and users.continuous and items and items.continuous):
        raise DataError(
            f"{dataset.description.name} has no continuous columns of users, or none of items; the graph of Merlin needs both. "
            "Take another data set, such as synthetic:reference."
        )
    return (
        find_side("user_id", tuple(users.categorical), tuple(users.continuous), dataset.users),
        find_side("item_id", tuple(items.categorical), tuple(items.continuous), dataset.items),
    )


def find_side(id: str, categorical: tuple[str, ...], continuous: tuple[str, ...], frame: pd.DataFrame) -> Side:
    frame = frame.sort_values(id, ignore_index=True)
    columns = {id: frame[id].to_numpy(np.int64)}
    columns |= {name: pd.factorize(frame[name])[0].astype(np.int64) + 1 for name in categorical}
    columns |= {name: frame[name].to_numpy(np.float32) for name in continuous}
    return Side(id, categorical, continuous, pd.DataFrame(columns))


def fit_workflow(side: Side, folder: Path) -> Workflow:
    """Fit Categorify per categorical column; FillMissing, LogOp, Normalize per number; the raw id is kept beside its code.

    folder: where Categorify keeps its vocabularies; must live as long as the workflow
    """
    output = list(side.encoded) >> ops.Categorify(out_path=str(folder))
    output += list(side.continuous) >> ops.FillMissing() >> ops.LogOp() >> ops.Normalize(out_dtype=np.float32)
    output += [side.id] >> ops.Rename(name=side.raw_id)
    workflow = Workflow(output)
    workflow.fit(NvtDataset(side.frame, cpu=True))
    return workflow


def encode(side: Side, workflow: Workflow) -> dict[str, np.ndarray]:
    """Transform every row; return int64 codes, float32 numbers and the raw ids by column, each [N]."""
    frame = workflow.transform(NvtDataset(side.frame, cpu=True)).to_ddf().compute()
    columns = {name: frame[name].to_numpy(np.int64) for name in (*side.encoded, side.raw_id)}
    return columns | {name: frame[name].to_numpy(np.float32) for name in side.continuous}


EMBEDDING_WIDTH = 16
TOWER_HIDDEN, VECTOR_WIDTH = 128, 64
BOTTOM_HIDDEN = 64
TOP_HIDDEN = (128, 64)
CODES, NUMBERS = "codes", "numbers"  # inputs of both: int64 [N, F], float32 [N, G]
VECTORS, SCORES = "vectors", "scores"


class RandomGraph(Graph):
    """An ONNX graph with random weights."""

    def __init__(self, rng: np.random.Generator) -> None:
        super().__init__()
        self.rng = rng

    def add_normal(self, name: str, *shape: int) -> str:
        return self.add_constant(name, (self.rng.normal(size=shape) / shape[0] ** 0.5).astype(np.float32))

    def add_rows(self, cardinalities: Sequence[int]) -> str:
        """Add the look-up of all tables, stored one after another in one array: float32 [N, F, D]."""
        starts = np.concatenate([[0], np.cumsum(cardinalities)])
        tables = self.rng.normal(size=(starts[-1], EMBEDDING_WIDTH)).astype(np.float32)
        positions = self.add("Add", (CODES, self.add_constant("starts", starts[:-1].astype(np.int64))), "rows_at")
        return self.add("Gather", (self.add_constant("tables", tables), positions), "rows", axis=0)

    def add_layers(self, name: str, source: str, widths: Sequence[int], last_relu: bool) -> str:
        for number, (width, next_width) in enumerate(pairwise(widths)):
            layer = f"{name}_{number}"
            biases = self.add_constant(f"{layer}_bias", np.zeros(next_width, np.float32))
            source = self.add("Gemm", (source, self.add_normal(f"{layer}_weight", width, next_width), biases), layer)
            if number < len(widths) - 2 or last_relu:
                source = self.add("Relu", (source,), f"{layer}_relu")
        return source

    def write(self, path: Path, n_codes: int, n_numbers: int, output: str, width: int) -> None:
        inputs = {CODES: (TensorProto.INT64, ("N", n_codes)), NUMBERS: (TensorProto.FLOAT, ("N", n_numbers))}
        self.save(path, inputs, {output: (TensorProto.FLOAT, ("N", width))})


def write_tower(path: Path, cardinalities: Sequence[int], n_numbers: int, rng: np.random.Generator) -> None:
    """Write a network F * 16 + G -> 128 -> 64. cardinalities: rows of each table, one per categorical column."""
    builder, n_codes = RandomGraph(rng), len(cardinalities)
    flat = builder.add("Flatten", (builder.add_rows(cardinalities),), "flat_rows", axis=1)
    joined = builder.add("Concat", (flat, NUMBERS), "joined", axis=1)
    widths = (n_codes * EMBEDDING_WIDTH + n_numbers, TOWER_HIDDEN, VECTOR_WIDTH)
    vectors = builder.add_layers("tower", joined, widths, last_relu=False)
    builder.add("Identity", (vectors,), VECTORS)
    builder.write(path, n_codes, n_numbers, VECTORS, VECTOR_WIDTH)


def write_dlrm(path: Path, cardinalities: Sequence[int], n_numbers: int, rng: np.random.Generator) -> None:
    """Write a network: bottom G-64-16; dots of the F + 1 vectors; top (dots + 16)-128-64-1 -> scores [N, 1]."""
    builder, n_codes = RandomGraph(rng), len(cardinalities)
    bottom = builder.add_layers("bottom", NUMBERS, (n_numbers, BOTTOM_HIDDEN, EMBEDDING_WIDTH), last_relu=True)
    own_row = builder.add("Unsqueeze", (bottom, builder.add_constant("axis_1", np.array([1], np.int64))), "bottom_row")
    vectors = builder.add("Concat", (own_row, builder.add_rows(cardinalities)), "dlrm_vectors", axis=1)
    turned = builder.add("Transpose", (vectors,), "turned", perm=[0, 2, 1])
    square = builder.add("Flatten", (builder.add("MatMul", (vectors, turned), "products"),), "flat_products", axis=1)
    pairs = list_pair_positions(n_codes + 1)
    dots = builder.add("Gather", (square, builder.add_constant("pairs", pairs)), "dots", axis=1)
    joined = builder.add("Concat", (bottom, dots), "top_input", axis=1)
    scores = builder.add_layers("top", joined, (EMBEDDING_WIDTH + len(pairs), *TOP_HIDDEN, 1), last_relu=False)
    builder.add("Identity", (scores,), SCORES)
    builder.write(path, n_codes, n_numbers, SCORES, 1)


def list_pair_positions(n_vectors: int) -> np.ndarray:
    """Return int64 [n * (n - 1) / 2]: positions of each pair's dot in the flattened matrix of all dots."""
    rows, columns = np.tril_indices(n_vectors, k=-1)
    return (rows * n_vectors + columns).astype(np.int64)


MODEL = "executor_model"  # merlin-systems' name for the model that runs the graph
TOP_K = 10
ONCE = Path(__file__).with_name("merlin_once.py")
ONCE_MODEL = '''"""merlin-systems' executor, each node of the graph evaluated once per request."""
import merlin.dag.runtime
from merlin_once import OnceExecutor

merlin.dag.runtime.LocalExecutor = OnceExecutor
from merlin.systems.triton.models.executor_model import TritonPythonModel  # noqa
'''

cloudpickle.register_pickle_by_value(operators)


@dataclass(frozen=True)
class Variant:
    """nvtabular: features are encoded while serving, or were before; once: each node is evaluated once per request."""

    name: str
    nvtabular: bool
    once: bool
    instances: int  # of every model


VARIANTS = (
    Variant("as exported", nvtabular=True, once=False, instances=1),
    Variant("hardened", nvtabular=True, once=True, instances=1),
    Variant("hardened, 2 instances", nvtabular=True, once=True, instances=2),
    Variant("best possible", nvtabular=False, once=True, instances=2),
)


@dataclass(frozen=True)
class Parts:
    """Artifacts of all variants, in one folder: fitted workflows, tables of raw and encoded features, index, networks."""

    folder: Path
    users: Side
    items: Side
    workflows: dict[str, Workflow]  # by id column
    candidates: int

    @classmethod
    def make(cls, folder: Path, users: Side, items: Side, candidates: int, rng: np.random.Generator) -> Parts:
        folder.mkdir(parents=True)
        workflows: dict[str, Workflow] = {}
        cardinalities: dict[str, int] = {}
        for side in (users, items):
            workflows[side.id] = fit_workflow(side, folder / f"vocabulary-{side.id}")
            encoded = encode(side, workflows[side.id])
            cardinalities |= {name: int(encoded[name].max()) + 1 for name in side.encoded}
            np.savez(folder / f"{side.id}-raw.npz", **{name: side.frame[name].to_numpy() for name in side.frame})
            # the encoded table is looked up by the raw id as well: its code has another name
            np.savez(folder / f"{side.id}-encoded.npz", **encoded)
        write_tower(folder / "tower.onnx", [cardinalities[name] for name in users.encoded], len(users.continuous), rng)
        n_numbers = len(users.continuous) + len(items.continuous)
        write_dlrm(folder / "dlrm.onnx", list(cardinalities.values()), n_numbers, rng)
        write_index(folder / "items.faiss", items, rng)
        return cls(folder, users, items, workflows, candidates)


def write_index(path: Path, items: Side, rng: np.random.Generator) -> None:
    """Write merlin-systems' own index (IVF32,Flat, 8 lists searched) over random vectors."""
    from merlin.systems.dag.ops.faiss import setup_faiss

    vectors = rng.normal(size=(len(items.frame), VECTOR_WIDTH)).astype(np.float32)
    setup_faiss(pd.DataFrame({"item_id": items.frame[items.id], "embedding": list(vectors)}), str(path))


def new_ensemble(parts: Parts, nvtabular: bool):
    """Return a merlin.systems.dag.Ensemble: user_id -> item_ids [1, TOP_K], scores [1, TOP_K]."""
    from merlin.schema import ColumnSchema, Schema
    from merlin.systems.dag.ensemble import Ensemble
    from merlin.systems.dag.ops.faiss import QueryFaiss
    from merlin.systems.dag.ops.unroll_features import UnrollFeatures

    users, items = parts.users, parts.items
    user_features = look_up_features(parts, users, ["user_id"], nvtabular)
    tower = operators.Network(parts.folder / "tower.onnx", users.encoded, users.continuous, VECTORS, VECTOR_WIDTH)
    retrieval = user_features >> tower >> QueryFaiss(parts.folder / "items.faiss", topk=parts.candidates)
    item_features = look_up_features(parts, items, retrieval["candidate_ids"], nvtabular)
    unrolled = user_features[[*users.encoded, *users.continuous]]
    combined = item_features >> UnrollFeatures(items.id, unrolled)
    codes, numbers = (*users.encoded, *items.encoded), (*users.continuous, *items.continuous)
    ranking = combined >> operators.Network(parts.folder / "dlrm.onnx", codes, numbers, SCORES, 1)
    best = combined[items.raw_id] >> operators.BestItems(ranking[SCORES], TOP_K)
    return Ensemble(best, Schema([ColumnSchema("user_id", dtype=np.int64)]))


def look_up_features(parts: Parts, side: Side, ids, nvtabular: bool):
    """Return a node with the encoded features of `ids`: encoded by NVTabular while serving, or beforehand."""
    from merlin.systems.dag.ops.workflow import TransformWorkflow

    if not nvtabular:
        dtypes = dict.fromkeys((side.raw_id, *side.encoded), "int64") | dict.fromkeys(side.continuous, "float32")
        return ids >> operators.QueryTable(parts.folder / f"{side.id}-encoded.npz", side.raw_id, dtypes)
    dtypes = dict.fromkeys(side.encoded, "int64") | dict.fromkeys(side.continuous, "float32")
    raw = ids >> operators.QueryTable(parts.folder / f"{side.id}-raw.npz", side.id, dtypes)
    return raw >> TransformWorkflow(parts.workflows[side.id])


def export_variant(parts: Parts, variant: Variant, repository: Path) -> None:
    """Write one variant's model repository: merlin-systems' own export, then the variant's edits."""
    new_ensemble(parts, variant.nvtabular).export(str(repository))
    if variant.once:
        version = repository / MODEL / "1"
        shutil.copy2(ONCE, version)
        (version / "model.py").write_text(ONCE_MODEL)
    for path in repository.glob("*/config.pbtxt"):
        config = read_config(path)
        set_instances(config, variant.instances)
        write_config(path, config)
