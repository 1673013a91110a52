"""Queries to tensors and back. Pure: knows the contract, and no network.

The sizes H, E and K and the context columns come from the server's model configuration (`Signature`), never from a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from clients.errors import InvalidRequest
from clients.models import Query, Recommendations
from serving.contract.tensors import FROM_STORE, MISSING_INT, PAD_ID, Degraded

ANONYMOUS = int(MISSING_INT)  # no shop's id (-1 may be one): served as a cold-start user
_INT64 = np.iinfo(np.int64)
_NUMPY = {"INT64": np.int64, "FP32": np.float32, "BYTES": np.object_}
_MISSING = {"INT64": MISSING_INT, "FP32": float("nan"), "BYTES": b""}
_WANTED = {"INT64": "a whole number", "FP32": "a number", "BYTES": "text"}


@dataclass(frozen=True)
class Signature:
    """What the served `recommend` takes and gives."""

    history: int  # H
    exclusions: int  # E
    items_returned: int  # K
    context: dict[str, str]  # column -> Triton's dtype: INT64, FP32 or BYTES
    max_batch: int  # users per call

    @classmethod
    def of(cls, inputs: dict[str, tuple[str, int]], outputs: dict[str, tuple[str, int]], max_batch: int) -> Signature:
        """inputs, outputs: name -> (Triton's dtype, length), as a model configuration lists them. Raises InvalidRequest."""
        missing = [name for name in ("user_id", "history", "exclude") if name not in inputs]
        missing += [name for name in ("item_ids", "scores", "degraded", "generation") if name not in outputs]
        if missing:
            raise InvalidRequest(
                f"The model has no tensor {', '.join(missing)}: it is not a `recommend` of this project. "
                "Serve a repository that `make export` wrote, or name the right --url."
            )
        context = {name: dtype for name, (dtype, _) in inputs.items() if name not in ("user_id", "history", "exclude")}
        return cls(inputs["history"][1], inputs["exclude"][1], outputs["item_ids"][1], context, max_batch)


def encode(queries: Sequence[Query], signature: Signature) -> dict[str, np.ndarray]:
    """Queries with integer ids -> every input tensor [B, …], with its fill where a query says nothing.

    All of them always: tritonserver batches only requests that send the same tensors (docs/serving.md).
    A history keeps its newest H items. Exclusions beyond E do not fit the tensor: `decode` drops those items instead.
    Raises InvalidRequest.
    """
    _check_count(queries, signature)
    user_ids = [ANONYMOUS if query.user_id is None else _id(query.user_id, "user_id", _INT64.min) for query in queries]
    tensors = {
        "user_id": np.array(user_ids, np.int64)[:, None],
        "history": np.full((len(queries), signature.history), PAD_ID, np.int64),
        "exclude": np.full((len(queries), signature.exclusions), PAD_ID, np.int64),
    }
    for row, query in enumerate(queries):
        _fill_history(tensors["history"][row], query)
        ids = [_id(item, "exclude", 0) for item in query.exclude][: signature.exclusions]
        tensors["exclude"][row, : len(ids)] = ids
    return tensors | _encode_context(queries, signature)


def decode(outputs: dict[str, np.ndarray], queries: Sequence[Query], k: int | None) -> list[Recommendations]:
    """Output tensors [B, …] -> one answer per query, without padding and excluded items, k at most."""
    answers = []
    for row, query in enumerate(queries):
        excluded = set(query.exclude)
        served = [
            (int(item_id), float(score))
            for item_id, score in zip(outputs["item_ids"][row], outputs["scores"][row], strict=True)
            if item_id != PAD_ID and int(item_id) not in excluded
        ][:k]
        degraded, generation = Degraded(int(outputs["degraded"][row, 0])), int(outputs["generation"][row, 0])
        answers.append(Recommendations(tuple(i for i, _ in served), tuple(s for _, s in served), degraded, generation))
    return answers


def check_k(k: int | None, signature: Signature) -> None:
    """Raises InvalidRequest unless the server can return k items; None asks for all it returns."""
    if k is None:
        return
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise InvalidRequest(f"k is {k!r}; expected a whole number from 1 to {signature.items_returned}.")
    if k > signature.items_returned:
        raise InvalidRequest(
            f"k is {k}; this server returns {signature.items_returned} items at most. Ask for fewer, or export with a larger K."
        )


def _check_count(queries: Sequence[Query], signature: Signature) -> None:
    if not queries:
        raise InvalidRequest("There is no query in the call; expected one at least.")
    if len(queries) > signature.max_batch:
        raise InvalidRequest(
            f"The call has {len(queries)} queries; this server takes {signature.max_batch} at most. Split the call."
        )


def _id(value: object, name: str, at_least: int) -> int:
    if isinstance(value, str):
        raise InvalidRequest(
            f"{name} is {value!r}, a name; ids on the wire are whole numbers. "
            "Send the number, or give the client the catalogue of a repository whose ids are names."
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidRequest(f"{name} is {value!r}; expected a whole number.")
    if not at_least <= value <= _INT64.max:
        raise InvalidRequest(f"{name} is {value}; expected a whole number from {at_least} to {_INT64.max}.")
    return int(value)


def _fill_history(row: np.ndarray, query: Query) -> None:
    """row: i8 [H], all PAD_ID."""
    if query.history is None:
        row[:] = FROM_STORE
        return
    ids = [_id(item, "history", 0) for item in query.history][: len(row)]
    row[: len(ids)] = ids


def _encode_context(queries: Sequence[Query], signature: Signature) -> dict[str, np.ndarray]:
    """A [B, 1] tensor for each column, with the marker of a missing value where a query does not name it."""
    used = {name for query in queries for name in query.context}
    for name in sorted(used - signature.context.keys()):
        known = ", ".join(signature.context) or "none at all"
        raise InvalidRequest(f"context has no column {name!r}; this server knows {known}. Correct the name or leave it out.")
    return {
        name: np.array([[_context_value(name, dtype, query)] for query in queries], _NUMPY[dtype])
        for name, dtype in signature.context.items()
    }


def _context_value(name: str, dtype: str, query: Query) -> int | float | bytes:
    value = query.context.get(name)
    if value is None:
        return _MISSING[dtype]
    try:
        if dtype == "BYTES":
            return value if isinstance(value, bytes) else str(value).encode()
        if dtype == "FP32":
            return float(value)
        if int(value) != value and not isinstance(value, str):
            raise ValueError(value)
        return int(np.int64(int(value)))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"context {name} is {value!r}; expected {_WANTED[dtype]}.") from None
