"""The asyncio client. `recommender.py` has the blocking one, `client.py` what both share."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, Unpack

from triton_recommender.cache.base import Cache
from triton_recommender.cache.transport import AsyncCachedTransport
from triton_recommender.catalogue import Catalogue
from triton_recommender.client import DEFAULT_URL, Deadline, SharedClient, judge_health, list_urls
from triton_recommender.endpoints import AsyncEndpoints, Endpoint, Policy, drop_result
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
from triton_recommender.transports import open_async_transport
from triton_recommender.wire import Signature, decode


class AsyncRecommender(SharedClient):
    """Client for asyncio, with the same arguments, answers and errors as Recommender. It belongs to one event loop."""

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
        self._readings: dict[str, asyncio.Task[ModelDescription]] = {}  # the latest of each model's description
        transports = (
            [transport]
            if transport is not None
            else [open_async_transport(address, tls, headers or {}) for address in list_urls(url)]
        )
        endpoints = [Endpoint(transport) for transport in transports]
        self._endpoints = AsyncEndpoints(endpoints, Policy.from_timeouts(self.timeouts, retries, hedge_after_s))
        self._transport = AsyncCachedTransport(self._endpoints, cache) if cache is not None else self._endpoints

    async def recommend(
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
        """See Recommender.recommend."""
        query = Query(user_id, history, exclude, context or {}, after, session, category, among)
        return (await self.recommend_many([query], k=k, request_id=request_id, timeout_s=timeout_s, generation=generation))[0]

    async def recommend_many(
        self,
        queries: Sequence[Query | int | str],
        *,
        k: int | None = None,
        request_id: str = "",
        timeout_s: float | None = None,
        generation: int | None = None,
    ) -> list[Recommendations]:
        """See Recommender.recommend_many."""
        resolved, notices = self.resolve_queries(queries)
        model, deadline = await self._describe(RECOMMEND), Deadline(self.timeouts.request if timeout_s is None else timeout_s)
        try:
            answers, request_id = await self._ask(resolved, model, deadline, k, request_id, generation)
        except InvalidRequest:
            if (newer := await self._describe_again(RECOMMEND, model)) is None:
                raise
            answers, request_id = await self._ask(resolved, newer, deadline, k, request_id, generation)
        return self.complete(answers, notices, request_id)

    async def observe(
        self, user_id: int | str | None, item_id: int | str, event: str | None = None, **details: Unpack[EventDetails]
    ) -> int:
        """See Recommender.observe."""
        return (await self.observe_many([Event(user_id, item_id, event, **details)]))[0]

    async def observe_many(self, events: Sequence[Event]) -> list[int]:
        """See Recommender.observe_many."""
        resolved = self.resolve_events(events)
        model, deadline = await self._describe(OBSERVE), Deadline(self.timeouts.request)
        sequences: list[int] = []
        try:
            try:
                for call in self.make_observe_calls(resolved, model):
                    sequences += decode_sequences(await self._infer(call, deadline, model))
            except InvalidRequest:
                if (newer := await self._describe_again(OBSERVE, model)) is None:
                    raise
                for call in self.make_observe_calls(resolved[len(sequences) :], newer):
                    sequences += decode_sequences(await self._infer(call, deadline, newer))
        finally:
            await self._forget([event.user_id for event in resolved if isinstance(event.user_id, int)])
        return sequences

    async def upsert(self, kind: str, record_id: int | str, columns: Mapping[str, object]) -> int:
        """See Recommender.upsert."""
        return (await self.upsert_many(kind, [(record_id, columns)]))[0]

    async def upsert_many(self, kind: str, changes: Iterable[tuple[int | str, Mapping[str, object]]]) -> list[int]:
        """See Recommender.upsert_many."""
        model = await self._describe(UPSERT)
        sequences: list[int] = []
        for call in list(self.make_upsert_calls(kind, changes, model)):  # all are checked before one is sent
            try:
                sequences += decode_sequences(await self._infer(call, Deadline(self.timeouts.request), model))
            finally:
                if kind == "user":
                    await self._forget(call.inputs["id"][:, 0].tolist())
        return sequences

    async def signature(self) -> Signature:
        """See Recommender.signature."""
        return Signature.of(await self._describe(RECOMMEND))

    async def health(self) -> list[Health]:
        """See Recommender.health."""
        self._endpoints.require_open()
        return await asyncio.gather(*(self._health(endpoint.transport) for endpoint in self._endpoints.endpoints))

    async def close(self) -> None:
        await self._transport.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _describe(self, model: str) -> ModelDescription:
        """Return a model's description. Calls that need it at the same time share one reading, whatever their deadlines.

        Every call begins with it, so it refuses a closed client even where a cache would answer.
        """
        self._endpoints.require_open()
        if (description := self.models.get(model)) is not None:
            return description
        reading = self._readings.get(model)
        if reading is None or reading.done():
            reading = self._readings[model] = asyncio.create_task(self._read_description(model))
            reading.add_done_callback(drop_result)
        return await asyncio.shield(reading)

    async def _read_description(self, model: str) -> ModelDescription:
        description = self.models[model] = await self._transport.describe(model, self.timeouts.connect)
        self._described_s[model] = time.monotonic()
        return description

    async def _describe_again(self, model: str, description: ModelDescription) -> ModelDescription | None:
        """See Recommender."""
        if not self.forget_if_outdated(model, description):
            return None
        try:
            newer = await self._describe(model)
        except RecommenderError:
            return None
        return None if newer == description else newer

    async def _ask(
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
            answers += decode(await self._infer(call, deadline, model), part, k, signature.exclusions)
        return answers, call.request_id

    async def _infer(self, call: Call, deadline: Deadline, description: ModelDescription) -> dict:
        with client_span(call.model, self.describe_span(call)) as headers:
            try:
                return await self._transport.infer(deadline.limit(call, headers))
            except (InvalidRequest, ModelNotFound):
                self.forget_description(call.model, description)
                raise

    async def _health(self, transport) -> Health:
        try:
            if not await transport.is_ready(RECOMMEND, self.timeouts.connect):
                return Health(transport.url, False, "`recommend` is not ready: it is loading, unloaded or broken")
            signature = Signature.of(await transport.describe(RECOMMEND, self.timeouts.connect))
            return judge_health(transport.url, await transport.infer(self.make_health_call(signature)))
        except Exception as error:
            self._endpoints.require_open()  # closing ends the exchange with errors of many kinds
            if not isinstance(error, RecommenderError):
                raise
            return Health(transport.url, False, str(error))

    async def _forget(self, user_ids: list[int]) -> None:
        if self.cache is None:
            return
        try:
            await self.cache.forget_async(user_ids)
        except CacheUnavailable as error:
            self.warn_of_stale_answers(error)
