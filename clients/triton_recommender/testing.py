"""Doubles for the tests of code that calls this package: no server, no network, and the same checks as on the wire.

    from triton_recommender.testing import FakeRecommender

    shop = FakeRecommender(lambda query: [3, 1, 2])          # item ids, best first
    assert shop.recommend(17850, k=2).item_ids == (3, 1)
    shop.observe(17850, 3, "purchase", event_id="order-1")
    assert shop.events == [Event(17850, 3, "purchase", event_id="order-1")]

The handler gets each Query as a server would understand it (ids, history and exclusions as sent, absent context left out).
It returns item ids, best first, or a whole Recommendations, or raises one of triton_recommender.errors. Invalid queries
are refused here too, and so are events and changes that every server refuses. The fake knows neither data set nor clock: it
takes every kind of event, every column of an item or user, and future timestamps. FakeRecommender takes the other arguments of
Recommender as well (catalogue, strict, cache, …); AsyncFakeRecommender is its asyncio twin.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from triton_recommender.async_recommender import AsyncRecommender
from triton_recommender.errors import InvalidRequest, ModelNotFound
from triton_recommender.models import Call, Event, ModelDescription, Query, Recommendations
from triton_recommender.recommender import Recommender
from triton_recommender.tensors import (
    ANONYMOUS,
    CHALLENGER,
    FROM_STORE,
    MISSING_INT,
    OBSERVE,
    PAD_ID,
    PROBE_USER_ID,
    RECOMMEND,
    STAGES,
    UPSERT,
)
from triton_recommender.wire import OWN_INPUTS

Handler = Callable[[Query], Sequence[int] | Recommendations]

EARLIEST_MS = 100_000_000_000  # of an event; a time in seconds is below it
MAX_TEXT_BYTES = 128  # of event_id and request_id
MAX_COLUMN_BYTES = 1024  # of a context text of an event
MAX_CHANGE_BYTES = 64 << 10  # of the columns of a change, as JSON

_OUTPUTS = {"degraded": ("INT32", 1), "generation": ("INT64", 1)}
_SEQUENCE = {"sequence": ("INT64", 1)}
_ID = ("INT64", 1)


def describe_models(
    history: int, exclusions: int, items_returned: int, context: Mapping[str, str], max_batch: int, candidates: int = 256
) -> dict[str, ModelDescription]:
    """Return the three models as a server describes them. context: column -> INT64, FP32 or BYTES."""
    columns = {name: (dtype, 1) for name, dtype in context.items()}
    query = {"user_id": _ID, "history": ("INT64", history), "exclude": ("INT64", exclusions), "after": _ID}
    query |= {"category": ("BYTES", 1), "among": ("INT64", candidates)}
    answer = {"item_ids": ("INT64", items_returned), "scores": ("FP32", items_returned), **_OUTPUTS}
    answer |= {"propensities": ("FP32", items_returned), "sources": ("INT32", items_returned)}
    answer |= {"stage_ms": ("FP32", len(STAGES))}
    event = {"user_id": _ID, "item_id": _ID, "event": ("BYTES", 1), "timestamp_ms": _ID, "value": ("FP32", 1)}
    event |= {"event_id": ("BYTES", 1), "request_id": ("BYTES", 1)}
    upsert = {"kind": ("BYTES", 1), "id": _ID, "columns": ("BYTES", 1)}
    return {
        RECOMMEND: ModelDescription({**query, **columns}, answer, max_batch),
        OBSERVE: ModelDescription({**event, **columns}, _SEQUENCE, max_batch),
        UPSERT: ModelDescription(upsert, _SEQUENCE, max_batch),
    }


class FakeServer:
    """A server in this process, which answers with `handler`.

    calls, queries, events, upserts: what arrived, oldest first
    models: model -> its description; answers have the outputs described there. Items have the propensity 1.0 unless the handler
        returns Recommendations with other ones.
    history, exclusions, items_returned, candidates: H, E, K, and how many items a query may name in `among`
    served_generation: generation of the answers, unless the handler returns whole Recommendations
    challengers: generation -> handler that answers as this challenger
    """

    def __init__(
        self,
        handler: Handler,
        *,
        history: int = 64,
        exclusions: int = 64,
        items_returned: int = 20,
        context: Mapping[str, str] | None = None,
        max_batch: int = 64,
        candidates: int = 256,
    ) -> None:
        self.handler, self.served_generation, self.items_returned = handler, 1, items_returned
        self.challengers: dict[int, Handler] = {}
        self.models = describe_models(history, exclusions, items_returned, context or {}, max_batch, candidates)
        self.calls: list[Call] = []
        self.queries: list[Query] = []
        self.events: list[Event] = []
        self.upserts: list[tuple[str, int, dict]] = []  # kind, id, columns
        self._keyed: dict[str, tuple[Event, int]] = {}  # event_id -> first event and its sequence
        self._next_sequence = 1

    def answer(self, call: Call) -> dict[str, np.ndarray]:
        """Return the output tensors of a call, as a server would.

        Raises InvalidRequest, ModelNotFound, or whatever the handler raises.
        """
        self.calls.append(call)
        if call.model == CHALLENGER:
            return self._answer_as_challenger(call)
        if call.model == OBSERVE:
            events = _decode_events(call.inputs)
            self._refuse_malformed(events, call)
            return {"sequence": np.array([[self._observe(event)] for event in events], np.int64)}
        if call.model == UPSERT:
            changes = []
            for kind, record_id, text in zip(*(call.inputs[name][:, 0] for name in ("kind", "id", "columns")), strict=True):
                if len(text) > MAX_CHANGE_BYTES:
                    raise InvalidRequest(f"columns has {len(text)} bytes; expected at most {MAX_CHANGE_BYTES}", call)
                if not (columns := json.loads(text)):
                    raise InvalidRequest('columns is not an object with columns; expected one such as {"price": 9.5}', call)
                changes.append((kind.decode(), int(record_id), columns))
            self.upserts += changes  # of a refused request, none counts
            return {"sequence": np.array([[self._new_sequence()] for _ in call.inputs["id"]], np.int64)}
        return self._recommend(_decode_queries(call.inputs))

    def _answer_as_challenger(self, call: Call) -> dict[str, np.ndarray]:
        generation = int(call.version)
        if generation not in self.challengers:
            known = ", ".join(map(str, self.challengers)) or "none"
            raise ModelNotFound(
                f"The fake has no challenger of generation {generation}; it has {known}. "
                "Add its handler to `server.challengers`.",
                call,
            )
        return self._recommend(_decode_queries(call.inputs), self.challengers[generation], generation)

    def _recommend(
        self, queries: list[Query], handler: Handler | None = None, generation: int | None = None
    ) -> dict[str, np.ndarray]:
        self.queries += queries
        answers = [self._ask(query, handler or self.handler, generation or self.served_generation) for query in queries]
        shape = (len(answers), self.items_returned)
        item_ids, scores = np.full(shape, PAD_ID, np.int64), np.zeros(shape, np.float32)
        propensities, sources = np.ones(shape, np.float32), np.zeros(shape, np.int32)
        stage_ms = [[answer.stage_ms.get(stage, 0.0) for stage in STAGES] for answer in answers]
        for row, answer in enumerate(answers):
            n_items = min(len(answer), shape[1])
            item_ids[row, :n_items] = answer.item_ids[:n_items]
            scores[row, :n_items] = answer.scores[:n_items]
            n_known = min(len(answer.propensities), n_items)
            propensities[row, :n_known] = [propensity or 0.0 for propensity in answer.propensities[:n_known]]
            n_named = min(len(answer.sources), n_items)
            sources[row, :n_named] = answer.sources[:n_named]
        outputs: dict[str, np.ndarray] = {
            "item_ids": item_ids,
            "scores": scores,
            "degraded": np.array([[answer.degraded] for answer in answers], np.int32),
            "generation": np.array([[answer.generation] for answer in answers], np.int64),
            "propensities": propensities,
            "sources": sources,
            "stage_ms": np.array(stage_ms, np.float32),
        }
        return {name: outputs[name] for name in self.models[RECOMMEND].outputs}

    def _ask(self, query: Query, handler: Handler, generation: int) -> Recommendations:
        answer = handler(query)
        if isinstance(answer, Recommendations):
            return answer
        scores = tuple(1.0 - rank / max(len(answer), 1) for rank in range(len(answer)))
        return Recommendations(tuple(answer), scores, generation=generation)

    def _refuse_malformed(self, events: list[Event], call: Call) -> None:
        """Raise InvalidRequest as every server does for a request with a malformed event; none of its events counts."""
        firsts = {event_id: first for event_id, (first, _) in self._keyed.items()}
        for event in events:
            _refuse_malformed_event(event, call)
            if event.event_id is not None:
                first = firsts.setdefault(event.event_id, event)
                if (first.user_id, first.item_id, first.event) != (event.user_id, event.item_id, event.event):
                    raise InvalidRequest("event_id was used for an event of another user, item or name before.", call)

    def _observe(self, event: Event) -> int:
        if event.event_id is not None and event.event_id in self._keyed:
            return self._keyed[event.event_id][1]
        self.events.append(event)
        sequence = self._new_sequence()
        if event.event_id is not None:
            self._keyed[event.event_id] = event, sequence
        return sequence

    def _new_sequence(self) -> int:
        self._next_sequence += 1
        return self._next_sequence - 1


class FakeTransport(FakeServer):
    """A FakeServer as Recommender's `transport`."""

    url = "fake"

    def describe(self, model: str, timeout_s: float) -> ModelDescription:
        return self.models[model]

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        return self.answer(call)

    def is_ready(self, model: str, timeout_s: float) -> bool:
        return True

    def read_generation(self, timeout_s: float | None) -> int | None:
        return self.served_generation

    def close(self) -> None:
        """Do nothing: nothing is open."""


