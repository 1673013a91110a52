"""Base of the blocking and the asyncio client: settings, encoding of queries as calls, and decoding of answers."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from numbers import Real

import numpy as np

from triton_recommender.cache.base import Cache
from triton_recommender.catalogue import Catalogue
from triton_recommender.errors import CacheUnavailable, DeadlineExceeded, InvalidRequest, UnknownId
from triton_recommender.ids import FIRST_USER_ID, session_id
from triton_recommender.live import encode_events, encode_upserts
from triton_recommender.models import (
    LONGEST_S,
    Call,
    Event,
    Health,
    ModelDescription,
    Notice,
    Query,
    Recommendations,
    Timeouts,
)
from triton_recommender.tensors import CHALLENGER, NAME, OBSERVE, PROBE_USER_ID, UPSERT
from triton_recommender.wire import Signature, check_k, decode, encode, validate_items

DEFAULT_URL = "localhost:8001"
REREAD_S = 2.0  # least time between two readings of a model's description after refused calls

log = logging.getLogger("triton_recommender")


class Deadline:
    """Time budget of one call of the client, which may send several requests."""

    def __init__(self, timeout_s: float | None) -> None:
        """timeout_s: seconds, None for no limit; 0 or less has passed already. Raises InvalidRequest for any other value."""
        if timeout_s is not None and (
            isinstance(timeout_s, bool) or not isinstance(timeout_s, Real) or not timeout_s <= LONGEST_S
        ):
            expected = f"expected a number of seconds, at most {LONGEST_S:,.0f}, or None for no limit"
            raise InvalidRequest(f"timeout_s is {timeout_s!r}; {expected}.")
        self._timeout_s, self._started_s = timeout_s, time.monotonic()

    def limit(self, call: Call, headers: Mapping[str, str]) -> Call:
        """Return the call with the headers and the remaining time. Raises DeadlineExceeded if none remains."""
        left_s = None if self._timeout_s is None else self._timeout_s - (time.monotonic() - self._started_s)
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(
                f"Not all answers came within {self._timeout_s:.3g} s. Allow more with Timeouts(request=…), or ask for fewer.",
                call,
            )
        return replace(call, timeout_s=left_s, headers=headers)


class SharedClient:
    """Base of both clients. Only its attributes are part of the public interface."""

    def __init__(
        self,
        timeouts: Timeouts | float,
        priority: int,
        catalogue: Catalogue | None,
        strict: bool,
        cache: Cache | None,
        timings: bool,
    ) -> None:
        self.timeouts = timeouts if isinstance(timeouts, Timeouts) else Timeouts(timeouts)
        if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
            raise InvalidRequest(
                f"priority is {priority!r}; expected 1 (the highest) or a larger whole number, 0 for the default."
            )
        if strict and catalogue is None:
            raise InvalidRequest(
                "strict is set without a catalogue, so nothing would be refused. "
                "Give one (--repo of the commands), or leave strict out."
            )
        self.priority, self.catalogue, self.strict, self.cache, self.timings = priority, catalogue, strict, cache, timings
        self.models: dict[str, ModelDescription] = {}  # read in the first call, and again after the server changed them
        self._described_s: dict[str, float] = {}

    def forget_if_outdated(self, model: str, description: ModelDescription) -> bool:
        """Forget the description with which a refused call was encoded, if the server's may have changed since it was read.

        Return whether it may have: then the call is worth encoding again. A description that was read less than REREAD_S ago
        counts as current.
        """
        if self.models.get(model) is not description:  # the server refused it, or another call read a newer one
            return True
        if time.monotonic() - self._described_s[model] < REREAD_S:
            return False
        self.forget_description(model, description)
        return True

    def forget_description(self, model: str, description: ModelDescription) -> None:
        """Forget a model's description, so that the next call reads it again, unless it is newer than `description`."""
        if self.models.get(model) is description:
            self.models.pop(model, None)  # another thread may have removed it meanwhile

    def resolve_queries(self, queries: Sequence[Query | int | str]) -> tuple[list[Query], list[tuple[Notice, ...]]]:
        """Return the queries with text ids resolved to numbers, and the notices of each. Raises InvalidRequest, UnknownId."""
        if isinstance(queries, str | bytes) or not isinstance(queries, Iterable):
            raise InvalidRequest(f"queries is {queries!r}; expected a list of queries or user ids. Write [{queries!r}].")
        resolved, notices = [], []
        for query in queries:
            query = query if isinstance(query, Query) else Query(query)
            query_notices: tuple[Notice, ...] = ()
            if self.catalogue is not None:
                query, query_notices = self.catalogue.resolve(query)
            history = None if query.history is None else validate_items(query.history, "history")
            exclude = validate_items(query.exclude, "exclude")
            among = None if query.among is None else validate_items(query.among, "among")
            user_id = resolve_visitor(query)
            query = replace(query, user_id=user_id, history=history, exclude=exclude, among=among, session=None)
            if query_notices and self.strict:
                raise UnknownId(f"{query_notices[0].message.rpartition(';')[0]}. Correct the name, or leave strict=True out.")
            resolved.append(query)
            notices.append(query_notices)
        return resolved, notices

    def make_recommend_calls(
        self, queries: list[Query], signature: Signature, k: int | None, request_id: str, generation: int | None
    ) -> Iterator[tuple[list[Query], Call]]:
        """Yield the queries in parts of at most the server's batch size, each part with its call.

        generation: of the challenger to ask; None asks the champion. Raises InvalidRequest.
        """
        check_k(k, signature.items_returned)
        if request_id and not is_text(request_id):
            raise InvalidRequest(f"request_id is {request_id!r}; expected a text that UTF-8 can encode.")
        is_number = isinstance(generation, int | np.integer) and not isinstance(generation, bool)
        if generation is not None and not (is_number and generation > 0):
            raise InvalidRequest(f"generation is {generation!r}; expected a whole number from 1, or None for the served one.")
        request_id = request_id or uuid.uuid4().hex
        model = {} if generation is None else {"model": CHALLENGER, "version": str(generation)}
        for part in _split(queries, signature.max_batch):
            yield part, self._make_call(encode(part, signature), request_id=request_id, **model)

    def complete(
        self, answers: list[Recommendations], notices: list[tuple[Notice, ...]], request_id: str
    ) -> list[Recommendations]:
        """Return the answers with names, titles, warnings and the request's id."""
        described = [((), ()) if self.catalogue is None else self.catalogue.describe(answer) for answer in answers]
        return [
            replace(answer, names=names, titles=titles, warnings=answer_notices, request_id=request_id)
            for answer, (names, titles), answer_notices in zip(answers, described, notices, strict=True)
        ]

    def resolve_events(self, events: Sequence[Event]) -> list[Event]:
        """Return the events as `resolve_event` does. Raises InvalidRequest."""
        if not isinstance(events, Iterable):
            raise InvalidRequest(f"events is {events!r}; expected a list of events. Write [{events!r}].")
        return [self.resolve_event(event) for event in events]

    def resolve_event(self, event: Event) -> Event:
        """Return the event with text ids resolved to numbers; an unknown text gets the id that an export would give it.

        Raises InvalidRequest.
        """
        if not isinstance(event, Event):
            raise InvalidRequest(f"An event is {event!r}; expected an Event.")
        if self.catalogue is not None:
            user_id = event.user_id if event.user_id is None else self.catalogue.user_id(event.user_id)
            event = replace(event, user_id=user_id, item_id=self.catalogue.item_id(event.item_id))
        return replace(event, user_id=resolve_visitor(event), session=None)

    def make_observe_calls(self, events: list[Event], model: ModelDescription) -> Iterator[Call]:
        """Yield calls of `observe`, each with at most as many events as the server takes. Raises InvalidRequest."""
        for part in _split(events, model.max_batch):
            keyed = all(event.event_id is not None for event in part)
            yield self._make_call(encode_events(part, model), model=OBSERVE, safe_to_repeat=keyed)

    def make_upsert_calls(
        self, kind: str, changes: Iterable[tuple[int | str, Mapping[str, object]]], model: ModelDescription
    ) -> Iterator[Call]:
        """Yield calls of `upsert`, each with at most as many changes as the server takes. Raises InvalidRequest."""
        if not isinstance(changes, Iterable):
            raise InvalidRequest(f"changes is {changes!r}; expected pairs of id and columns, such as the items() of a dict.")
        for part in _split([self._resolve_change(kind, change) for change in changes], model.max_batch):
            yield self._make_call(encode_upserts(kind, part), model=UPSERT, safe_to_repeat=False)

    def _resolve_change(
        self, kind: str, change: tuple[int | str, Mapping[str, object]]
    ) -> tuple[int | str, Mapping[str, object]]:
        """Return the id on the wire and the columns. Raises InvalidRequest for a change that is not a pair.

        The text of an item that the catalogue does not know goes along: the server and the next export see only its hash.
        """
        try:
            record_id, columns = change
        except (TypeError, ValueError) as error:
            raise InvalidRequest(
                f"A change is {change!r}; expected a pair of id and columns; of a dict, its items()."
            ) from error
        if self.catalogue is not None:
            text = record_id.strip() if isinstance(record_id, str) else ""
            record_id = self.catalogue.user_id(record_id) if kind == "user" else self.catalogue.item_id(record_id)
            is_named = kind == "item" and text and self.catalogue.item_names and isinstance(columns, Mapping) and columns
            if is_named and isinstance(record_id, int) and self.catalogue.item_name(record_id) is None:
                columns = {NAME: text, **columns}
        if kind == "user":
            refuse_reserved(record_id)
        return record_id, columns

    def make_health_call(self, signature: Signature) -> Call:
        """Return one real request, which the servers' measurements of requests leave out."""
        return replace(self._make_call(encode([Query(PROBE_USER_ID)], signature)), timeout_s=self.timeouts.connect)

    def describe_span(self, call: Call) -> dict[str, str | int]:
        """Return the attributes of a call in a trace, without user ids."""
        first = next(iter(call.inputs.values()))
        return {"triton.model": call.model, "triton.batch": len(first), "triton.request_id": call.request_id}

    def warn_of_stale_answers(self, error: CacheUnavailable) -> None:
        log.warning("cached answers of users with new events stay until they expire: %s", error)

    def _make_call(self, inputs: dict[str, np.ndarray], **settings) -> Call:
        timeouts = self.timeouts
        return Call(
            inputs,
            queue_timeout_us=timeouts.queue_us,
            priority=self.priority,
            tell_server=timeouts.tell_server,
            timings=self.timings,
            **settings,
        )


