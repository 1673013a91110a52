"""Forge requests that no honest client sends: broken tensors for gRPC and HTTP, nonsense for REST, records for stages.

Values that the repository knows are mixed in, so that not every request fails the first check.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from perf.load.workload import serialise
from serving.contract.tensors import OBSERVE, UPSERT, ModelSpec, TensorSpec, pack_records
from serving.pipeline import Pipeline
from serving.stages.rules.config import CATEGORY
from triton_recommender import Catalogue

Arrays = dict[str, np.ndarray]
EXTREMES: dict[str, list] = {
    "i": [0, 1, -1, -2, 2**31, 2**53, 2**63 - 1, -(2**63)],
    "f": [0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, 3e38, -3e38],
}
WORDS = [
    "user", "session", "history", "exclude", "among", "category", "k", "after", "reasons", "generation", "context.x",
    "fallback", "item", "", "%00", "é" * 20,
]  # fmt: skip
TEXTS = ["", "-1", "0", "1e999", "NaN", "9" * 400, "null", "../../etc/passwd", "%ff%fe", "<b>", "a," * 300, "\u202e", "7"]
HOSTILE_JSON = [
    "", "{", "[]", "[" * 10_000, "null", '{"a": 1e999}', "{}" * 50, '{"inputs": 7}', '{"inputs": [{"name": 1}]}', "\x00",
    '{"user": {}, "item": []}', '[{"user": 1}]', '{"user": 1, "item": 2, "timestamp": "yesterday"}', '{"price": NaN}',
]  # fmt: skip
HOSTILE_CHANGES = [
    "[]", "[7]", "[[]]", "[" + "7," * 1_000 + "7]", '[{"id": 7}]', '[{"id": {}, "columns": {}}]',
    '[{"id": "7", "columns": []}]', '[{"id": "", "columns": {}}]', '[{"id": 1e999, "columns": {}}]',
    '[{"id": "7", "columns": {"nonsense": 1}}]',
    '[{"id": "7", "columns": {"nonsense": NaN}}, {"id": -7, "columns": {"": null}}]', '[{"id": "\\ud800", "columns": {}}]',
]  # fmt: skip
ITEM_FIELDS = ("history", "history_ids", "exclude", "among", "candidate_ids", "item_id", "id")
CHANGES = ("POST /v1/items", "POST /v1/users")


@dataclass(frozen=True)
class Known:
    """Values that a repository knows.

    item_ids, user_ids: int64 on the wire; user_rows: int64 [Fu], rows of the table of each categorical column of the user
    categories, items, users: as the shop writes them
    """

    item_ids: np.ndarray
    user_ids: np.ndarray
    user_rows: np.ndarray
    categories: tuple[str, ...]
    items: tuple[str, ...]
    users: tuple[str, ...]

    @classmethod
    def read(cls, repo: Path, pipeline: Pipeline) -> Known:
        """Read the values of the pipeline's generation. Raises CatalogueError."""
        retrieve, names = pipeline.stages["retrieve"], Catalogue.load(repo, pipeline.info.generation)
        item_ids, user_ids = retrieve.items.ids, retrieve.outputs.seen.user_ids
        rows = [len(retrieve.inputs.tables.tables[name]) for name in retrieve.inputs.user_tables]
        items = [names.item_name(item_id) or str(item_id) for item_id in item_ids.tolist()]
        users = list(names.user_names) or list(map(str, user_ids.tolist()))
        categories = tuple(retrieve.content.names[CATEGORY])
        return cls(item_ids, user_ids, np.array(rows, np.int64), categories, tuple(items), tuple(users))


def forge_fields(spec: ModelSpec, generation: int, known: Known, rng: np.random.Generator) -> Arrays:
    """Return the fields of a stage's inputs, [1, *dims] each: of the right types, with known values among strange ones."""
    fields = {field.name: _draw_values(field, known, rng) for field in spec.input_fields}
    if "lineage" in fields:  # another generation is refused before anything is computed
        fields["lineage"][:, :2] = (generation, int(rng.integers(0, 32)))
    return fields


def forge_stage_request(spec: ModelSpec, generation: int, known: Known, rng: np.random.Generator) -> bytes:
    """Return an encoded request of one stage with forged records."""
    return serialise(spec, pack_records(spec.inputs, forge_fields(spec, generation, known, rng)))[0]


def forge_request(spec: ModelSpec, known: Known, rng: np.random.Generator) -> bytes:
    """Return an encoded request of `recommend`, `observe` or `upsert`, broken in one of several ways.

    Requests of the two that write also hold values that must be refused, even where a tensor is lost: an accepted event would
    change valid answers.
    """
    fields = {tensor.name: _draw_values(tensor, known, rng) for tensor in spec.inputs} | _draw_refused(spec.name, rng)
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


