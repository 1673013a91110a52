"""Short spellings for tests that call the real server."""

from __future__ import annotations

import numpy as np
import tritonclient.grpc as grpc

TRITON_DTYPE = {"int64": "INT64", "float32": "FP32", "object": "BYTES", "int32": "INT32"}


def tensor(name: str, array: np.ndarray, dtype: str | None = None) -> grpc.InferInput:
    wire = grpc.InferInput(name, list(array.shape), dtype or TRITON_DTYPE[array.dtype.name])
    wire.set_data_from_numpy(array)
    return wire


def infer(client: grpc.InferenceServerClient, user_id: list[int], **tensors: np.ndarray) -> dict[str, np.ndarray]:
    """-> the outputs of one `recommend` call, by name."""
    inputs = [tensor("user_id", np.array(user_id, np.int64).reshape(-1, 1))]
    inputs += [tensor(name, array) for name, array in tensors.items()]
    result = client.infer("recommend", inputs)
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}