def resolve_visitor(request: Query | Event) -> int | str | None:
    """Return the id of the user or of the session. Raises InvalidRequest for both, or for a user id reserved for sessions."""
    if request.session is None:
        user_id = int(request.user_id) if isinstance(request.user_id, np.integer) else request.user_id
        refuse_reserved(user_id)
        return user_id
    if request.user_id is not None:
        raise InvalidRequest("Both user_id and session are given; expected one of them. Leave the other out.")
    if not isinstance(request.session, str) or not request.session:
        raise InvalidRequest(f"session is {request.session!r}; expected a text that is not empty.")
    return session_id(request.session)


def refuse_reserved(user_id: int | str | None) -> None:
    """Raise InvalidRequest for a user id that is reserved for sessions."""
    if isinstance(user_id, int | np.integer) and user_id < FIRST_USER_ID:
        raise InvalidRequest(f"user_id is {user_id}; ids below {FIRST_USER_ID} are reserved for sessions. Use another id.")


def is_text(value: object) -> bool:
    """Return whether a value is a text that UTF-8 can encode. One with a lone surrogate cannot be sent."""
    try:
        return isinstance(value, str) and value.encode() is not None
    except UnicodeEncodeError:
        return False


def list_urls(url: str | Sequence[str]) -> list[str]:
    """Return the addresses of equal servers, in the order of preference."""
    return [url] if isinstance(url, str) or not isinstance(url, Iterable) else list(url)


def judge_health(url: str, outputs: Mapping[str, np.ndarray]) -> Health:
    """Return the health of the server that gave an answer; an answer without items counts as a failure."""
    [answer] = decode(outputs, [Query(None)], None, exclusions=0)
    if not len(answer):
        return Health(url, False, "it answers without a single item", answer.generation, answer.degraded)
    return Health(url, True, "", answer.generation, answer.degraded)


def _split(rows: list, size: int) -> Iterator[list]:
    if not rows:
        raise InvalidRequest("There is no query, event or change in the call; expected at least one.")
    for start in range(0, len(rows), size):
        yield rows[start : start + size]
