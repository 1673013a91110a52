"""Preprocess in parts around NVTabular itself: state and raw columns before it, the contract's tensors after it.

The compiled plan (serving/stages/features/encode.py) does the same in one pass; `export/nvidia/publish.py` compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from urllib.parse import quote

import numpy as np

from serving.contract.artifacts import StageInfo, read_stage
from serving.contract.tensors import ModelSpec, new_lineage
from serving.live.reader import Reader
from serving.stages.parts.specs import PartSettings, WorkflowColumns, encoded_tensor, preprocess_specs, raw_tensor
from serving.stages.preprocess import PreprocessInputs, history_tensors

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class PreprocessPart:
    """The common base of both parts."""

    info: StageInfo
    part: PartSettings

    @cached_property
    def columns(self) -> WorkflowColumns:
        return WorkflowColumns(**self.part.columns)

    @cached_property
    def spec(self) -> ModelSpec:
        return preprocess_specs(self.info, self.columns)[self.part.name]


@dataclass(frozen=True)
class PreprocessFeatures(PreprocessPart):
    """Compute the users' raw columns, as the workflow's tensors, and their history."""

    inputs: PreprocessInputs

    @classmethod
    def load(cls, folder: Path) -> PreprocessFeatures:
        info = read_stage(folder)
        return cls(info, PartSettings.of(folder, info), PreprocessInputs.load(folder, info))

    def with_live(self, reader: Reader) -> PreprocessFeatures:
        return replace(self, inputs=self.inputs.with_live(reader))

    def faults(self, inputs: Arrays) -> dict[int, str]:
        return self.inputs.faults(inputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        state, clock_s, degraded = self.inputs.read_state(inputs)
        raw = self.inputs.derive_columns(state, inputs, clock_s)
        bits = np.empty((len(state.user_ids), 1), np.int32)
        bits[:, 0] = degraded
        return {
            **{raw_tensor(name): as_tensor(raw[name]) for name in self.columns.raw},
            **history_tensors(state, clock_s),
            "store_degraded": bits,
        }


@dataclass(frozen=True)
class PreprocessTensors(PreprocessPart):
    """Turn the workflow's columns into the tensors of the contract."""

    @classmethod
    def load(cls, folder: Path) -> PreprocessTensors:
        info = read_stage(folder)
        return cls(info, PartSettings.of(folder, info))

    def faults(self, inputs: Arrays) -> dict[int, str]:
        return {}

    def __call__(self, inputs: Arrays) -> Arrays:
        degraded = inputs["store_degraded"]
        rows = [inputs[encoded_tensor(name)] + first for name, first in self.columns.categorical.items()]
        numbers = [inputs[encoded_tensor(name)] for name in self.columns.continuous]
        return {
            "user_categorical": np.concatenate(rows, axis=1, dtype=np.int64),
            "user_continuous": np.concatenate(numbers, axis=1, dtype=np.float32),
            "lineage": new_lineage(len(degraded), self.info.generation) | np.pad(degraded, ((0, 0), (1, 0))),
        }


def as_tensor(column: np.ndarray) -> np.ndarray:
    """Return [B] as [B, 1].

    Texts (str, bytes or None) are percent-encoded, as merlin-systems 23.8 reads only ASCII; None is "".
    """
    if column.dtype == object:
        column = np.array([quote(text or b"").encode() for text in column], object)
    return column.reshape(-1, 1)