class AsyncFakeTransport(FakeServer):
    """A FakeServer as AsyncRecommender's `transport`."""

    url = "fake"

    async def describe(self, model: str, timeout_s: float) -> ModelDescription:
        return self.models[model]

    async def infer(self, call: Call) -> dict[str, np.ndarray]:
        return self.answer(call)

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        return True

    async def read_generation(self, timeout_s: float | None) -> int | None:
        return self.served_generation

    async def close(self) -> None:
        """Do nothing: nothing is open."""


class _Received:
    """Queries, events and upserts that arrived at the fake, oldest first."""

    server: FakeServer

    @property
    def queries(self) -> list[Query]:
        return self.server.queries

    @property
    def events(self) -> list[Event]:
        return self.server.events

    @property
    def upserts(self) -> list[tuple[str, int, dict]]:
        return self.server.upserts


class FakeRecommender(_Received, Recommender):
    """A Recommender without a server. context: column -> INT64, FP32 or BYTES. settings: other arguments of Recommender."""

    def __init__(self, handler: Handler = lambda query: [], *, context: Mapping[str, str] | None = None, **settings) -> None:
        self.server = FakeTransport(handler, context=context)
        super().__init__(transport=self.server, **settings)


class AsyncFakeRecommender(_Received, AsyncRecommender):
    """An AsyncRecommender without a server; arguments as for FakeRecommender."""

    def __init__(self, handler: Handler = lambda query: [], *, context: Mapping[str, str] | None = None, **settings) -> None:
        self.server = AsyncFakeTransport(handler, context=context)
        super().__init__(transport=self.server, **settings)


