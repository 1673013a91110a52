"""Adapt the parts of a stage to Triton: `TritonPythonModel = make_part_model(RankFeatures)`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from serving.contract.artifacts import StageInfo
from serving.contract.tensors import BEGAN, STAGES, pack_records
from serving.stages.adapter.metrics import Metrics
from serving.stages.adapter.triton import Link, StageModel, read_degraded, respond, time_stage, with_live
from serving.stages.parts.models import RankFeatures, RetrieveSearch

Arrays = dict[str, np.ndarray]


def make_part_model(part_class: type) -> type:
    """Return the `TritonPythonModel` class that serves one part of a stage."""

    class TritonPythonModel(PartModel):
        stage_types = (part_class,)

    return TritonPythonModel


class PartModel(StageModel):
    """A Triton model of one part. Only a stage's last part counts calls, because it knows which answers are fallbacks."""

    def initialize(self, args: dict[str, str]) -> None:
        self.gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        super().initialize(args)

    def _load_chain(self, folder: Path, info: StageInfo) -> list[Link]:
        stage = with_live(self.stage_types[0].load(folder), self.live)
        if isinstance(stage, RetrieveSearch) and (missing := stage.to_gpu(self.gpu)):
            pb_utils.Logger.log_warn(f"{missing}: items are searched on the CPU")
        self.stage, self.is_last = info.stage, stage.spec.outputs == info.spec.outputs
        return [Link(stage.spec, stage, Metrics(info.stage))]

    def _call(self, inputs: Arrays, is_timed: bool) -> Arrays:
        started_s = time.monotonic()
        outputs = self.first.stage(inputs)
        if self.is_last:
            self.first.metrics.count(read_degraded(outputs), time.monotonic() - started_s)
            if is_timed:
                outputs |= time_stage(self.stage, inputs | outputs, 0.0)
        elif is_timed and self.stage == STAGES[0]:  # its first part: the workflow, which comes next, is not ours
            outputs["lineage"][:, BEGAN] = int(1e6 * started_s)
        return pack_records(self.spec.outputs, inputs | outputs)

    def _respond(self, outputs: Arrays) -> Any:
        if self.stage_types == (RankFeatures,):
            outputs = RankFeatures.flatten_keys(outputs)
        return respond(self.spec, outputs)