def forge_rest(known: Known, rng: np.random.Generator) -> bytes:
    """Return a request that reads from the gateway, with nonsense in the path, the query or a header."""
    path = rng.choice(["recommendations"] * 3 + ["explain", "items/", "users/", "sessions/", "nothing"])
    if path.endswith("/"):
        name = rng.choice(["item", "user"])
        path += _draw_parameter(str(name), known, rng) + ("/similar" if path == "items/" else "")
    query = _draw_query(known, rng) if rng.random() < 0.8 else ""
    target = f"/v1/{path}{query}".encode("ascii", "ignore").replace(b" ", b"")
    header = f"x-deadline-ms: {rng.choice(['-1', 'soon', '1e999', '5'])}\r\n".encode() if rng.random() < 0.3 else b""
    return b"GET " + target + b" HTTP/1.1\r\nhost: localhost\r\n" + header + b"\r\n"


def forge_rest_write(rng: np.random.Generator) -> bytes:
    """Return a request that the gateway must refuse: an event or a change with nonsense in the body."""
    target = str(rng.choice(["POST /v1/events", "PUT /v1/items/a", "PUT /v1/users/7", *CHANGES, *CHANGES]))
    bodies = HOSTILE_CHANGES if target in CHANGES and rng.random() < 0.7 else HOSTILE_JSON
    body = bodies[int(rng.integers(len(bodies)))].encode()
    return f"{target} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _draw_query(known: Known, rng: np.random.Generator) -> str:
    """Return a query. Half of them name each parameter once and a known user, and hold none that no route has."""
    if rng.random() < 0.5:
        names = rng.choice(WORDS, int(rng.integers(0, 6)))
        return "?" + "&".join(f"{name}={_draw_parameter(str(name), known, rng)}" for name in names)
    names = rng.choice(
        ["history", "exclude", "among", "category", "k", "reasons", "generation"], int(rng.integers(0, 4)), False
    )
    pairs = [f"{name}={_draw_parameter(str(name), known, rng)}" for name in names]
    return "?" + "&".join([f"user={quote(_choose(known.users, rng), safe='')}", *pairs])


def _draw_parameter(name: str, known: Known, rng: np.random.Generator) -> str:
    """Return a value of a parameter, percent-encoded: most often one that the repository knows."""
    if rng.random() < 0.3:
        return _choose(TEXTS, rng)
    if name in ("history", "exclude", "among"):
        return ",".join(quote(_choose(known.items, rng), safe="") for _ in range(int(rng.integers(1, 80))))
    honest: dict[str, Sequence[str]] = {"user": known.users, "item": known.items, "category": known.categories or ("7",)}
    honest |= {"k": ("1", "7"), "reasons": ("true", "false"), "generation": ("1", "2"), "fallback": ("none", "popular")}
    return quote(_choose(honest.get(name, TEXTS), rng), safe="")


def _choose(texts: Sequence[str], rng: np.random.Generator) -> str:
    return texts[int(rng.integers(len(texts)))]


def _draw_values(tensor: TensorSpec, known: Known, rng: np.random.Generator) -> np.ndarray:
    """Return values [1, *dims]. A share of them, which is 1 in half of the draws, could come from an honest sender."""
    shape, dtype = (1, *tensor.dims), tensor.numpy_dtype
    honest_share = 1.0 if rng.random() < 0.5 else rng.random()
    if dtype == np.object_:
        texts = (*known.categories, "") if tensor.name == "category" and rng.random() < honest_share else TEXTS
        return np.array([_choose(texts, rng).encode()] * int(np.prod(tensor.dims)), object).reshape(shape)
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    extremes = rng.choice(np.array(EXTREMES[dtype.kind]).astype(dtype), shape)
    strange = np.where(rng.random(shape) < rng.random(), extremes, rng.integers(-5, 500, shape).astype(dtype))
    return np.where(rng.random(shape) < honest_share, _draw_honest(tensor, known, rng), strange)


def _draw_honest(tensor: TensorSpec, known: Known, rng: np.random.Generator) -> np.ndarray:
    """Return numbers [1, *dims] such as honest senders give. In half of the draws, items repeat, as they never should."""
    shape = (1, *tensor.dims)
    if tensor.name in ITEM_FIELDS:
        repeats = bool(rng.random() < 0.5 or np.prod(shape) > len(known.item_ids))
        return rng.choice(known.item_ids, shape, repeats)
    if tensor.name == "user_id":
        return rng.choice(known.user_ids, shape)
    if tensor.name == "user_categorical":
        return rng.integers(0, known.user_rows, shape)
    return rng.integers(0, 100, shape).astype(tensor.numpy_dtype)


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
