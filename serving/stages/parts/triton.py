"""The Triton adapter for parts of a stage: `TritonPythonModel = step_model(RankFeatures)`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np

from serving.contract.artifacts import StageInfo
from serving.contract.tensors import pack_records
from serving.stages.adapter.triton import Link, Metrics, StageModel, degraded_of, respond, with_live
from serving.stages.parts.kernels import RankFeatures, RetrieveSearch

Arrays = dict[str, np.ndarray]


def step_model(step_class: type) -> type:
    """Return the `TritonPythonModel` class that serves one part of a stage."""

    class TritonPythonModel(StepModel):
        kernel_types = (step_class,)

    return TritonPythonModel


class StepModel(StageModel):
    """A Triton model of one part. The last part counts for the whole stage, because it knows which answers are fallbacks."""

    def initialize(self, args: dict[str, str]) -> None:
        self.gpu = int(args["model_instance_device_id"]) if args["model_instance_kind"] == "GPU" else None
        super().initialize(args)

    def _chain(self, folder: Path, info: StageInfo) -> list[Link]:
        kernel = with_live(self.kernel_types[0].load(folder), self.live)
        if isinstance(kernel, RetrieveSearch):
            kernel.to_gpu(self.gpu)
        self.is_last = kernel.spec.outputs == info.spec.outputs
        return [Link(kernel.spec, kernel, Metrics(info.stage))]

    def _call(self, inputs: Arrays) -> Arrays:
        started_s = time.perf_counter()
        outputs = self.first.kernel(inputs)
        if self.is_last:
            self.first.metrics.count(degraded_of(outputs), time.perf_counter() - started_s)
        return pack_records(self.spec.outputs, inputs | outputs)

    def _respond(self, outputs: Arrays) -> Any:
        if self.kernel_types == (RankFeatures,):
            outputs = RankFeatures.for_one_request(outputs)
        return respond(self.spec, outputs)