def _decode_queries(inputs: Mapping[str, np.ndarray]) -> list[Query]:
    """Return the queries that these tensors encode."""
    columns = [name for name in inputs if name not in OWN_INPUTS]
    queries = []
    for row, user_id in enumerate(inputs["user_id"][:, 0].tolist()):
        history = inputs["history"][row].tolist() if "history" in inputs else [FROM_STORE]
        exclude = inputs["exclude"][row].tolist() if "exclude" in inputs else []
        after = int(inputs["after"][row, 0]) if "after" in inputs else PAD_ID
        category = inputs["category"][row, 0].decode() if "category" in inputs else ""
        among = [item for item in inputs["among"][row].tolist() if item != PAD_ID] if "among" in inputs else []
        queries.append(
            Query(
                None if user_id in (ANONYMOUS, PROBE_USER_ID) else user_id,
                None if history[0] == FROM_STORE else [item for item in history if item != PAD_ID],
                [item for item in exclude if item != PAD_ID],
                _read_values({name: inputs[name][row, 0] for name in columns}),
                None if after == PAD_ID else after,
                category=category or None,
                among=among or None,
            )
        )
    return queries


def _decode_events(inputs: Mapping[str, np.ndarray]) -> list[Event]:
    """Return the events that these tensors encode."""
    details = ("user_id", "item_id", "event", "timestamp_ms", "value", "event_id", "request_id")
    events = []
    for row in range(len(inputs["user_id"])):
        values = _read_values({name: array[row, 0] for name, array in inputs.items()})
        context = {name: value for name, value in values.items() if name not in details}
        events.append(Event(**{name: value for name, value in values.items() if name in details}, context=context))
    return events


def _refuse_malformed_event(event: Event, call: Call) -> None:
    """Raise InvalidRequest for what every server refuses."""
    if event.timestamp_ms is not None and event.timestamp_ms < EARLIEST_MS:
        raise InvalidRequest("timestamp_ms is before 1973, as seconds would be; expected unix milliseconds", call)
    limited = [("event_id", event.event_id, MAX_TEXT_BYTES), ("request_id", event.request_id, MAX_TEXT_BYTES)]
    limited += [(name, text, MAX_COLUMN_BYTES) for name, text in event.context.items() if isinstance(text, str)]
    for name, text, most in limited:
        if text is not None and (n_bytes := len(text.encode())) > most:
            raise InvalidRequest(f"{name} has {n_bytes} bytes; expected at most {most}", call)


def _read_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values as int, float or str, without markers of missing ones."""
    given_values = {name: value for name, value in values.items() if value != MISSING_INT and value == value and value != b""}
    return {name: value.decode() if isinstance(value, bytes) else value.item() for name, value in given_values.items()}
