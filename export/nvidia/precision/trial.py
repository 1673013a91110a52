"""Answer the recorded requests with lowered networks in place of the ranker's and the re-ranker's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from export.nvidia.precision.calibration import NETWORKS, Arrays, Recorder, halve_lists, open_pipeline, replace_networks
from repository.checks.recorded import RECORDED_FILE, read_recorded
from serving.contract.tensors import ANY_GENERATION, ENSEMBLE, PAD_ID, new_lineage

REQUESTS_PER_BATCH = 8
# Not `retrieve`: the user tower runs once a request, and its output decides the candidates. Halving it moves final
# scores by up to 0.02 (Online Retail).
LOWERED_STAGES = ("rank", "rerank")


class Trial:
    """Recorded requests and fp32's answers to them.

    feeds: stage -> the inputs of its network by batch, the re-ranker's also with short lists; exact: fp32's answers
    """

    def __init__(self, folders: Mapping[str, Path]) -> None:
        """Record. folders: as `find_stage_folders` gives them."""
        pipeline = open_pipeline(folders)
        recorded = read_recorded(folders[ENSEMBLE] / RECORDED_FILE).inputs
        recorders = {stage: Recorder(pipeline.stages[stage].network, []) for stage in NETWORKS}
        recording, self.batches, answers = replace_networks(pipeline, recorders), [], []
        for start in range(0, len(recorded["user_id"]), REQUESTS_PER_BATCH):
            tensors = recording.trace({name: values[start : start + REQUESTS_PER_BATCH] for name, values in recorded.items()})
            answers.append({name: tensors[name] for name in ("item_ids", "scores")})
            self.batches.append(tensors | {"lineage": new_lineage(len(tensors["user_id"]), ANY_GENERATION)})
        self.pipeline, self.exact = pipeline, join(answers)
        fed = {stage: recorder.fed for stage, recorder in recorders.items()}
        self.feeds = fed | {"rerank": [*fed["rerank"], *map(halve_lists, fed["rerank"])]}

    def answer_with(self, networks: Mapping[str, Any]) -> Arrays:
        """Return `item_ids` and `scores` of all requests. networks: stage -> the session in its network's place.

        Requests with non-finite network output get PAD_ID and NaN.
        """
        stages = replace_networks(self.pipeline, networks).stages
        return join([self._answer(stages, dict(tensors)) for tensors in self.batches])

    def _answer(self, stages: dict[str, Any], tensors: Arrays) -> Arrays:
        for stage in LOWERED_STAGES:
            tensors |= stages[stage](tensors)
        sound = tensors["degraded"] == 0
        return {"item_ids": np.where(sound, tensors["item_ids"], PAD_ID), "scores": np.where(sound, tensors["scores"], np.nan)}


def join(parts: list[Arrays]) -> Arrays:
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
