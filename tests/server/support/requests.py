"""Short spellings for tests that call the real server."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc

from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import PAD_ID
from serving.stages.live.content import Content
from serving.stages.rules.config import CATEGORY

TRITON_DTYPE = {"int64": "INT64", "float32": "FP32", "object": "BYTES", "int32": "INT32", "uint8": "UINT8"}


def tensor(name: str, array: np.ndarray, dtype: str | None = None) -> grpc.InferInput:
    wire = grpc.InferInput(name, list(array.shape), dtype or TRITON_DTYPE[array.dtype.name])
    wire.set_data_from_numpy(array)
    return wire


def infer_tensors(client: grpc.InferenceServerClient, model: str, **tensors: object) -> dict[str, np.ndarray]:
    """Call any model with nested lists or arrays of integers or bytes. Return its outputs by name."""
    arrays = {name: np.asarray(values) for name, values in tensors.items()}
    inputs = [tensor(name, array.astype(object) if array.dtype.kind == "S" else array) for name, array in arrays.items()]
    result = client.infer(model, inputs)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def infer(client: grpc.InferenceServerClient, user_id: list[int] | np.ndarray, **tensors: np.ndarray) -> dict[str, np.ndarray]:
    """Return the outputs of one `recommend` call, by name."""
    return infer_tensors(client, "recommend", user_id=np.array(user_id, np.int64).reshape(-1, 1), **tensors)


def ask_together(client: grpc.InferenceServerClient, model: str, calls: list[list[grpc.InferInput]]) -> list:
    """Send calls one behind the other without waiting. Return their answers or errors, in the order of the calls."""
    answers: list[Future] = [Future() for _ in calls]
    for inputs, answer in zip(calls, answers, strict=True):
        client.async_infer(model, inputs, callback=lambda result, error, to=answer: to.set_result(error or result))
    return [answer.result(timeout=60) for answer in answers]


def narrow(repository: Path, inputs: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray]:
    """Return the first requests for a category of the catalogue, one that no item has, or the whole catalogue.

    The second half of them choose among some items of it, and one that nobody knows.
    """
    folder = find_stage_folder(repository, "retrieve", read_pinned_generation(repository))
    names = [*Content.load(folder).names[CATEGORY], "", "unheard of"]
    own = {name: values[:count] for name, values in inputs.items()}
    rng, item_ids = np.random.default_rng(0), np.load(folder / "item_ids.npy")
    among = np.full((count, read_stage(folder).axes.candidates), PAD_ID)
    for row in among[count // 2 :]:
        row[::2] = rng.choice(item_ids, len(row[::2]))  # the rows kept free for new items have PAD_ID
        row[0] = np.iinfo(np.int64).max
    category = np.array([[names[row % len(names)].encode()] for row in range(count)], object)
    return own | {"category": category, "among": among}


def ask_each(client: grpc.InferenceServerClient, inputs: dict[str, np.ndarray], concurrency: int) -> dict[str, np.ndarray]:
    """Make R calls of one row each. Return the joined outputs. inputs: [R, *dims] by name"""

    def call(row: int) -> dict[str, np.ndarray]:
        own = {name: array[row : row + 1] for name, array in inputs.items()}
        return infer(client, user_id=own.pop("user_id"), **own)

    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(call, range(len(inputs["user_id"]))))
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}
