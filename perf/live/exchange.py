"""Send calls whose answers decide what is sent next: an event, and after its acknowledgement the request that names it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from perf.load.open_loop import DEADLINE_S, INFER
from perf.load.unary import Answer, UnaryCalls
from serving.contract.errors import ServerError

OnAnswer = Callable[[Answer], None]


class Due(NamedTuple):
    """An action that is due `at_ns` after the start. act: called with the due time on the clock of `time.perf_counter_ns`"""

    at_ns: int
    act: Callable[[int], None]


class Exchange:
    """Many calls in flight on one connection, for one thread. Each answer is passed to the callback of its call."""

    def __init__(self, url: str) -> None:
        self._calls, self._count = UnaryCalls(url, INFER, DEADLINE_S), 0
        self._callbacks: dict[int, OnAnswer] = {}

    def close(self) -> None:
        self._calls.close()

    def send(self, body: bytes, on_answer: OnAnswer) -> None:
        number = self._count
        self._count += 1
        self._callbacks[number] = on_answer
        self._calls.send(number, self._calls.encode_call(number, body))

    def wait(self, timeout_s: float) -> None:
        """Pass arrived answers to their callbacks, waiting for the first for at most `timeout_s`."""
        for answer in self._calls.take_answers(timeout_s):
            self._callbacks.pop(answer.number)(answer)

    def finish(self) -> None:
        """Wait until every call is answered or has reached its deadline."""
        while self._callbacks:
            self.wait(DEADLINE_S)

    def ask(self, body: bytes) -> bytes:
        """Return the answer to one call. Raises ServerError with what the server said."""
        answers: list[Answer] = []
        self.send(body, answers.append)
        while not answers:
            self.wait(DEADLINE_S)
        return require_message(answers[0])

    def run_open_loop(self, schedule: Iterable[Due]) -> list[int]:
        """Run each action when it is due, whether or not earlier calls were answered. In between, pass answers to callbacks.

        Return how late each action was, in nanoseconds.
        """
        start_ns, late_ns = time.perf_counter_ns(), []
        for due in schedule:
            due_ns = start_ns + due.at_ns
            self.wait(0)  # even when late, so that arrived answers are read at once
            while (left_ns := due_ns - time.perf_counter_ns()) > 0:
                self.wait(left_ns / 1e9)
            late_ns.append(time.perf_counter_ns() - due_ns)
            due.act(due_ns)
        self.finish()
        return late_ns

    def run_closed_loop(self, chains: Iterable[Callable[[Callable[[], None]], None]], at_once: int) -> None:
        """Run chains of calls, `at_once` at a time. A chain is started by calling it; it calls its argument when it is done."""
        waiting, running = iter(chains), 0

        def start() -> bool:
            nonlocal running
            chain = next(waiting, None)
            if chain is None:
                return False
            running += 1
            chain(on_done)
            return True

        def on_done() -> None:
            nonlocal running
            running -= 1

        more = True
        while more or running:
            while more and running < at_once:
                more = start()
            if self._callbacks:
                self.wait(DEADLINE_S)


def require_message(answer: Answer) -> bytes:
    """Return the body of an answer. Raises ServerError for an error: a measured call must not fail."""
    if answer.error:
        raise ServerError(f"The server refused a call of this measurement: {answer.error}. Look at its log.")
    return answer.message


@contextlib.contextmanager
def connect(url: str) -> Iterator[Exchange]:
    with contextlib.closing(Exchange(url)) as exchange:
        yield exchange
