"""Answer `recommend` from a read-through cache, and send identical concurrent requests once (single flight).

    keys ─▶ generation ─▶ cache.read ─▶ hits
                                    └─▶ misses: the first leads: it asks the server and writes the answer; others wait

A request whose leader fails asks the server itself, in its remaining time: no request fails because of another one.

The control flow is written once, as a generator of steps (`_Caching._yield_steps`); the two transports carry the steps out, one
blocking, one awaiting.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from concurrent.futures import Future
from dataclasses import replace
from threading import Lock
from typing import Any

from triton_recommender.cache.base import Cache, Entry, Lookup
from triton_recommender.cache.entries import Key, Row, join_rows, make_keys, pack_row, take_row, unpack_row
from triton_recommender.cache.generation import KnownGeneration
from triton_recommender.errors import DeadlineExceeded, RecommenderError
from triton_recommender.models import Call, ModelDescription
from triton_recommender.tensors import RECOMMEND

Flight = tuple[Key, int, bytes]  # query, generation and the user's token, which changes when the user is forgotten
Steps = Generator[tuple, Any, Any]  # (what, arguments…): generation, read, infer, write or wait; its result is sent back


class _Caching:
    """Control flow of both transports. `_new_flight` makes the future that other requests wait for."""

    def __init__(self, inner, cache: Cache, new_flight) -> None:
        self._inner, self._cache, self._new_flight = inner, cache, new_flight
        self._known_generation = KnownGeneration(cache.generation_age_s, time.monotonic)
        self._model: ModelDescription | None = None
        self._flights: dict[Flight, Future | asyncio.Future] = {}
        self._lock = Lock()

    def _yield_steps(self, call: Call) -> Steps:
        """Yield the steps that answer a call, and return its outputs in the form that the server gives them."""
        started_s, keys = time.monotonic(), make_keys(call.inputs, self._model)
        generation = yield from self._find_generation(call)
        lookup = None if generation is None else (yield "read", keys, generation)
        if lookup is None:
            self._cache.counts.add(bypassed=len(keys))
            return (yield from self._ask(call, range(len(keys)), started_s))
        answers = [None if value is None else unpack_row(value, generation) for value in lookup.values]
        lead, wait = self._split([(key, generation, token) for key, token in zip(keys, lookup.tokens, strict=True)], answers)
        if lead:
            yield from self._answer_leading(call, lead, keys, lookup, answers, started_s)
        for row, flight in wait.items():
            answers[row] = yield "wait", flight, _compute_remaining_s(call, started_s)
        if left := [row for row, answer in enumerate(answers) if answer is None]:
            outputs = yield from self._ask(call, left, started_s)
            for place, row in enumerate(left):
                answers[row] = take_row(outputs, place)
        rows = [answer for answer in answers if answer is not None]  # all rows are answered by now
        if len({(int(answer["generation"][0, 0]), answer["item_ids"].shape) for answer in rows}) > 1:
            return (yield from self._ask(call, range(len(keys)), started_s))  # the server moved to another generation meanwhile
        return join_rows(rows)

    def _find_generation(self, call: Call) -> Steps:
        """Return the serving generation; None when unknown, so that the request itself reports what is wrong."""
        if (known := self._known_generation.generation) is not None:
            return known
        asked_s = time.monotonic()
        try:
            generation = yield "generation", call.timeout_s
        except RecommenderError:
            return None
        if generation is not None:
            self._known_generation.record(generation, asked_s)
        return generation

    def _split(self, flights: list[Flight], answers: list[Row | None]) -> tuple[dict[Flight, int], dict[int, Any]]:
        """Return the flights to lead with their rows, and the rows that wait for a flight; all other rows are answered."""
        lead: dict[Flight, int] = {}
        wait: dict[int, Any] = {}
        with self._lock:
            for row, flight in enumerate(flights):
                if answers[row] is not None:
                    continue
                if flight in self._flights:
                    wait[row] = self._flights[flight]
                else:
                    self._flights[flight] = self._new_flight()
                    lead[flight] = row
        hits = len(answers) - len(lead) - len(wait)
        self._cache.counts.add(hits=hits, misses=len(lead), joined=len(wait))
        return lead, wait

    def _answer_leading(
        self, call: Call, lead: dict[Flight, int], keys: list[Key], lookup: Lookup, answers: list[Row | None], started_s: float
    ) -> Steps:
        """Ask the server, put the answers into `answers`, and hand them to the requests that wait."""
        rows: dict[int, Row] = {}
        try:
            outputs = yield from self._ask(call, list(lead.values()), started_s)
            rows = {row: take_row(outputs, place) for place, row in enumerate(lead.values())}
            yield "write", self._make_entries(keys, lookup, rows)
        finally:
            self._resolve(lead, rows)
        for row, answer in rows.items():
            answers[row] = answer

    def _make_entries(self, keys: list[Key], lookup: Lookup, rows: dict[int, Row]) -> list[Entry]:
        """Return the entries to store: complete answers, under the generation that gave them."""
        complete = {row: answer for row, answer in rows.items() if not answer["degraded"][0, 0]}
        self._cache.counts.add(degraded=len(rows) - len(complete))
        return [
            Entry(keys[row], lookup.tokens[row], int(answer["generation"][0, 0]), pack_row(answer))
            for row, answer in complete.items()
        ]

    def _resolve(self, lead: dict[Flight, int], rows: dict[int, Row]) -> None:
        """Give the answers to the requests that wait, None where there is none."""
        for flight, row in lead.items():
            with self._lock:
                waiting = self._flights.pop(flight)
            waiting.set_result(rows.get(row))

    def _ask(self, call: Call, rows: Sequence[int], started_s: float) -> Steps:
        """Return the server's outputs for some of the users, in the remaining time."""
        left_s = _compute_remaining_s(call, started_s)
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(
                f"No answer within {call.timeout_s:.2g} s: spent waiting for the cache, or for another request with the "
                "same query. Allow more with Timeouts(request=…), or check whether the server is overloaded.",
                call,
            )
        inputs = call.inputs
        if len(rows) < len(inputs["user_id"]):
            inputs = {name: array[list(rows)] for name, array in inputs.items()}
        asked_s = time.monotonic()
        outputs = yield "infer", replace(call, inputs=inputs, timeout_s=left_s)
        self._known_generation.record(int(outputs["generation"][-1, 0]), asked_s)
        return outputs


