"""Requests: recorded ones of the repository, drawn again by popularity, in the three forms that load needs.

    perf_analyzer   a JSON file of rows                      (`write_analyzer_json`)
    open loop       serialised gRPC requests                 (`serialise`)
    a single stage  the outputs of the stages before it      (`compute_stage_inputs`, computed by the server itself)

Every tensor is sent, with its fill value where a row has none, as our client does: tritonserver batches only requests with the
same tensors. `category` and `among` are sent only where a row has one, likewise.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.grpc import service_pb2 as pb

from repository.checks.recorded import RECORDED_FILE, Recorded, read_recorded
from repository.triton.config import CONFIG_FILE, compare_tensors
from repository.triton.models import read_config
from server.status.health import open_local_client
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import ArtifactError
from serving.contract.tensors import ENSEMBLE, STAGES, ModelSpec, TensorSpec, make_ensemble_spec, make_stage_specs

Arrays = dict[str, np.ndarray]
ZIPF_EXPONENT = 1.0
CHOICE = ("category", "among")
STAGE_BATCH = 32  # rows per call while stage inputs are collected


def read_specs(repo: Path, generation: int) -> dict[str, ModelSpec]:
    """Return the five models of a published generation, by name.

    Raises ArtifactError when this code has other tensors for them.
    """
    info = read_stage(find_stage_folder(repo, STAGES[0], generation))
    stages = make_stage_specs(info.axes, info.context)
    specs = {**stages, ENSEMBLE: make_ensemble_spec(stages)}
    for name in (name for name in specs if (repo / name).is_dir()):
        config = read_config(repo / name / CONFIG_FILE)
        if not config.max_batch_size:  # behind hps, where dims begin with the batch
            continue
        if differing := compare_tensors(config, specs[name]):
            raise ArtifactError(
                f"{repo / name / CONFIG_FILE} and the code of this checkout know different tensors: {differing}. "
                "Measure with the checkout that exported the repository, or export again."
            )
    return specs


def read_recorded_requests(repo: Path, generation: int) -> Recorded:
    """Return recorded requests to `recommend` with their answers. Raises ArtifactError when the generation has none."""
    return read_recorded(repo / ENSEMBLE / str(generation) / RECORDED_FILE)


def read_requests(repo: Path, generation: int) -> Arrays:
    """Return the recorded inputs of `recommend`, each [R, *dims]. Raises ArtifactError when the generation has none."""
    return read_recorded_requests(repo, generation).inputs


def draw(requests: Arrays, count: int, rng: np.random.Generator, cold_share: float = 0.0) -> Arrays:
    """Return `count` rows of `requests`, users by Zipf: the r-th most active one with weight 1/r, each time one of its rows.

    A share of `cold_share` of them gets the id of an unknown user.
    """
    users, user_of_row, rows_of_user = np.unique(requests["user_id"][:, 0], return_inverse=True, return_counts=True)
    rank = np.empty(len(users), np.int64)
    rank[np.argsort(-rows_of_user, kind="stable")] = np.arange(1, len(users) + 1)
    weight = 1.0 / rank[user_of_row] ** ZIPF_EXPONENT / rows_of_user[user_of_row]
    rows = rng.choice(len(user_of_row), count, p=weight / weight.sum())
    sample = {name: array[rows] for name, array in requests.items()}
    cold = rng.random(count) < cold_share
    sample["user_id"][cold, 0] = rng.integers(2**52, 2**53, cold.sum())  # an existing user only by chance
    return sample


def list_sent(spec: ModelSpec, rows: Arrays) -> tuple[TensorSpec, ...]:
    """Return the inputs that a client sends for rows, each [R, *dims]."""
    return tuple(t for t in spec.inputs if t.name not in CHOICE or (rows[t.name] != t.fill).any())


def write_analyzer_json(path: Path, spec: ModelSpec, rows: Arrays) -> None:
    """Write perf_analyzer's input data: one step per row. A missing continuous value is sent as 0, because JSON has no NaN."""
    steps, tensors = [], list_sent(spec, rows)
    for row in range(len(next(iter(rows.values())))):
        steps.append({t.name: {"content": _make_plain(rows[t.name][row]), "shape": list(t.dims)} for t in tensors})
    path.write_text(json.dumps({"data": steps}))


def _make_plain(row: np.ndarray) -> list:
    if row.dtype == np.object_:
        return [value.decode() for value in row.ravel()]
    return np.nan_to_num(row.ravel(), nan=0.0).tolist() if row.dtype.kind == "f" else row.ravel().tolist()


def serialise(spec: ModelSpec, rows: Arrays) -> list[bytes]:
    """Return one ModelInferRequest per row in bytes, so that no work is left for the instant when a request is due."""
    bodies, tensors = [], list_sent(spec, rows)
    for row in range(len(next(iter(rows.values())))):
        request = pb.ModelInferRequest(model_name=spec.name)
        for tensor in tensors:
            request.inputs.add(name=tensor.name, datatype=tensor.dtype, shape=[1, *tensor.dims])
            request.raw_input_contents.append(_make_raw(rows[tensor.name][row]))
        bodies.append(request.SerializeToString())
    return bodies


def _make_raw(row: np.ndarray) -> bytes:
    if row.dtype == np.object_:
        return b"".join(len(text).to_bytes(4, "little") + text for text in row.ravel())
    return np.ascontiguousarray(row).tobytes()


def compute_stage_inputs(url: str, specs: dict[str, ModelSpec], generation: int, requests: Arrays) -> dict[str, Arrays]:
    """Return each stage's input tensors [R, *dims]: the outputs of the stages before it for `requests`."""
    count = len(requests["user_id"])
    tensors, inputs = dict(requests), {}
    with open_local_client(url) as client:
        for name in STAGES:
            spec = specs[name]
            inputs[name] = {t.name: tensors[t.name] if t.name in tensors else t.make_filled(count) for t in spec.inputs}
            tensors.update(ask(client, spec, str(generation), inputs[name]))
    return inputs


def ask(client: grpcclient.InferenceServerClient, spec: ModelSpec, version: str, inputs: Arrays) -> Arrays:
    """Return the outputs [R, *dims] of one model for all rows, a few at a time; version "" lets the server choose."""
    answers, specs = [], list_sent(spec, inputs)
    for start in range(0, len(next(iter(inputs.values()))), STAGE_BATCH):
        tensors = []
        for tensor in specs:
            rows = inputs[tensor.name][start : start + STAGE_BATCH]
            tensors.append(grpcclient.InferInput(tensor.name, list(rows.shape), tensor.dtype))
            tensors[-1].set_data_from_numpy(rows)
        answer = client.infer(spec.name, tensors, model_version=version)
        answers.append({t.name: answer.as_numpy(t.name) for t in spec.outputs})
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
