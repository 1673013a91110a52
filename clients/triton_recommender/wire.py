"""Encode queries as tensors, and decode answers. Nothing here does I/O.

The sizes H, E and K and the context columns come from the server's own description of the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from triton_recommender.errors import InvalidRequest
from triton_recommender.models import ContextValue, ModelDescription, Query, Recommendations
from triton_recommender.tensors import ANONYMOUS, FROM_STORE, MISSING_INT, PAD_ID, STAGES, Degraded, Sources

INT64, FLOAT32 = np.iinfo(np.int64), np.finfo(np.float32)
NUMPY_DTYPES = {"INT64": np.int64, "FP32": np.float32, "BYTES": np.object_}
_MISSING: dict[str, int | float | bytes] = {"INT64": MISSING_INT, "FP32": float("nan"), "BYTES": b""}
_WANTED = {"INT64": "a whole number of 64 bits", "FP32": "a finite number of 32 bits", "BYTES": "text"}
OWN_INPUTS = ("user_id", "history", "exclude", "after", "category", "among")


@dataclass(frozen=True)
class Signature:
    """Sizes and context columns of the served `recommend`."""

    history: int  # H, item ids in a history
    exclusions: int  # E, item ids that the server excludes
    items_returned: int  # K, items in an answer
    context: Mapping[str, str]  # column -> Triton's dtype: INT64, FP32 or BYTES
    max_batch: int  # queries per request
    has_after: bool = False  # whether `after` is one of the inputs
    has_category: bool = False  # likewise
    among: int = 0  # A, item ids to choose from; 0: no such input

    @classmethod
    def of(cls, model: ModelDescription) -> Signature:
        """Read the sizes of a served model. Raises InvalidRequest where it is no `recommend` of this project."""
        missing = [name for name in ("user_id", "history", "exclude") if name not in model.inputs]
        missing += [name for name in ("item_ids", "scores", "degraded", "generation") if name not in model.outputs]
        if missing:
            raise InvalidRequest(
                f"The model has no tensor {', '.join(missing)}: it is not a `recommend` of this project. "
                "Serve a repository that `make export` wrote, or name the right --url."
            )
        return cls(
            history=model.inputs["history"][1],
            exclusions=model.inputs["exclude"][1],
            items_returned=model.outputs["item_ids"][1],
            context={name: dtype for name, (dtype, _) in model.inputs.items() if name not in OWN_INPUTS},
            max_batch=model.max_batch,
            has_after="after" in model.inputs,
            has_category="category" in model.inputs,
            among=model.inputs["among"][1] if "among" in model.inputs else 0,
        )


def encode(queries: Sequence[Query], signature: Signature) -> dict[str, np.ndarray]:
    """Return all input tensors [B, …] of queries whose ids are integers. Fill values replace what a query does not state.

    All tensors but `category` and `among` are always sent: tritonserver batches only requests with the same inputs.
    A history keeps its newest H items. Exclusions beyond E do not fit the tensor: `decode` drops those items instead.
    Raises InvalidRequest.
    """
    if not queries:
        raise InvalidRequest("There is no query in the call; expected at least one.")
    user_ids = [ANONYMOUS if query.user_id is None else validate_id(query.user_id, "user_id", INT64.min) for query in queries]
    tensors = {
        "user_id": np.array(user_ids, np.int64)[:, None],
        "history": np.full((len(queries), signature.history), PAD_ID, np.int64),
        "exclude": np.full((len(queries), signature.exclusions), PAD_ID, np.int64),
    }
    for row, query in enumerate(queries):
        _fill_history(tensors["history"][row], query)
        ids = [validate_id(item, "exclude", 0) for item in query.exclude][: signature.exclusions]
        tensors["exclude"][row, : len(ids)] = ids
    tensors |= _encode_after(queries, signature) | _encode_category(queries, signature) | _encode_among(queries, signature)
    return tensors | encode_context([query.context for query in queries], signature.context)


def decode(
    outputs: Mapping[str, np.ndarray], queries: Sequence[Query], k: int | None, exclusions: int
) -> list[Recommendations]:
    """Return one answer per query from output tensors [B, …], without padding and excluded items.

    k: the most items in an answer, None for all; exclusions: E of the signature
    If a query excludes more than E items, the server may have drawn one at random that is removed here. Propensities from the
    first draw on are then unknown (None).
    """
    answers = []
    item_ids, scores = outputs["item_ids"].tolist(), outputs["scores"].tolist()
    degraded, generations = outputs["degraded"].tolist(), outputs["generation"].tolist()
    for row, query in enumerate(queries):
        excluded_ids = {PAD_ID, *query.exclude}
        places = [place for place, item_id in enumerate(item_ids[row]) if item_id not in excluded_ids][:k]
        shown_ids, shown_scores = (tuple(values[row][place] for place in places) for values in (item_ids, scores))
        propensities: tuple[float | None, ...] = ()
        if "propensities" in outputs:
            propensities = _decode_propensities(outputs["propensities"][row], len(query.exclude) <= exclusions, places)
        sources: tuple[Sources, ...] = ()
        if "sources" in outputs:
            bits = outputs["sources"][row].tolist()
            sources = tuple(_read_sources(bits[place]) for place in places)
        stage_ms: dict[str, float] = {}
        if "stage_ms" in outputs and outputs["stage_ms"][row].any():
            stage_ms = dict(zip(STAGES, outputs["stage_ms"][row].tolist(), strict=True))
        lineage = (Degraded(degraded[row][0]), generations[row][0])
        answers.append(Recommendations(shown_ids, shown_scores, *lineage, propensities, sources, stage_ms))
    return answers


@cache
def _read_sources(bits: int) -> Sources:
    """Return the sources that bits name. Making a flag costs much, and few combinations occur."""
    return Sources(bits)


def _decode_propensities(propensities: np.ndarray, all_excluded: bool, places: list[int]) -> tuple[float | None, ...]:
    """Return the propensities of these places, None where unknown. propensities: float32 [K], 0 where unknown

    all_excluded: whether the server received every exclusion; if not, all are unknown from the first draw on
    """
    n_known = len(propensities) if all_excluded else int(np.argmax(np.append(propensities != 1.0, True)))
    values = propensities.tolist()
    return tuple(values[place] if place < n_known and values[place] else None for place in places)


def check_k(k: int | None, most: int) -> None:
    """Raise InvalidRequest unless the server, which returns `most` items, can return k; None stands for all it returns."""
    if k is None:
        return
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise InvalidRequest(f"k is {k!r}; expected a whole number from 1 to {most}.")
    if k > most:
        remedy = "Ask for fewer, or export with a larger [pipeline] items_returned."
        raise InvalidRequest(f"k is {k}; this server returns {most} items at most. {remedy}")


def check_among(count: int, most: int) -> None:
    """Raise InvalidRequest unless a request can name `count` items in `among`, which takes `most`."""
    if not 0 < count <= most:
        remedy = "Send fewer" if count else "Leave `among` out for the whole catalogue"
        raise InvalidRequest(f"among has {count} items; expected 1 to {most}. {remedy}.")


def validate_items(items: object, name: str) -> list:
    """Return the items of `history`, `exclude` or `among` as a list. Raises InvalidRequest for a bare text, number or mapping.

    A text is a sequence of letters: without this check, exclude="SKU/0010-x" would exclude ten one-letter items.
    """
    if isinstance(items, str | bytes):
        raise InvalidRequest(f"{name} is the text {items!r}; expected a list of item ids. Write {name}=[{items!r}].")
    if isinstance(items, np.ndarray) and items.ndim == 1:
        return items.tolist()
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise InvalidRequest(f"{name} is {items!r}; expected a list of item ids, such as [22423].")
    return list(items)


def validate_id(value: object, name: str, at_least: int) -> int:
    """Return an id for the wire. Raises InvalidRequest for anything but a whole number from `at_least` to the largest int64."""
    if isinstance(value, str):
        raise InvalidRequest(
            f"{name} is {value!r}, a name; ids on the wire are whole numbers. "
            "Send the number, or give the client the catalogue of a repository whose ids are names (--repo of the commands)."
        )
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidRequest(f"{name} is {value!r}; expected a whole number.")
    if not at_least <= value <= INT64.max:
        raise InvalidRequest(f"{name} is {value}; expected a whole number from {at_least} to {INT64.max}.")
    return int(value)


def encode_context(rows: Sequence[Mapping[str, ContextValue]], columns: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Return a [B, 1] tensor for each column. A row that lacks the column gets the marker of a missing value.

    columns: column -> Triton's dtype. Raises InvalidRequest.
    """
    check_columns({name for row in rows for name in row}, columns)
    return encode_values(rows, columns, "context ")