def _compute_remaining_s(call: Call, started_s: float) -> float | None:
    """Return the seconds that remain of the timeout."""
    return None if call.timeout_s is None else max(call.timeout_s - (time.monotonic() - started_s), 0.0)


class CachedTransport(_Caching):
    """Cached transport of Recommender. Safe to share between threads. Only `recommend` is cached."""

    def __init__(self, inner, cache: Cache) -> None:
        super().__init__(inner, cache, Future)
        self._do = {
            "generation": inner.read_generation,
            "read": cache.read,
            "infer": inner.infer,
            "write": cache.write,
            "wait": _wait,
        }

    def infer(self, call: Call) -> Row:
        if call.model != RECOMMEND:
            return self._inner.infer(call)
        flow = self._yield_steps(call)
        try:
            operation, *arguments = next(flow)
            while True:
                try:
                    result = self._do[operation](*arguments)
                except BaseException as error:
                    operation, *arguments = flow.throw(error)
                else:
                    operation, *arguments = flow.send(result)
        except StopIteration as end:
            return end.value

    def describe(self, model: str, timeout_s: float) -> ModelDescription:
        description = self._inner.describe(model, timeout_s)
        if model == RECOMMEND:
            self._model = description
        return description

    def close(self) -> None:
        self._inner.close()


class AsyncCachedTransport(_Caching):
    """Cached transport of AsyncRecommender. Belongs to one event loop. Only `recommend` is cached."""

    def __init__(self, inner, cache: Cache) -> None:
        super().__init__(inner, cache, lambda: asyncio.get_running_loop().create_future())
        self._do = {
            "generation": inner.read_generation,
            "read": cache.read_async,
            "infer": inner.infer,
            "write": cache.write_async,
            "wait": _wait_async,
        }

    async def infer(self, call: Call) -> Row:
        if call.model != RECOMMEND:
            return await self._inner.infer(call)
        flow = self._yield_steps(call)
        try:
            operation, *arguments = next(flow)
            while True:
                try:
                    result = await self._do[operation](*arguments)
                except BaseException as error:
                    operation, *arguments = flow.throw(error)
                else:
                    operation, *arguments = flow.send(result)
        except StopIteration as end:
            return end.value

    async def describe(self, model: str, timeout_s: float) -> ModelDescription:
        description = await self._inner.describe(model, timeout_s)
        if model == RECOMMEND:
            self._model = description
        return description

    async def close(self) -> None:
        await self._inner.close()


def _wait(flight: Future, seconds: float | None) -> Row | None:
    try:
        return flight.result(seconds)
    except TimeoutError:
        return None


async def _wait_async(flight: asyncio.Future, seconds: float | None) -> Row | None:
    try:
        return await asyncio.wait_for(asyncio.shield(flight), seconds)  # shielded: others wait for it as well
    except TimeoutError:
        return None
