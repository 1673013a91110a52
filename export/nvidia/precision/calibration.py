"""Record the inputs of each network under recorded requests: quantisation ranges and errors are measured on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import find_stage_folder, open_network, read_stage
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, STAGES, make_stage_specs
from serving.pipeline import STAGE_TYPES, Pipeline

Arrays = dict[str, np.ndarray]

NETWORKS = {"retrieve": "user_tower", "rank": "rank", "rerank": "rerank"}  # stage -> its network


@dataclass
class Recorder:
    """An ONNX Runtime session that also keeps the inputs of each run."""

    session: Any
    fed: list[Arrays]

    def run(self, outputs: list[str], feeds: Arrays) -> list[np.ndarray]:
        self.fed.append({name: np.array(values) for name, values in feeds.items()})
        return self.session.run(outputs, feeds)


def replace_networks(pipeline: Pipeline, networks: Mapping[str, Any]) -> Pipeline:
    """Return the pipeline with other sessions in place of some stages' networks."""
    return replace(
        pipeline,
        stages=pipeline.stages
        | {stage: replace(pipeline.stages[stage], network=session) for stage, session in networks.items()},
    )


def find_stage_folders(repository: Path) -> dict[str, Path]:
    """Return the version folders of every stage and of `recommend`, of the generation that a server answers with."""
    generation = read_pinned_generation(repository)
    return {stage: find_stage_folder(repository, stage, generation) for stage in STAGES} | {
        ENSEMBLE: repository / ENSEMBLE / str(generation)
    }


def open_pipeline(folders: Mapping[str, Path]) -> Pipeline:
    """Return the pipeline of a generation, published or only staged, with all its networks.

    folders: as `find_stage_folders` gives them
    """
    stages = {stage: STAGE_TYPES[stage].load(folders[stage]) for stage in STAGES}
    if stages["rerank"].network is None:  # its correction counts for nothing; TensorRT computes it all the same
        network = open_network(folders["rerank"], NETWORKS["rerank"])
        stages["rerank"] = replace(stages["rerank"], network=network)
    info = read_stage(folders[STAGES[0]])
    return Pipeline(info, stages, make_stage_specs(info.axes, info.context))


def halve_lists(feed: Arrays) -> Arrays:
    """Return the re-ranker's inputs with only the first half of each list valid: few recorded requests have short lists."""
    places = feed["valid"].shape[1]
    is_valid = (np.arange(places) < places // 2).astype(np.float32)
    return {name: values * is_valid.reshape(1, -1, *[1] * (values.ndim - 2)) for name, values in feed.items()}