def check_columns(names: Iterable[str], known: Mapping[str, str]) -> None:
    """Raise InvalidRequest where a caller names a context column that the server does not have."""
    if unknown := sorted(set(names) - known.keys()):
        raise InvalidRequest(
            f"context has no column {unknown[0]!r}; this server knows {', '.join(known) or 'none at all'}. "
            "Correct the name or leave it out."
        )


def encode_values(
    rows: Sequence[Mapping[str, ContextValue]], dtypes: Mapping[str, str], label: str = ""
) -> dict[str, np.ndarray]:
    """Return a [B, 1] tensor for each name. label: text before the name in error messages. Raises InvalidRequest."""
    return {
        name: np.array([[_encode_value(label + name, dtype, row.get(name))] for row in rows], NUMPY_DTYPES[dtype])
        for name, dtype in dtypes.items()
    }


def _fill_history(row: np.ndarray, query: Query) -> None:
    """Write a query's history, or FROM_STORE if it has none, into `row`: int64 [H], which holds PAD_ID."""
    if query.history is None:
        row[:] = FROM_STORE
        return
    ids = [validate_id(item, "history", 0) for item in query.history][: len(row)]
    row[: len(ids)] = ids


def _encode_after(queries: Sequence[Query], signature: Signature) -> dict[str, np.ndarray]:
    if signature.has_after:
        rows = [[PAD_ID if query.after is None else validate_id(query.after, "after", 0)] for query in queries]
        return {"after": np.array(rows, np.int64)}
    if any(query.after is not None for query in queries):
        raise InvalidRequest(
            "after is set, but this server's `recommend` has no such input: it serves no live state. "
            "Leave `after` out, or serve a repository that takes events."
        )
    return {}


