"""The pipeline as merlin-systems 23.8 exports it, in the variants that are measured."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import numpy as np
import pandas as pd

from experiments.merlin import networks, operators
from experiments.merlin.features import Side, encode, fit_workflow
from repository.config import set_instances
from repository.models import read_config, write_config
from training.features.quiet_nvtabular import Workflow  # first: it imports Merlin's packages without their remarks

MODEL = "executor_model"  # merlin-systems' name for the model that runs the graph
TOP_K = 10
ONCE = Path(__file__).with_name("once.py")
ONCE_MODEL = '''"""merlin-systems' executor, each node of the graph evaluated once per request."""
import merlin.dag.runtime
from once import OnceExecutor

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
    """What all variants share, in one folder: fitted workflows, tables of raw and of encoded features, index, networks."""

    folder: Path
    users: Side
    items: Side
    workflows: dict[str, Workflow]  # by id column
    candidates: int

    @classmethod
    def make(cls, folder: Path, users: Side, items: Side, candidates: int, rng: np.random.Generator) -> Parts:
        folder.mkdir(parents=True)
        workflows, cardinalities = {}, {}
        for side in (users, items):
            workflows[side.id] = fit_workflow(side, folder / f"vocabulary-{side.id}")
            encoded = encode(side, workflows[side.id])
            cardinalities |= {name: int(encoded[name].max()) + 1 for name in side.encoded}
            np.savez(folder / f"{side.id}-raw.npz", **{name: side.frame[name].to_numpy() for name in side.frame})
            # in the encoded table, too, the raw id is what is looked up: its code stands beside it under another name
            np.savez(folder / f"{side.id}-encoded.npz", **encoded)
        networks.write_tower(folder / "tower.onnx", [cardinalities[name] for name in users.encoded], len(users.continuous), rng)
        n_numbers = len(users.continuous) + len(items.continuous)
        networks.write_dlrm(folder / "dlrm.onnx", list(cardinalities.values()), n_numbers, rng)
        _write_index(folder / "items.faiss", items, rng)
        return cls(folder, users, items, workflows, candidates)


def _write_index(path: Path, items: Side, rng: np.random.Generator) -> None:
    """merlin-systems' own index, IVF32,Flat searched in 8 lists, over random vectors."""
    from merlin.systems.dag.ops.faiss import setup_faiss

    vectors = rng.normal(size=(len(items.frame), networks.VECTOR_WIDTH)).astype(np.float32)
    setup_faiss(pd.DataFrame({"item_id": items.frame[items.id], "embedding": list(vectors)}), str(path))


def new_ensemble(parts: Parts, nvtabular: bool):
    """-> merlin.systems.dag.Ensemble: user_id -> item_ids [1, TOP_K], scores [1, TOP_K]."""
    from merlin.schema import ColumnSchema, Schema
    from merlin.systems.dag.ensemble import Ensemble
    from merlin.systems.dag.ops.faiss import QueryFaiss
    from merlin.systems.dag.ops.unroll_features import UnrollFeatures

    users, items = parts.users, parts.items
    user_features = _features(parts, users, ["user_id"], nvtabular)
    tower = operators.Network(
        parts.folder / "tower.onnx", users.encoded, users.continuous, networks.VECTORS, networks.VECTOR_WIDTH
    )
    retrieval = user_features >> tower >> QueryFaiss(parts.folder / "items.faiss", topk=parts.candidates)
    item_features = _features(parts, items, retrieval["candidate_ids"], nvtabular)
    unrolled = user_features[[*users.encoded, *users.continuous]]
    combined = item_features >> UnrollFeatures(items.id, unrolled)
    codes, numbers = (*users.encoded, *items.encoded), (*users.continuous, *items.continuous)
    ranking = combined >> operators.Network(parts.folder / "dlrm.onnx", codes, numbers, networks.SCORES, 1)
    best = combined[items.raw_id] >> operators.BestItems(ranking[networks.SCORES], TOP_K)
    return Ensemble(best, Schema([ColumnSchema("user_id", dtype=np.int64)]))


def _features(parts: Parts, side: Side, ids, nvtabular: bool):
    """-> a node with the encoded features of `ids`: raw ones through NVTabular, or those encoded beforehand."""
    from merlin.systems.dag.ops.workflow import TransformWorkflow

    if not nvtabular:
        dtypes = dict.fromkeys((side.raw_id, *side.encoded), "int64") | dict.fromkeys(side.continuous, "float32")
        return ids >> operators.QueryTable(parts.folder / f"{side.id}-encoded.npz", side.raw_id, dtypes)
    dtypes = dict.fromkeys(side.encoded, "int64") | dict.fromkeys(side.continuous, "float32")
    raw = ids >> operators.QueryTable(parts.folder / f"{side.id}-raw.npz", side.id, dtypes)
    return raw >> TransformWorkflow(parts.workflows[side.id])


def export_variant(parts: Parts, variant: Variant, repository: Path) -> None:
    """Write the model repository of one variant; NVIDIA's own export, then the edits the variant stands for."""
    new_ensemble(parts, variant.nvtabular).export(str(repository))
    if variant.once:
        version = repository / MODEL / "1"
        shutil.copy2(ONCE, version)
        (version / "model.py").write_text(ONCE_MODEL)
    for path in repository.glob("*/config.pbtxt"):
        config = read_config(path)
        set_instances(config, variant.instances)
        write_config(path, config)
