"""Several endpoints behind one transport: failover, retries with a budget, circuit breakers and hedged requests.

    call ─▶ first endpoint whose breaker admits it ─▶ answer
                └─▶ unavailable, overloaded, a dead stage or too slow: the next endpoint, after a pause once all were tried
    no answer after hedge_after_s, or half of the call's time ─▶ the same call to another endpoint; the first answer wins

Endpoints are in the order of preference: calls go to the first one as long as it answers. Only calls that are safe to repeat
are retried, and only calls that read are hedged: each machine keeps its own log, so an event sent to two counts on both.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, cast

import numpy as np

from triton_recommender.breaker import Breaker
from triton_recommender.errors import (
    CircuitOpen,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RecommenderError,
    StageDied,
    Unavailable,
)
from triton_recommender.models import Call, ModelDescription, Timeouts
from triton_recommender.tensors import RECOMMEND

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 0.5
LONGEST_OPEN_S = 1.0  # between trials of a server: a refused trial costs little, and callers wait for the server
MAX_RETRIES = 10
FAIR_S = 0.05  # a healthy server answers sooner: only a longer wait counts as a failure
HEDGE_THREADS = 256


@dataclass
class Endpoint:
    """One server: its transport, a circuit breaker per model, and each model's last failure, which error messages quote.

    Each model has a breaker of its own, because one may fail alone: on a full disk, `observe` refuses events, and `recommend`
    answers.
    """

    transport: Any  # Transport or AsyncTransport
    breakers: dict[str, Breaker] = field(default_factory=dict)
    last_errors: dict[str, RecommenderError] = field(default_factory=dict)

    def find_breaker(self, model: str) -> Breaker:
        """Return the breaker of a model, closed at its first call."""
        return self.breakers.setdefault(model, Breaker(longest_pause_s=LONGEST_OPEN_S))


class RetryBudget:
    """Limits retries in proportion to successes, so that they do not overload a struggling server.

    A failure that could be retried takes a token, unless the server is gone and another one was not asked yet: such calls move
    there for good. A success gives back a tenth of a token. A retry is made only if more than half of the tokens remain.
    """

    TOKENS = 10.0

    def __init__(self) -> None:
        self._tokens, self._lock = self.TOKENS, Lock()

    def record_success(self) -> None:
        with self._lock:
            self._tokens = min(self._tokens + 0.1, self.TOKENS)

    def spend(self) -> bool:
        """Take a token, and return whether a retry may be made."""
        with self._lock:
            self._tokens = max(self._tokens - 1.0, 0.0)
            return self._tokens > self.TOKENS / 2


@dataclass(frozen=True)
class Policy:
    """Rules for attempts. Raises InvalidRequest for retries or hedge_after_s out of range.

    retries: further attempts of a call; attempt_s: longest attempt, None for no limit
    hedge_after_s: as in Recommender, None to send no call twice
    fair_s: an attempt that gets no answer counts against the server only if it had this long; a caller may have less patience
    """

    retries: int
    attempt_s: float | None
    hedge_after_s: float | None
    fair_s: float = FAIR_S

    @classmethod
    def from_timeouts(cls, timeouts: Timeouts, retries: int, hedge_after_s: float | None) -> Policy:
        """Return the policy of a client, whose own timeouts count as fair."""
        request_s = FAIR_S if timeouts.request is None else timeouts.request / 2  # half: encoding takes some of it
        attempt_s = FAIR_S if timeouts.attempt is None else timeouts.attempt
        return cls(retries, timeouts.attempt, hedge_after_s, min(FAIR_S, request_s, attempt_s))

    def __post_init__(self) -> None:
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or not 0 <= self.retries <= MAX_RETRIES:
            raise InvalidRequest(f"retries is {self.retries!r}; expected 0 to {MAX_RETRIES}.")
        hedge_s = self.hedge_after_s
        if hedge_s is not None and (isinstance(hedge_s, bool) or not isinstance(hedge_s, int | float) or not hedge_s >= 0):
            raise InvalidRequest(f"hedge_after_s is {self.hedge_after_s!r}; expected seconds from 0, or None.")


class _Attempts:
    """The attempts of one call of a model: decides which endpoint is next, and whether there is a next attempt at all."""

    def __init__(
        self,
        model: str,
        endpoints: Sequence[Endpoint],
        policy: Policy,
        budget: RetryBudget,
        timeout_s: float | None,
        safe: bool,
    ) -> None:
        self._model, self._endpoints, self._policy, self._budget = model, endpoints, policy, budget
        self._timeout_s, self._safe = timeout_s, safe
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._turn, self._failures = 0, 0
        self._asked: set[int] = set()  # places of endpoints
        self._began_s = 0.0

    def begin(self) -> tuple[Endpoint, float | None]:
        """Return the endpoint to ask, and how long the attempt may take. Raises CircuitOpen or DeadlineExceeded."""
        left_s = None if self._deadline_s is None else self._deadline_s - time.monotonic()
        if left_s is not None and left_s <= 0:
            raise DeadlineExceeded(f"No answer within {self._timeout_s:.3g} s. Allow more with Timeouts(request=…).")
        for step in range(len(self._endpoints)):
            endpoint = self._endpoints[(self._turn + step) % len(self._endpoints)]
            if endpoint.find_breaker(self._model).admit():
                self._turn += step
                self._asked.add(self._turn % len(self._endpoints))
                self._began_s = time.monotonic()
                limits_s = [limit_s for limit_s in (left_s, self._policy.attempt_s) if limit_s is not None]
                return endpoint, min(limits_s, default=None)
        last_error = self._endpoints[0].last_errors.get(self._model)
        urls = ", ".join(endpoint.transport.url for endpoint in self._endpoints)
        raise CircuitOpen(
            f"Not asked: `{self._model}` at {urls} failed several times in a row; the next trial is due within "
            f"{LONGEST_OPEN_S:g} s. "
            f"The last failure: {last_error}"
        )

    def record_success(self, endpoint: Endpoint) -> None:
        endpoint.find_breaker(self._model).record_success()
        self._budget.record_success()

    def plan_retry(self, endpoint: Endpoint, error: RecommenderError) -> float:
        """Return the seconds to pause before the next attempt. Raises `error` if there is none."""
        if isinstance(error, DeadlineExceeded):
            self._record_wait(endpoint, error)
        elif isinstance(error, Unavailable | StageDied):
            self._record_failure(endpoint, error)
        else:
            endpoint.find_breaker(self._model).record_success()  # an error, but the server answered
        # The same server would fail again at once: its stage stays dead, and its queue full. Another one may answer.
        has_others = len(self._endpoints) > 1
        may_help = isinstance(error, Unavailable | DeadlineExceeded) or (
            has_others and isinstance(error, StageDied | Overloaded)
        )
        next_is_untried = self._is_next_untried()
        is_moved = next_is_untried and isinstance(error, Unavailable | StageDied)
        may_retry = self._safe and may_help and self._failures < self._policy.retries
        if not (may_retry and (is_moved or self._budget.spend())):
            raise error
        self._failures += 1
        self._turn += 1
        ceiling_s = min(FIRST_PAUSE_S * 2 ** (self._failures - 1), LONGEST_PAUSE_S)
        pause_s = 0.0 if next_is_untried else ceiling_s * random.uniform(0.5, 1.0)
        if self._deadline_s is not None and time.monotonic() + pause_s >= self._deadline_s:
            raise error  # a later attempt could not answer in time
        return pause_s

    def _is_next_untried(self) -> bool:
        """Return whether the next attempt asks an endpoint that this call has not asked yet."""
        count = len(self._endpoints)
        places = ((self._turn + step) % count for step in range(1, count + 1))
        following = next((place for place in places if self._endpoints[place].find_breaker(self._model).would_admit()), None)
        return following is not None and following not in self._asked

    def record_cancelled(self, endpoint: Endpoint) -> None:
        """Judge a server whose attempt was given up: by the caller, or because another server answered first."""
        waited_s = time.monotonic() - self._began_s
        error = DeadlineExceeded(f"No answer from {endpoint.transport.url} within {waited_s:.3g} s, when it was given up.")
        self._record_wait(endpoint, error)

    def _record_wait(self, endpoint: Endpoint, error: DeadlineExceeded) -> None:
        if time.monotonic() - self._began_s >= self._policy.fair_s:
            self._record_failure(endpoint, error)

    def _record_failure(self, endpoint: Endpoint, error: RecommenderError) -> None:
        endpoint.find_breaker(self._model).record_failure()
        endpoint.last_errors[self._model] = error


class _Endpoints:
    """Base of both classes of endpoints: everything that does not wait."""

    def __init__(self, endpoints: Sequence[Endpoint], policy: Policy) -> None:
        if not endpoints:
            raise InvalidRequest("There is no address; expected one or more, such as localhost:8001.")
        self.endpoints, self._policy, self._budget = list(endpoints), policy, RetryBudget()
        self._closed = False
        self.url = ", ".join(endpoint.transport.url for endpoint in endpoints)

    def _make_attempts(self, model: str, timeout_s: float | None, safe: bool = True, first: int = 0) -> _Attempts:
        """Return the attempts of a call. first: place of the endpoint to ask first; a hedge begins at the second one"""
        rotated = self.endpoints[first:] + self.endpoints[:first]
        return _Attempts(model, rotated, self._policy, self._budget, timeout_s, safe)

    def _make_description_attempts(self, model: str, timeout_s: float) -> _Attempts:
        """Return attempts that give each endpoint an equal part of the time: no request is answered without a description."""
        share_s, others = timeout_s / len(self.endpoints), len(self.endpoints) - 1
        attempt_s = share_s if self._policy.attempt_s is None else min(share_s, self._policy.attempt_s)
        policy = replace(self._policy, attempt_s=attempt_s, retries=max(self._policy.retries, others))
        return _Attempts(model, self.endpoints, policy, self._budget, timeout_s, safe=True)

    def require_open(self) -> None:
        """Raise InvalidRequest once the client is closed."""
        if self._closed:
            raise InvalidRequest("The client is closed; expected no call after that. Make another client.")

    def _is_hedged(self, call: Call) -> bool:
        self.require_open()
        return self._policy.hedge_after_s is not None and call.is_read and len(self.endpoints) > 1

    def _choose_hedge_s(self, call: Call) -> float:
        """Return after how many seconds a hedged call is sent again: early enough for the second server to answer in time."""
        hedge_after_s = cast(float, self._policy.hedge_after_s)  # not None, because this call is hedged
        return hedge_after_s if call.timeout_s is None else min(hedge_after_s, call.timeout_s / 2)


class Endpoints(_Endpoints):
    """Blocking endpoints, safe to share between threads. The slower of two hedged attempts runs on, at most to its timeout."""

    def __init__(self, endpoints: Sequence[Endpoint], policy: Policy) -> None:
        super().__init__(endpoints, policy)
        self._threads: ThreadPoolExecutor | None = None
        if policy.hedge_after_s is not None and len(endpoints) > 1:
            self._threads = ThreadPoolExecutor(HEDGE_THREADS, thread_name_prefix="hedge")

    def describe(self, model: str, timeout_s: float) -> ModelDescription:
        attempts = self._make_description_attempts(model, timeout_s)
        return self._run(attempts, lambda transport, limit_s: transport.describe(model, limit_s))

    def read_generation(self, timeout_s: float | None) -> int | None:
        return self._run(
            self._make_attempts(RECOMMEND, timeout_s), lambda transport, limit_s: transport.read_generation(limit_s)
        )

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        return self._hedge(call) if self._is_hedged(call) else self._infer(call)

    def close(self) -> None:
        self._closed = True
        for endpoint in self.endpoints:
            endpoint.transport.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    def _infer(self, call: Call, first: int = 0) -> dict[str, np.ndarray]:
        attempts = self._make_attempts(call.model, call.timeout_s, call.safe_to_repeat, first)
        return self._run(attempts, lambda transport, limit_s: transport.infer(replace(call, timeout_s=limit_s)))

    def _run(self, attempts: _Attempts, ask: Callable) -> Any:
        while True:
            self.require_open()
            endpoint, limit_s = attempts.begin()
            try:
                answer = ask(endpoint.transport, limit_s)
            except Exception as error:
                self.require_open()  # closing ends calls with errors of many kinds, and is no fault of the server
                if not isinstance(error, RecommenderError):
                    raise
                time.sleep(attempts.plan_retry(endpoint, error))
            else:
                attempts.record_success(endpoint)
                return answer

    def _hedge(self, call: Call) -> dict[str, np.ndarray]:
        started_s = time.monotonic()
        pending = {self._start(call)}
        done, pending = wait(pending, self._choose_hedge_s(call))
        if not done:
            left_s = None if call.timeout_s is None else max(call.timeout_s - (time.monotonic() - started_s), 1e-3)
            pending.add(self._start(replace(call, timeout_s=left_s), 1))
        while True:
            for future in sorted(done, key=_has_failed):
                if not _has_failed(future) or not pending:
                    return future.result()
            done, pending = wait(pending, return_when=FIRST_COMPLETED)

    def _start(self, call: Call, first: int = 0) -> Future:
        """Make an attempt in another thread. Raises InvalidRequest if the client was closed meanwhile."""
        threads = cast(ThreadPoolExecutor, self._threads)  # not None, because this call is hedged
        try:
            return threads.submit(self._infer, call, first)
        except RuntimeError:
            self.require_open()
            raise


class AsyncEndpoints(_Endpoints):
    """Endpoints for asyncio, which belong to one event loop.

    The slower of two hedged attempts is given up once it had a fair time to answer, so that a server that hangs is noticed.
    """

    async def describe(self, model: str, timeout_s: float) -> ModelDescription:
        attempts = self._make_description_attempts(model, timeout_s)
        return await self._run(attempts, lambda transport, limit_s: transport.describe(model, limit_s))

    async def read_generation(self, timeout_s: float | None) -> int | None:
        return await self._run(
            self._make_attempts(RECOMMEND, timeout_s), lambda transport, limit_s: transport.read_generation(limit_s)
        )

    async def infer(self, call: Call) -> dict[str, np.ndarray]:
        return await (self._hedge(call) if self._is_hedged(call) else self._infer(call))

    async def close(self) -> None:
        self._closed = True
        for endpoint in self.endpoints:
            await endpoint.transport.close()

    async def _infer(self, call: Call, first: int = 0) -> dict[str, np.ndarray]:
        attempts = self._make_attempts(call.model, call.timeout_s, call.safe_to_repeat, first)
        return await self._run(attempts, lambda transport, limit_s: transport.infer(replace(call, timeout_s=limit_s)))

    async def _run(self, attempts: _Attempts, ask: Callable) -> Any:
        while True:
            self.require_open()
            endpoint, limit_s = attempts.begin()
            try:
                answer = await ask(endpoint.transport, limit_s)
            except Exception as error:
                self.require_open()  # closing ends calls with errors of many kinds, and is no fault of the server
                if not isinstance(error, RecommenderError):
                    raise
                await asyncio.sleep(attempts.plan_retry(endpoint, error))
            except asyncio.CancelledError:
                attempts.record_cancelled(endpoint)
                raise
            else:
                attempts.record_success(endpoint)
                return answer

    async def _hedge(self, call: Call) -> dict[str, np.ndarray]:
        started_s = time.monotonic()
        pending = {asyncio.create_task(self._infer(call))}
        try:
            done, pending = await asyncio.wait(pending, timeout=self._choose_hedge_s(call))
            if not done:
                left_s = None if call.timeout_s is None else max(call.timeout_s - (time.monotonic() - started_s), 1e-3)
                pending.add(asyncio.create_task(self._infer(replace(call, timeout_s=left_s), 1)))
            while True:
                for task in sorted(done, key=_has_failed):
                    if not _has_failed(task) or not pending:
                        return task.result()
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in pending:
                task.add_done_callback(drop_result)
                asyncio.get_running_loop().call_later(self._policy.fair_s, task.cancel)


def drop_result(attempt: asyncio.Future) -> None:
    """Read the error of an attempt that nobody waits for, because asyncio reports errors that are never read."""
    if not attempt.cancelled():
        attempt.exception()


def _has_failed(attempt: Future | asyncio.Future) -> bool:
    """Return whether a finished attempt failed. Of two that finish together, callers prefer the one that did not."""
    return attempt.exception() is not None