def _encode_category(queries: Sequence[Query], signature: Signature) -> dict[str, np.ndarray]:
    """Return the tensor only where a query names a category: most name none, and texts cost the server more than numbers do."""
    if all(query.category is None for query in queries):
        return {}
    rows = [[b"" if query.category is None else _encode_name(query.category)] for query in queries]
    _require_input("category", signature.has_category)
    return {"category": np.array(rows, np.object_)}


def _encode_among(queries: Sequence[Query], signature: Signature) -> dict[str, np.ndarray]:
    """Return the tensor only where a query names items to choose from: most name none, and it is larger than all others."""
    if all(query.among is None for query in queries):
        return {}
    _require_input("among", signature.among > 0)
    among = np.full((len(queries), signature.among), PAD_ID, np.int64)
    for row, query in zip(among, queries, strict=True):
        if query.among is not None:
            ids = [validate_id(item, "among", 0) for item in query.among]
            check_among(len(ids), len(row))
            row[: len(ids)] = ids
    return {"among": among}


def _require_input(name: str, exists: bool) -> None:
    """Raise InvalidRequest unless the served `recommend` has an input that a query sets."""
    if not exists:
        raise InvalidRequest(
            f"{name} is set, but this server's `recommend` has no such input: an older version exported its repository. "
            f"Leave `{name}` out, or export again."
        )


def _encode_name(category: object) -> bytes:
    try:
        if isinstance(category, str) and (name := category.strip()):  # as exports and `upsert` do
            return name.encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        pass
    raise InvalidRequest(f"category is {category!r}; expected the name of a category, or None for the whole catalogue.")


def _encode_value(name: str, dtype: str, value: ContextValue) -> int | float | bytes:
    if value is None:
        return _MISSING[dtype]
    try:
        if dtype == "BYTES":
            return value if isinstance(value, bytes) else str(value).encode()
        if dtype == "FP32":
            number = float(value)
            if abs(number) > FLOAT32.max:
                raise OverflowError(value)
            return number
        if int(value) != value and not isinstance(value, str):
            raise ValueError(value)
        return int(np.int64(int(value)))
    except (TypeError, ValueError, OverflowError):
        raise InvalidRequest(f"{name} is {value!r}; expected {_WANTED[dtype]}.") from None
