"""The tensors that real requests feed to each network of a repository: what ranges are taken from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort

from export.repository.recorded import RECORDED_FILE, read_recorded
from stages.artifacts import read_stage, stage_folder
from stages.contract import ENSEMBLE, STAGES, stage_specs
from stages.generations import pinned_generation
from stages.pipeline import STAGE_TYPES, Pipeline

Arrays = dict[str, np.ndarray]

NETWORKS = {"retrieve": "user_tower", "rank": "rank", "rerank": "rerank"}  # stage -> its network
REQUESTS, REQUESTS_PER_BATCH = 256, 8


@dataclass
class Recorder:
    """Stands in for an ONNX Runtime session and keeps what it is fed."""

    session: Any
    fed: list[Arrays]

    def run(self, outputs: list[str], feeds: Arrays) -> list[np.ndarray]:
        self.fed.append({name: np.array(values) for name, values in feeds.items()})
        return self.session.run(outputs, feeds)


def with_networks(pipeline: Pipeline, networks: Mapping[str, Any]) -> Pipeline:
    """-> the pipeline with some stages' networks replaced by other sessions."""
    return replace(
        pipeline,
        stages=pipeline.stages | {stage: replace(pipeline.stages[stage], network=own) for stage, own in networks.items()},
    )


def stage_folders(repository: Path) -> dict[str, Path]:
    """-> version folders of every stage and of `recommend`, of the generation a server answers with."""
    generation = pinned_generation(repository)
    return {stage: stage_folder(repository, stage, generation) for stage in STAGES} | {
        ENSEMBLE: repository / ENSEMBLE / str(generation)
    }


def recorded_feeds(folders: Mapping[str, Path], requests: int = REQUESTS) -> dict[str, list[Arrays]]:
    """folders: as `stage_folders` gives them; requests: how many of the recorded ones.

    -> per stage the tensors that its network saw, one entry per batch; the re-ranker's also with short lists
    """
    kernels = {stage: STAGE_TYPES[stage].load(folders[stage]) for stage in STAGES}
    info = read_stage(folders[STAGES[0]])
    recorders = {stage: Recorder(kernels[stage].network, []) for stage in NETWORKS}
    recording = with_networks(Pipeline(info, kernels, stage_specs(info.axes, info.context)), recorders)
    recorded = read_recorded(folders[ENSEMBLE] / RECORDED_FILE).inputs
    for start in range(0, min(requests, len(recorded["user_id"])), REQUESTS_PER_BATCH):
        recording({name: values[start : start + REQUESTS_PER_BATCH] for name, values in recorded.items()})
    fed = {stage: recorder.fed for stage, recorder in recorders.items()}
    return fed | {"rerank": [*fed["rerank"], *map(shortened, fed["rerank"])]}


def shortened(feed: Arrays) -> Arrays:
    """-> lists of the re-ranker of which only the first half is there: what few recorded requests need, and every user may."""
    places = feed["valid"].shape[1]
    there = (np.arange(places) < places // 2).astype(np.float32)
    return {name: values * there.reshape(1, -1, *[1] * (values.ndim - 2)) for name, values in feed.items()}


def largest_values(model: onnx.ModelProto, feeds: list[Arrays]) -> dict[str, float]:
    """-> the largest magnitude that every float tensor of the graph took: inputs, weights and everything between."""
    watched = onnx.ModelProto()
    watched.CopyFrom(onnx.shape_inference.infer_shapes(model))
    known = {value.name for value in watched.graph.output}
    floats = [v for v in watched.graph.value_info if v.type.tensor_type.elem_type == onnx.TensorProto.FLOAT]
    watched.graph.output.extend(value for value in floats if value.name not in known)
    session = ort.InferenceSession(watched.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    largest = {w.name: _magnitude(onnx.numpy_helper.to_array(w)) for w in model.graph.initializer}
    for feed in feeds:
        for name, values in (feed | dict(zip(names, session.run(names, feed), strict=True))).items():
            largest[name] = max(largest.get(name, 0.0), _magnitude(values))
    return largest


def _magnitude(values: np.ndarray) -> float:
    return float(np.abs(values).max(initial=0.0)) if values.dtype.kind == "f" else 0.0
