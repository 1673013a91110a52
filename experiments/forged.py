"""Forge requests that no honest client sends: broken tensors for gRPC and HTTP, nonsense for REST, records for stages."""

from __future__ import annotations

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from perf.load.workload import serialise
from serving.contract.tensors import OBSERVE, UPSERT, ModelSpec, TensorSpec, pack_records

Arrays = dict[str, np.ndarray]
EXTREMES: dict[str, list] = {
    "i": [0, 1, -1, -2, 2**31, 2**53, 2**63 - 1, -(2**63)],
    "f": [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -3e38],
}
WORDS = ["user", "session", "exclude", "k", "after", "context.x", "fallback", "item", "", "%00", "é" * 20]
TEXTS = ["", "-1", "0", "1e999", "NaN", "9" * 400, "null", "../../etc/passwd", "%ff%fe", "<b>", "a," * 300, "\u202e", "7"]
HOSTILE_JSON = [
    "", "{", "[]", "[" * 10_000, "null", '{"a": 1e999}', "{}" * 50, '{"inputs": 7}', '{"inputs": [{"name": 1}]}', "\x00",
    '{"user": {}, "item": []}', '[{"user": 1}]', '{"user": 1, "item": 2, "timestamp": "yesterday"}', '{"price": NaN}',
]  # fmt: skip


def forge_fields(spec: ModelSpec, generation: int, rng: np.random.Generator) -> Arrays:
    """Return the fields of a stage's inputs, [1, *dims] each: of the right types, with values that no stage sends."""
    fields = {field.name: _draw_values(field, rng) for field in spec.input_fields}
    if "lineage" in fields:  # another generation is refused before anything is computed
        fields["lineage"][:] = (generation, int(rng.integers(0, 32)))
    return fields


def forge_stage_request(spec: ModelSpec, generation: int, rng: np.random.Generator) -> bytes:
    """Return an encoded request of one stage with forged records."""
    return serialise(spec, pack_records(spec.inputs, forge_fields(spec, generation, rng)))[0]


def forge_request(spec: ModelSpec, rng: np.random.Generator) -> bytes:
    """Return an encoded request of `recommend`, `observe` or `upsert`, broken in one of several ways.

    Requests of the two that write also hold values that must be refused, even where a tensor is lost: an accepted event would
    change valid answers.
    """
    fields = {tensor.name: _draw_values(tensor, rng) for tensor in spec.inputs} | _draw_refused(spec.name, rng)
    body = serialise(spec, fields)[0]
    request = pb.ModelInferRequest.FromString(body)
    position = int(rng.integers(len(request.inputs)))
    fault = int(rng.integers(9))
    if fault == 0:
        del request.inputs[position]
    elif fault == 1:
        request.inputs[position].datatype = str(rng.choice(["FP64", "BYTES", "INT8", "", "HOROSCOPE", "INT64"]))
    elif fault == 2:
        request.inputs[position].shape[:] = [
            int(size) for size in rng.choice([0, 1, -1, 3, 65, 2**31, 2**62], rng.integers(0, 4))
        ]
    elif fault == 3:
        request.raw_input_contents[position] = request.raw_input_contents[position][: int(rng.integers(8))]
    elif fault == 4:
        request.inputs[position].name = str(rng.choice(WORDS))
    elif fault == 5:
        request.parameters["deadline_unix_ms"].string_param = str(rng.choice(TEXTS))
    elif fault == 6:
        request.model_name = str(rng.choice(["", "recommend/../rank", "nothing", "rank", "a" * 1_000]))
    elif fault == 7:
        request.parameters["sequence_id"].int64_param = int(rng.choice(EXTREMES["i"][:7]))
        del request.raw_input_contents[:]
    else:
        damaged = bytearray(body)
        for index in rng.integers(0, len(damaged), 4):
            damaged[index] = int(rng.integers(256))
        return bytes(damaged[: int(rng.integers(1, len(damaged)))])
    return request.SerializeToString()


def forge_http(rng: np.random.Generator) -> bytes:
    """Return a request to tritonserver's HTTP port with a malformed body."""
    model = str(rng.choice(["recommend", "rank", "observe", "nothing"]))
    body = str(rng.choice(HOSTILE_JSON)).encode() if rng.random() < 0.7 else rng.bytes(int(rng.integers(1, 200)))
    length = f"inference-header-content-length: {rng.choice([0, 1, 7, 10**9])}\r\n" if rng.random() < 0.5 else ""
    return (
        f"POST /v2/models/{model}/infer HTTP/1.1\r\nhost: localhost\r\n{length}content-length: {len(body)}\r\n\r\n".encode()
        + body
    )


def forge_rest(rng: np.random.Generator) -> bytes:
    """Return a request to the gateway with nonsense in the path, the query, a header or the body."""
    if rng.random() < 0.6:
        pairs = "&".join(f"{rng.choice(WORDS)}={rng.choice(TEXTS)}" for _ in range(int(rng.integers(0, 6))))
        path = rng.choice(["recommendations", "explain", "items/%00/similar", "items/7/similar", "users/-1", "nothing"])
        target = f"/v1/{path}?{pairs}".encode("ascii", "ignore").replace(b" ", b"")
        header = f"x-deadline-ms: {rng.choice(['-1', 'soon', '1e999', '5'])}\r\n".encode() if rng.random() < 0.3 else b""
        return b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n"
    body = str(rng.choice(HOSTILE_JSON)).encode()
    method, path = str(rng.choice(["POST /v1/events", "PUT /v1/items/a", "PUT /v1/users/7"])).split()
    return f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _draw_values(tensor: TensorSpec, rng: np.random.Generator) -> np.ndarray:
    dtype = tensor.numpy_dtype
    if dtype == np.object_:
        return np.array([str(rng.choice(TEXTS)).encode()] * int(np.prod(tensor.dims)), object).reshape(1, *tensor.dims)
    if dtype == np.uint8:
        return rng.integers(0, 256, (1, *tensor.dims), np.uint8)
    extremes = np.array(EXTREMES[dtype.kind]).astype(dtype)
    drawn = rng.choice(extremes, (1, *tensor.dims))
    ordinary = rng.integers(-5, 500, (1, *tensor.dims)).astype(dtype)
    return np.where(rng.random((1, *tensor.dims)) < rng.random(), drawn, ordinary)


def _draw_refused(model: str, rng: np.random.Generator) -> Arrays:
    """Return inputs of a model that writes, which it must refuse; none of another model."""
    if model == OBSERVE:
        kinds = [text.encode() for text in TEXTS if text]  # none that a data set declares
        return {"event": _draw_text(kinds, rng), "timestamp_ms": np.array([[rng.choice([0, -1, 2**53])]], np.int64)}
    if model == UPSERT:
        kinds, columns = [b"item", b"user", b"shop"], [text.encode() for text in HOSTILE_JSON]
        return {"kind": _draw_text(kinds, rng), "columns": _draw_text(columns, rng)}
    return {}


def _draw_text(texts: list[bytes], rng: np.random.Generator) -> np.ndarray:
    return np.array([[texts[int(rng.integers(len(texts)))]]], object)
