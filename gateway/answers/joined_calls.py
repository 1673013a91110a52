"""Ask a server several questions in one call: those that come while enough calls are under way wait, and go together.

    question ─▶ fewer than `most_calls` under way ─▶ a call of its own, at once
             └─▶ otherwise it waits ─▶ a call ends ─▶ all that wait go in the next call, urgent ones first

A call costs much, and a further question in it little. So the busier the server, the larger the calls and the less an answer
costs. No question waits for a timer. A call that takes longer than SLOW_S makes room for the next one: it may be lost.

A call that fails because of one of its questions is made again in halves, until that question fails alone. Where one call after
the other fails, no single question is at fault, and all get the error.

Champion and challenger share one queue, so that the arms of an A/B test wait alike.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gateway.answers.limiter import SHARES
from gateway.metrics import Metrics
from triton_recommender import (
    AsyncRecommender,
    DeadlineExceeded,
    InvalidRequest,
    Query,
    Recommendations,
    ServerFault,
    StageDied,
)
from triton_recommender.tensors import RECOMMEND
from triton_recommender.wire import Signature, check_k

MOST_QUESTIONS = 64  # of one call
SLOW_S = 0.1
MOST_FAULTS = 4  # calls in a row that fail by a fault of the server: of two halves, one succeeds if one question is at fault
RANKS = {priority: rank for rank, priority in enumerate(SHARES)}  # order of those that wait


class Group(NamedTuple):
    """Only questions of one group share a call: they are for one generation, and their callers are about as patient."""

    generation: int | None
    patience: int


@dataclass(eq=False)
class Waiting:
    """A question that waits for a call, and the future that gets its answer.

    deadline_s: the monotonic second at which its caller gives up
    """

    query: Query
    k: int | None
    request_id: str
    rank: int
    deadline_s: float
    group: Group
    answer: asyncio.Future[Recommendations] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


class JoinedCalls:
    """Belongs to one event loop. champion, challenger: clients; most_calls: under way at a time"""

    def __init__(self, champion: AsyncRecommender, challenger: AsyncRecommender, most_calls: int, metrics: Metrics) -> None:
        self._champion, self._challenger, self._most_calls, self._metrics = champion, challenger, most_calls, metrics
        self._faults = 0  # calls that failed in a row by a fault of the server
        self._under_way: set[object] = set()
        self._waiting: list[Waiting] = []
        self._halves: list[list[Waiting]] = []  # of calls that failed because of one question
        self._tasks: set[asyncio.Task[None]] = set()  # asyncio itself keeps no task alive

    async def ask(
        self,
        query: Query,
        *,
        k: int | None,
        request_id: str,
        timeout_s: float,
        priority: str,
        generation: int | None = None,
    ) -> Recommendations:
        """Return the answer. Raises the client's errors; a question that the server refuses fails alone.

        priority: a key of SHARES; generation: of the challenger to ask, None asks the champion
        """
        most_questions = self._find_most_questions(generation)
        if len(self._under_way) < self._most_calls or most_questions == 1:
            return (await self._call([query], self._begin_call(), k, request_id, timeout_s, generation))[0]
        check_k(k, Signature.of(self._choose_client(generation).models[RECOMMEND]).items_returned)
        group = Group(generation, round(math.log2(max(timeout_s, 1e-3))))
        question = Waiting(query, k, request_id, RANKS[priority], time.monotonic() + timeout_s, group)
        self._waiting.append(question)
        try:
            async with asyncio.timeout(timeout_s):
                return await question.answer
        except TimeoutError as error:
            raise DeadlineExceeded(f"No answer within {timeout_s:.3g} s. Allow more with x-deadline-ms.") from error

    def _choose_client(self, generation: int | None) -> AsyncRecommender:
        return self._champion if generation is None else self._challenger

    def _find_most_questions(self, generation: int | None) -> int:
        """Return how many questions the server takes in one call; 1 until it has said so."""
        model = self._choose_client(generation).models.get(RECOMMEND)
        return 1 if model is None else min(model.max_batch, MOST_QUESTIONS)

    def _begin_call(self) -> object:
        """Return what stands for a call that begins, among those that are under way."""
        call = object()
        self._under_way.add(call)
        return call

    def _end_call(self, call: object) -> None:
        self._under_way.discard(call)
        self._start_calls()

    async def _call(
        self, queries: list[Query], call: object, k: int | None, request_id: str, timeout_s: float, generation: int | None
    ) -> list[Recommendations]:
        self._metrics.calls.inc()
        timer = asyncio.get_running_loop().call_later(SLOW_S, self._end_call, call)
        try:
            answers = await self._choose_client(generation).recommend_many(
                queries, k=k, request_id=request_id, timeout_s=timeout_s, generation=generation
            )
            self._faults = 0
            return answers
        except ServerFault:
            self._faults += 1
            raise
        finally:
            timer.cancel()
            self._end_call(call)

    def _start_calls(self) -> None:
        """Send what waits as long as calls may be sent: halves of failed calls first, then by priority and age."""
        self._waiting = sorted(_list_open(self._waiting), key=lambda question: question.rank)
        while len(self._under_way) < self._most_calls and (questions := self._take_questions()):
            task = asyncio.create_task(self._answer(questions, self._begin_call()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _take_questions(self) -> list[Waiting]:
        """Take the questions of the next call from the queue, and return them; none if none waits."""
        while self._halves:
            if questions := _list_open(self._halves.pop(0)):
                return questions
        if not self._waiting:
            return []
        first = self._waiting[0]
        most = self._find_most_questions(first.group.generation)
        questions = [question for question in self._waiting if question.group == first.group][:most]
        taken_questions = set(questions)
        self._waiting = [question for question in self._waiting if question not in taken_questions]
        return questions

    async def _answer(self, questions: list[Waiting], call: object) -> None:
        """Make one call, and give each question its answer or the error."""
        counts = [question.k for question in questions]
        k = None if None in counts else max(filter(None, counts))
        left_s = max(question.deadline_s for question in questions) - time.monotonic()
        request_ids = ",".join(question.request_id for question in questions)
        queries, generation = [question.query for question in questions], questions[0].group.generation
        try:
            answers = await self._call(queries, call, k, request_ids, left_s, generation)
        except Exception as error:  # every error: each caller decides what it means
            if len(questions) > 1 and self._may_be_of_one_question(error):
                middle = len(questions) // 2
                self._halves += [questions[:middle], questions[middle:]]
                self._start_calls()
                return
            for question in _list_open(questions):
                question.answer.set_exception(error)
        else:
            for question, answer in zip(questions, answers, strict=True):
                if not question.answer.done():
                    question.answer.set_result(_cut(answer, question.k))

    def _may_be_of_one_question(self, error: Exception) -> bool:
        """Return whether a call may have failed because of one of its questions: the others would be answered without it."""
        if isinstance(error, ServerFault):
            return not isinstance(error, StageDied) and self._faults <= MOST_FAULTS
        return isinstance(error, InvalidRequest)


def _list_open(questions: Sequence[Waiting]) -> list[Waiting]:
    """Return the questions that somebody still waits for."""
    return [question for question in questions if not question.answer.done()]


def _cut(answer: Recommendations, k: int | None) -> Recommendations:
    """Return the first k items of an answer, all where k is None."""
    if k is None or k >= len(answer):
        return answer
    each_item = ("item_ids", "scores", "propensities", "sources")
    return replace(answer, **{name: getattr(answer, name)[:k] for name in each_item})
