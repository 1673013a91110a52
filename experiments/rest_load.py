"""Send open-loop and closed-loop load over HTTP/1.1, on connections that stay open.

This is an asyncio protocol, because a client library or a stream would cost more than the gateway that is measured.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

CONNECTIONS = 256
TIMEOUT_S = 10.0
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


@dataclass
class Answers:
    """One entry per request. latency_s: from the due instant, NaN without an answer; status: of HTTP, 0 without an answer

    degraded: whether it was answered with popular items
    sent_late_s: from the due instant until it left, NaN if it did not. It waits where the sender is late, and for a connection
    """

    latency_s: np.ndarray
    status: np.ndarray
    degraded: np.ndarray
    sent_late_s: np.ndarray

    @classmethod
    def empty(cls, count: int) -> Answers:
        return cls(np.full(count, np.nan), np.zeros(count, np.int64), np.zeros(count, bool), np.full(count, np.nan))

    def select(self, chosen: np.ndarray) -> Answers:
        """Return some of the entries. chosen: bool [N]"""
        return Answers(self.latency_s[chosen], self.status[chosen], self.degraded[chosen], self.sent_late_s[chosen])

    def find_good(self, within_s: float) -> np.ndarray:
        """Return bool [N]: recommendations of the server, in time."""
        return (self.status == 200) & ~self.degraded & (self.latency_s <= within_s)

    def select_accepted_s(self) -> np.ndarray:
        """Return float64: latencies of the answers that came from the server."""
        return self.latency_s[(self.status == 200) & ~self.degraded]


class Connection(asyncio.Protocol):
    """One connection, which waits for one answer at a time. Answers must state their length."""

    def __init__(self) -> None:
        self._received, self._head_bytes, self._answer_bytes = bytearray(), 0, 0
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self.is_open = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are none of asyncio's classes
        self._transport, self.is_open = cast(asyncio.Transport, transport), True

    def ask(self, request: bytes) -> asyncio.Future[tuple[int, bytes]]:
        """Send a request. Return a future of (status, body); it raises ConnectionError if the connection ends before."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        self._received += data
        if not self._head_bytes:
            if (end := self._received.find(b"\r\n\r\n")) < 0:
                return
            self._head_bytes = end + 4
            length = LENGTH.search(self._received, 0, self._head_bytes)
            if length is None:
                self._transport.abort()
                return
            self._answer_bytes = self._head_bytes + int(length[1])
        if len(self._received) < self._answer_bytes:
            return
        status, body = int(self._received[9:12]), bytes(self._received[self._head_bytes : self._answer_bytes])
        if CLOSE.search(self._received, 0, self._head_bytes):
            self.close()
        self._received.clear()
        self._head_bytes = 0
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((status, body))

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("closed before the answer was complete"))

    def close(self) -> None:
        self.is_open = False
        self._transport.close()


class Connections:
    """A pool of connections to one address, opened as they are needed."""

    def __init__(self, port: int, most: int = CONNECTIONS) -> None:
        self._port, self._free = port, asyncio.LifoQueue[Connection | None]()
        for _ in range(most):
            self._free.put_nowait(None)

    async def ask(self, request: bytes, on_sent: Callable[[], None] = lambda: None) -> tuple[int, bytes]:
        """Send a request. Return (status, body). Raises OSError or TimeoutError."""
        connection, is_answered = await self._free.get(), False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if connection is None or not connection.is_open:
                    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
                on_sent()
                answer = await connection.ask(request)
                is_answered = True
                return answer
        finally:
            if connection is not None and not is_answered:
                connection.close()
                connection = None
            self._free.put_nowait(connection)

    async def close(self) -> None:
        while not self._free.empty():
            if connection := self._free.get_nowait():
                connection.close()


def encode_get(path: str, **headers: str) -> bytes:
    lines = [
        f"GET {path} HTTP/1.1",
        "host: localhost",
        *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items()),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


async def _ask_one(connections: Connections, request: bytes, index: int, due_s: float, answers: Answers) -> None:
    def note_sent() -> None:
        answers.sent_late_s[index] = time.perf_counter() - due_s

    try:
        status, body = await connections.ask(request, note_sent)
    except (OSError, TimeoutError):
        return
    answers.latency_s[index] = time.perf_counter() - due_s
    answers.status[index] = status
    if status == 200:
        answers.degraded[index] = b"gateway_fallback" in body


async def send_open_loop(port: int, requests: Sequence[bytes], due_s: np.ndarray) -> Answers:
    """Send requests[i] at due_s[i] seconds from now, float64 [N] ascending, whether or not others were answered."""
    connections, answers, tasks = Connections(port, CONNECTIONS), Answers.empty(len(requests)), []
    start_s = time.perf_counter()
    for index, (request, due) in enumerate(zip(requests, start_s + due_s, strict=True)):
        if (wait_s := due - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        elif index % 16 == 0:
            await asyncio.sleep(0)
        tasks.append(asyncio.create_task(_ask_one(connections, request, index, due, answers)))
    await asyncio.gather(*tasks)
    await connections.close()
    return answers


async def send_closed_loop(port: int, requests: Sequence[bytes], clients: int) -> tuple[Answers, float]:
    """Send the requests one after the other, `clients` at a time. Return the answers and the seconds that all took."""
    connections, answers, indices = Connections(port, clients), Answers.empty(len(requests)), iter(range(len(requests)))

    async def run_client() -> None:
        for index in indices:
            await _ask_one(connections, requests[index], index, time.perf_counter(), answers)

    start_s = time.perf_counter()
    await asyncio.gather(*(run_client() for _ in range(clients)))
    seconds = time.perf_counter() - start_s
    await connections.close()
    return answers, seconds


def draw_due_s(per_s: float, seconds: float, rng: np.random.Generator) -> np.ndarray:
    """Return the instants of random arrivals, float64 [N] ascending."""
    return np.cumsum(rng.exponential(1 / per_s, max(int(per_s * seconds), 1)))


def compute_percentile_ms(latencies_s: np.ndarray, percent: float) -> float:
    """Return a percentile in milliseconds; NaN where nothing was answered."""
    return 1_000 * float(np.percentile(latencies_s, percent)) if len(latencies_s) else float("nan")
