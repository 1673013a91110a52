"""Ask a server several questions in one call: those that come while enough calls are under way wait, and go together.

    question ─▶ fewer than `most_calls` under way ─▶ a call of its own, at once
             └─▶ otherwise it waits ─▶ a call ends ─▶ all that wait go in the next call

A call costs much, and a further question in it little. So the busier the server, the larger the calls and the less an answer
costs. No question waits for a timer.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from gateway.metrics import Metrics
from triton_recommender import AsyncRecommender, DeadlineExceeded, InvalidRequest, Query, Recommendations

MOST_QUESTIONS = 64  # of one call


class Settings(NamedTuple):
    """What all questions of a call share. k: the most items, None for all; generation: of the challenger, None: the champion"""

    k: int | None
    generation: int | None


@dataclass(eq=False)
class Waiting:
    """A question, the monotonic second at which its caller gives up, and the future that gets its answer."""

    query: Query
    settings: Settings
    request_id: str
    deadline_s: float
    answer: asyncio.Future[Recommendations] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class JoinedCalls:
    """Asks one client. Belongs to one event loop. most_calls: under way at a time"""

    def __init__(self, recommender: AsyncRecommender, most_calls: int, metrics: Metrics) -> None:
        self._recommender, self._most_calls, self._metrics = recommender, most_calls, metrics
        self._under_way = 0
        self._waiting: list[Waiting] = []
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no task alive

    async def ask(
        self, query: Query, *, k: int | None, request_id: str, timeout_s: float, generation: int | None = None
    ) -> Recommendations:
        """Return the answer. Raises the client's errors; a question that the server refuses fails alone."""
        question = Waiting(query, Settings(k, generation), request_id, time.monotonic() + timeout_s)
        if self._under_way < self._most_calls:
            self._under_way += 1
            return (await self._call([question]))[0]
        self._waiting.append(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await question.answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"No answer within {timeout_s:.3g} s. Allow more with x-deadline-ms.") from error

    async def _call(self, questions: list[Waiting]) -> list[Recommendations]:
        """Return the answers of one call, which `_under_way` counts already."""
        settings, last_s = questions[0].settings, max(question.deadline_s for question in questions)
        self._metrics.calls.inc()
        try:
            return await self._recommender.recommend_many(
                [question.query for question in questions],
                k=settings.k,
                generation=settings.generation,
                request_id=",".join(question.request_id for question in questions),
                timeout_s=last_s - time.monotonic(),
            )
        finally:
            self._under_way -= 1
            self._start_calls()

    def _start_calls(self) -> None:
        """Send what waits, oldest first, as long as calls may be sent."""
        self._waiting = [question for question in self._waiting if not question.answer.done()]  # others were given up
        while self._waiting and self._under_way < self._most_calls:
            settings = self._waiting[0].settings
            questions = [question for question in self._waiting if question.settings == settings][:MOST_QUESTIONS]
            self._waiting = [question for question in self._waiting if question not in questions]
            self._start_call(questions)

    def _start_call(self, questions: list[Waiting]) -> None:
        self._under_way += 1
        task = asyncio.create_task(self._answer(questions))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, questions: list[Waiting]) -> None:
        """Make one call, and give each question its answer or the error."""
        try:
            answers = await self._call(questions)
        except Exception as error:  # of any kind: each caller decides what it means
            if isinstance(error, InvalidRequest) and len(questions) > 1:  # one of them is at fault
                for question in questions:
                    self._start_call([question])
                return
            for question in questions:
                if not question.answer.done():
                    question.answer.set_exception(error)
        else:
            for question, answer in zip(questions, answers, strict=True):
                if not question.answer.done():
                    question.answer.set_result(answer)
