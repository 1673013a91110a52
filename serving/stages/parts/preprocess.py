"""Run preprocess in two parts around NVTabular itself: raw columns before it, the contract's tensors after it.

The compiled plan (serving/stages/features/encode.py) does the same in one pass. `export/nvidia/publish.py` compares the two.
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
from serving.stages.parts.specs import (
    PartSettings,
    WorkflowColumns,
    make_preprocess_specs,
    name_encoded_tensor,
    name_raw_tensor,
)
from serving.stages.preprocess import PreprocessInputs, make_history_tensors

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
        return make_preprocess_specs(self.info, self.columns)[self.part.name]


@dataclass(frozen=True)
class PreprocessFeatures(PreprocessPart):
    """Compute the users' raw columns, as the workflow's input tensors, and their history."""

    inputs: PreprocessInputs

    @classmethod
    def load(cls, folder: Path) -> PreprocessFeatures:
        info = read_stage(folder)
        part = PartSettings.of(folder, info)
        return cls(info, part, PreprocessInputs.load(folder, replace(info, settings=part.stage)))

    def with_live(self, reader: Reader) -> PreprocessFeatures:
        return replace(self, inputs=self.inputs.with_live(reader))

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        return self.inputs.find_faults(inputs)

    def __call__(self, inputs: Arrays) -> Arrays:
        state, clock_s, degraded = self.inputs.read_state(inputs)
        raw = self.inputs.derive_columns(state, inputs, clock_s)
        return {
            **{name_raw_tensor(name): make_tensor(raw[name]) for name in self.columns.raw},
            **make_history_tensors(state, clock_s),
            "lineage": new_lineage(len(state.user_ids), self.info.generation, degraded),
        }


@dataclass(frozen=True)
class PreprocessTensors(PreprocessPart):
    """Build the contract's tensors from the workflow's output columns."""

    @classmethod
    def load(cls, folder: Path) -> PreprocessTensors:
        info = read_stage(folder)
        return cls(info, PartSettings.of(folder, info))

    def find_faults(self, inputs: Arrays) -> dict[int, str]:
        return {}

    def __call__(self, inputs: Arrays) -> Arrays:
        rows = [inputs[name_encoded_tensor(name)] + first for name, first in self.columns.categorical.items()]
        numbers = [inputs[name_encoded_tensor(name)] for name in self.columns.continuous]
        return {
            "user_categorical": np.concatenate(rows, axis=1, dtype=np.int64),
            "user_continuous": np.concatenate(numbers, axis=1, dtype=np.float32),
            "lineage": inputs["lineage"],
        }


def make_tensor(column: np.ndarray) -> np.ndarray:
    """Return a column, [B], as a tensor, [B, 1].

    Texts (str, bytes or None) are percent-encoded, because merlin-systems 23.8 reads only ASCII. None becomes "".
    """
    if column.dtype == object:
        column = np.array([quote(text or b"").encode() for text in column], object)
    return column.reshape(-1, 1)
