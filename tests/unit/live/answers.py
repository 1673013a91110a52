"""Ask a pipeline, and post events and changes to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from serving.contract.artifacts import find_stage_folder
from serving.contract.tensors import OBSERVE, make_live_specs
from serving.pipeline import Pipeline
from serving.stages.features.user_store import UserStore
from serving.stages.live.models import Upsert


def event_inputs(**columns) -> dict[str, np.ndarray]:
    count = len(columns["user_id"])
    return {
        tensor.name: np.array(columns.get(tensor.name, [tensor.fill] * count), tensor.numpy_dtype).reshape(-1, 1)
        for tensor in make_live_specs()[OBSERVE].inputs
    }


def upserted(stage: Upsert, item: int, **columns) -> int:
    """Send a change and return its sequence."""
    texts = {"kind": b"item", "columns": json.dumps(columns).encode()}
    inputs = {name: np.array([[value]], object) for name, value in texts.items()} | {"id": np.array([[item]])}
    assert stage.find_faults(inputs) == {}
    return int(stage(inputs)["sequence"][0, 0])


def answer(pipeline: Pipeline, users: list[int], **inputs: list | np.ndarray) -> dict[str, np.ndarray]:
    tensors = {name: np.array(values, np.int64).reshape(len(users), -1) for name, values in inputs.items()}
    return pipeline({"user_id": np.array(users, np.int64).reshape(-1, 1), **tensors})


def last_event_ms(repository: Path) -> int:
    return UserStore(find_stage_folder(repository, "preprocess", 1) / "store").as_of_s * 1000


def change_stage(repository: Path, name: str, settings: Mapping[str, object] | None = None, **facts: str) -> None:
    """Change facts and settings of a stage of the first generation, as another export would."""
    path = repository / name / "1" / "stage.json"
    stage = json.loads(path.read_text()) | facts
    stage["settings"] |= dict(settings or {})
    path.write_text(json.dumps(stage))
