"""The blocking client. `async_recommender.py` has the one for asyncio, `client.py` what both share.

with Recommender("localhost:8001", timeouts=Timeouts(request=0.5)) as shop:
    for item_id, score in shop.recommend(17850, exclude=[22423], k=10):
        ...
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, Unpack

from triton_recommender.cache.base import Cache
from triton_recommender.cache.transport import CachedTransport
from triton_recommender.catalogue import Catalogue
from triton_recommender.client import DEFAULT_URL, Deadline, SharedClient, judge_health, list_urls
from triton_recommender.endpoints import Endpoint, Endpoints, Policy
from triton_recommender.errors import CacheUnavailable, InvalidRequest, ModelNotFound, RecommenderError
from triton_recommender.live import decode_sequences
from triton_recommender.models import (
    DEFAULT_TIMEOUTS,
    Call,
    ContextValue,
    Event,
    EventDetails,
    Health,
    ModelDescription,
    Query,
    Recommendations,
    Timeouts,
    Tls,
)
from triton_recommender.tensors import OBSERVE, RECOMMEND, UPSERT
from triton_recommender.tracing import client_span
from triton_recommender.transports import open_transport
from triton_recommender.wire import Signature, decode


class Recommender(SharedClient):
    """Blocking client of one server or of several equal ones. Safe to share between threads; close it, or use `with`.

    url:           host:port of the server's gRPC endpoint, or http://host:port of its HTTP endpoint; or a list of such
                   addresses of equal servers, the preferred one first
    timeouts:      a Timeouts, or seconds for a whole call
    priority:      1 is served first, if the repository was exported with priority levels (off by default); 0: server's default
    retries:       further attempts inside the timeout. Only calls that are safe to repeat get any: `recommend` always,
                   `observe` if every event has an event_id, `upsert` never
    hedge_after_s: send a call of `recommend` to a second endpoint if the first has not answered after so many seconds, or
                   after half of the call's time; the first answer wins. The server's p95 is a good value: then one call in
                   twenty is sent twice.
    tls:           root certificates, and the client's own where the server asks for them
    headers:       sent with every request, such as {"authorization": "Bearer …"}
    catalogue:     puts names and titles into answers, and resolves the ids of shops whose ids are text
    strict:        raise UnknownId for a user or item that the catalogue does not know, instead of a warning in the answer;
                   events and changes may name new ones all the same
    cache:         a MemoryCache or RedisCache; several clients may share it, and whoever created it closes it
    timings:       ask how long each stage of the server takes (`Recommendations.stage_ms`)
    transport:     used in place of `url`; triton_recommender.testing has a fake that needs no server
    """

    def __init__(
        self,
        url: str | Sequence[str] = DEFAULT_URL,
        *,
        timeouts: Timeouts | float = DEFAULT_TIMEOUTS,
        priority: int = 0,
        retries: int = 2,
        hedge_after_s: float | None = None,
        tls: Tls | None = None,
        headers: Mapping[str, str] | None = None,
        catalogue: Catalogue | None = None,
        strict: bool = False,
        cache: Cache | None = None,
        timings: bool = False,
        transport=None,
    ) -> None:
        super().__init__(timeouts, priority, catalogue, strict, cache, timings)
        transports = (
            [transport]
            if transport is not None
            else [open_transport(address, tls, headers or {}) for address in list_urls(url)]
        )
        endpoints = [Endpoint(transport) for transport in transports]
        self._endpoints = Endpoints(endpoints, Policy.from_timeouts(self.timeouts, retries, hedge_after_s))
        self._transport = CachedTransport(self._endpoints, cache) if cache is not None else self._endpoints

    def recommend(
        self,
        user_id: int | str | None = None,
        *,
        history: Sequence[int | str] | None = None,
        exclude: Sequence[int | str] = (),
        context: Mapping[str, ContextValue] | None = None,
        after: int | None = None,
        session: str | None = None,
        category: str | None = None,
        among: Sequence[int | str] | None = None,
        k: int | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        generation: int | None = None,
    ) -> Recommendations:
        """Return one user's recommendations; see Query for the arguments.

        k: how many items at most, None for all that the server returns
        request_id: your own id, which the answer, the server's trace and its log repeat; "": the client makes one
        timeout_s: limit of this call; None is the client's `timeouts.request`
        generation: ask this generation, which must be loaded as a challenger, for tests; None asks the served one
        Raises RecommenderError; triton_recommender.errors has the tree.
        """
        query = Query(user_id, history, exclude, context or {}, after, session, category, among)
        return self.recommend_many([query], k=k, request_id=request_id, timeout_s=timeout_s, generation=generation)[0]

    def recommend_many(
        self,
        queries: Sequence[Query | int | str],
        *,
        k: int | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        generation: int | None = None,
    ) -> list[Recommendations]:
        """Return one answer per query, in their order. A bare id stands for Query(id). Raises RecommenderError.

        If the server does not take all queries in one request, they are sent in several, one after the other, inside one
        timeout. Their answers may come from two generations if another one is activated meanwhile.
        """
        resolved, notices = self.resolve_queries(queries)
        model, deadline = self._describe(RECOMMEND), Deadline(self.timeouts.request if timeout_s is None else timeout_s)
        try:
            answers, request_id = self._ask(resolved, model, deadline, k, request_id, generation)
        except InvalidRequest:
            if (newer := self._describe_again(RECOMMEND, model)) is None:
                raise
            answers, request_id = self._ask(resolved, newer, deadline, k, request_id, generation)
        return self.complete(answers, notices, request_id)

    def observe(
        self, user_id: int | str | None, item_id: int | str, event: str | None = None, **details: Unpack[EventDetails]
    ) -> int:
        """Tell the server what a user did. Return the event's sequence once the event is durable.

        details: the other fields of Event. Pass the result to `recommend(after=…)` to see the event's effect at once.
        An event without an `event_id` is never sent twice, so after NoAnswer it is unknown whether it arrived.
        Raises RecommenderError.
        """
        return self.observe_many([Event(user_id, item_id, event, **details)])[0]

    def observe_many(self, events: Sequence[Event]) -> list[int]:
        """Tell the server what users did. Return one sequence per event, in their order, once all events are durable.

        If the server does not take all events in one request, they are sent in several: after an error, the first of them may
        be durable. Events with an `event_id` may simply be sent again. Raises RecommenderError.
        """
        resolved = self.resolve_events(events)
        model, deadline = self._describe(OBSERVE), Deadline(self.timeouts.request)
        sequences: list[int] = []
        try:
            try:
                for call in self.make_observe_calls(resolved, model):
                    sequences += decode_sequences(self._infer(call, deadline, model))
            except InvalidRequest:
                if (newer := self._describe_again(OBSERVE, model)) is None:
                    raise
                for call in self.make_observe_calls(resolved[len(sequences) :], newer):
                    sequences += decode_sequences(self._infer(call, deadline, newer))
        finally:
            self._forget([event.user_id for event in resolved if isinstance(event.user_id, int)])
        return sequences

    def upsert(self, kind: str, record_id: int | str, columns: Mapping[str, object]) -> int:
        """Tell the server that an item or user is new or changed. Return the change's sequence.

        kind: "item" or "user";  columns: name -> value, as the data set declares them; all other columns stay as they are
        It is never sent twice, because a late second arrival could undo a later change. The client's cache forgets a changed
        user; cached lists stay as they are when an item changes. Raises RecommenderError.
        """
        return self.upsert_many(kind, [(record_id, columns)])[0]

    def upsert_many(self, kind: str, changes: Iterable[tuple[int | str, Mapping[str, object]]]) -> list[int]:
        """Tell the server of many new or changed items, or of many users. Return the changes' sequences, in their order.

        changes: pairs of id and columns, such as `{22423: {"price": 9.5}}.items()`; the rest is as in `upsert`
        They are sent in as many requests as the server's batch size demands, one after the other, each with a timeout of its
        own. A request with a change that the server refuses changes nothing. After a request that fails none is sent, but those
        before it have taken effect: send all changes again.
        """
        model = self._describe(UPSERT)
        sequences: list[int] = []
        for call in list(self.make_upsert_calls(kind, changes, model)):  # all are checked before one is sent
            try:
                sequences += decode_sequences(self._infer(call, Deadline(self.timeouts.request), model))
            finally:
                if kind == "user":
                    self._forget(call.inputs["id"][:, 0].tolist())
        return sequences

    def signature(self) -> Signature:
        """Return sizes and context columns of the served `recommend`. They are read once, and again after a refused call."""
        return Signature.of(self._describe(RECOMMEND))

    def health(self) -> list[Health]:
        """Send every endpoint one real request, bypassing cache and circuit breakers, and return each one's health."""
        self._endpoints.require_open()
        return [self._health(endpoint.transport) for endpoint in self._endpoints.endpoints]

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _describe(self, model: str) -> ModelDescription:
        """Return a model's description. Every call begins with it, so it refuses a closed client even where a cache answers."""
        self._endpoints.require_open()
        description = self.models.get(model)
        if description is None:
            description = self._transport.describe(model, self.timeouts.connect)
            self._described_s[model] = time.monotonic()  # first: other threads look it up for every known model
            self.models[model] = description
        return description

    def _describe_again(self, model: str, description: ModelDescription) -> ModelDescription | None:
        """Return the description after a refused call, None where it is the same or cannot be read."""
        if not self.forget_if_outdated(model, description):
            return None
        try:
            newer = self._describe(model)
        except RecommenderError:
            return None  # the refusal says more
        return None if newer == description else newer

    def _ask(
        self,
        queries: list[Query],
        model: ModelDescription,
        deadline: Deadline,
        k: int | None,
        request_id: str,
        generation: int | None,
    ) -> tuple[list[Recommendations], str]:
        """Return the answers to resolved queries, encoded by the server's description, and the request's id."""
        signature = Signature.of(model)
        answers: list[Recommendations] = []
        for part, call in self.make_recommend_calls(queries, signature, k, request_id, generation):
            answers += decode(self._infer(call, deadline, model), part, k, signature.exclusions)
        return answers, call.request_id

    def _infer(self, call: Call, deadline: Deadline, description: ModelDescription) -> dict:
        with client_span(call.model, self.describe_span(call)) as headers:
            try:
                return self._transport.infer(deadline.limit(call, headers))
            except (InvalidRequest, ModelNotFound):
                self.forget_description(call.model, description)  # another generation may have other tensors
                raise

    def _health(self, transport) -> Health:
        try:
            if not transport.is_ready(RECOMMEND, self.timeouts.connect):
                return Health(transport.url, False, "`recommend` is not ready: it is loading, unloaded or broken")
            signature = Signature.of(transport.describe(RECOMMEND, self.timeouts.connect))
            return judge_health(transport.url, transport.infer(self.make_health_call(signature)))
        except Exception as error:
            self._endpoints.require_open()  # closing ends the exchange with errors of many kinds
            if not isinstance(error, RecommenderError):
                raise
            return Health(transport.url, False, str(error))

    def _forget(self, user_ids: list[int]) -> None:
        if self.cache is None:
            return
        try:
            self.cache.forget(user_ids)
        except CacheUnavailable as error:
            self.warn_of_stale_answers(error)
