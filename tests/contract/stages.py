"""Stages that are made for tests of the adapter, and what loads and asks them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from serving.contract.artifacts import StageInfo, read_stage
from serving.contract.errors import DependencyError, RequestError
from serving.contract.tensors import (
    Axes,
    ContextColumn,
    ModelSpec,
    RecordSpec,
    new_lineage,
    unpack_records,
)
from tests.contract import fake_backend as pb

AXES = Axes(candidates=4, history=3, exclusions=2, items_returned=2, user_categorical=2, user_continuous=1)
CONTEXT = (ContextColumn("store", "integer"), ContextColumn("device", "string"), ContextColumn("hour", "continuous"))
INFO = StageInfo("preprocess", generation=7, axes=AXES, context=CONTEXT)


class Echo:
    """A preprocess stage whose first categorical is the user id. It counts its calls and keeps its inputs."""

    @classmethod
    def load(cls, folder: Path) -> "Echo":
        return cls()

    def __init__(self) -> None:
        self.seen: list[dict] = []

    def find_faults(self, inputs):
        return {row: f"user_id is {value}" for row, (value,) in enumerate(inputs["user_id"]) if value < 0}

    def __call__(self, inputs):
        self.seen.append(inputs)
        user_ids = inputs["user_id"]
        if (user_ids == 666).any():
            raise ZeroDivisionError("secret/path")
        if (user_ids == 777).any():
            raise DependencyError("The store is down. Start it.")
        if (user_ids == 888).any():
            raise RequestError("user_id was used before", np.flatnonzero(user_ids[:, 0] == 888).tolist())
        batch = len(user_ids)
        return {
            "user_categorical": np.repeat(user_ids, 2, axis=1),
            "user_continuous": np.zeros((batch, 1), np.float32),
            "history_ids": inputs["history"],
            "history_age_days": np.zeros((batch, 3), np.float32),
            "history_interests": np.zeros((batch, 1), np.int64),
            "lineage": new_lineage(batch, 7),
        }


class Next:
    """A stage of any later stage: zeros of the contract's shapes, the lineage handed on."""

    @classmethod
    def load(cls, folder: Path) -> "Next":
        return cls(read_stage(folder).spec)

    def __init__(self, spec) -> None:
        self.spec = spec
        self.seen: list[dict[str, np.ndarray]] = []
        self.spoils: dict[str, Callable[[np.ndarray], np.ndarray]] = {}  # by output

    def find_faults(self, inputs):
        raise AssertionError("the outputs of the first stage are not checked again")

    def __call__(self, inputs):
        self.seen.append(inputs)
        zeros = {t.name: np.zeros((len(inputs["lineage"]), *t.dims), t.numpy_dtype) for t in self.spec.output_fields}
        outputs = zeros | ({"lineage": inputs["lineage"]} if "lineage" in zeros else {})
        return outputs | {name: spoil(outputs[name]) for name, spoil in self.spoils.items()}


def pbtxt_as_json(info: StageInfo) -> str:
    return spec_as_json(info.spec)


def spec_as_json(spec: ModelSpec) -> str:
    def tensors(specs):
        kind = {"BYTES": "TYPE_STRING"}
        return [
            {"name": t.name, "data_type": kind.get(t.dtype, f"TYPE_{t.dtype}"), "dims": [str(d) for d in t.dims]} for t in specs
        ]

    parameters = {
        t.parameter: {"string_value": t.stated_fields} for t in (*spec.inputs, *spec.outputs) if isinstance(t, RecordSpec)
    }
    return json.dumps({"input": tensors(spec.inputs), "output": tensors(spec.outputs), "parameters": parameters})


def quiet_model(*stages: type):
    """Return a model of the stages that leaves reports to the test."""
    from serving.stages.adapter.triton import make_triton_model

    kind = make_triton_model(*stages)
    kind.report_every_s = 3_600
    return kind()


def request(*user_ids: int, **tensors: np.ndarray) -> pb.InferenceRequest:
    return pb.InferenceRequest(user_id=np.array(user_ids, np.int64).reshape(-1, 1), **tensors)


def users_of(response: pb.InferenceResponse) -> list[int]:
    answered = {t.name(): t.as_numpy() for t in response.output_tensors()}
    fields = unpack_records(INFO.spec.outputs, answered)
    np.testing.assert_array_equal(fields["user_id"], fields["user_categorical"][:, :1])  # handed on, and answered
    return fields["user_categorical"][:, 0].tolist()
