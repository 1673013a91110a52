"""Open-loop load: requests leave when they are due, whether or not earlier ones were answered.

    due (drawn beforehand) ─▶ send ─▶ answer          latency = answer - due, never answer - send

A generator that waits for answers, or falls behind and forgets it, hides exactly the delays that users would feel. So the
instants are fixed before the clock starts, requests are serialised beforehand, and the generator reports its own delay
(`send_late`) and processor time: figures hold as long as both stay small beside the server's (`perf/load/unary.py`).

One thread waits for the next answer or the next instant, whichever comes first (asyncio's timers are a millisecond too coarse).
At most MAX_IN_FLIGHT requests are unanswered; a request due beyond that is dropped and counted as an error. So is a request
without an answer after DEADLINE_S, which the server may still work on (`perf/load/unary.py`).
Only loopback addresses are accepted, so that nobody else's server is loaded.
"""

from __future__ import annotations

import contextlib
import gc
import ipaddress
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np

from perf.load.unary import UnaryCalls
from serving.contract.errors import ConfigError, ServerError

INFER = "/inference.GRPCInferenceService/ModelInfer"
LIVE = "/inference.GRPCInferenceService/ServerLive"
MAX_IN_FLIGHT = 2_000
DEADLINE_S = 5.0  # of one request
FLOOR_CALLS = 300
PARTS = 10  # of a load, for its progress
PRIORITY = -10  # of the sending thread, where the system permits it
SWITCH_S = 1e-4  # by default another thread, such as one that publishes rows, may run 5 ms while a request is due

AddTime = Callable[[bytes, float], bytes]


@dataclass
class Outcome:
    """Times per request, int64 [N] ns after the start; -1 where a request was not sent, or not answered."""

    due_ns: np.ndarray
    sent_ns: np.ndarray
    answered_ns: np.ndarray
    messages: list[bytes] = field(default_factory=list)  # the answer to each request, parsed after the load
    errors: Counter = field(default_factory=Counter)  # gRPC status and first words -> requests
    cpu_s: float = 0.0  # of the sending thread only; other threads watch the server
    wall_s: float = 0.0

    @classmethod
    def empty(cls, due_ns: np.ndarray) -> Outcome:
        return cls(due_ns, np.full(len(due_ns), -1, np.int64), np.full(len(due_ns), -1, np.int64), [b""] * len(due_ns))

    @property
    def ok(self) -> np.ndarray:
        """Whether each request was answered, bool [N]."""
        return self.answered_ns >= 0

    @property
    def latency_ns(self) -> np.ndarray:
        """Latencies of answered requests, int64, from the instant each was due."""
        return (self.answered_ns - self.due_ns)[self.ok]

    @property
    def send_late_ns(self) -> np.ndarray:
        """Delays of the generator itself, int64, of the requests that were sent."""
        return (self.sent_ns - self.due_ns)[self.sent_ns >= 0]

    @property
    def unsent(self) -> int:
        return int((self.sent_ns < 0).sum())


def require_loopback(url: str) -> None:
    """Raise ConfigError unless every address of host:port is this machine's loopback."""
    host, _, port = url.rpartition(":")
    try:
        addresses = {entry[4][0] for entry in socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{url} is not host:port: {error}. Expected an address such as localhost:8001.") from error
    if not all(ipaddress.ip_address(address).is_loopback for address in addresses):
        raise ConfigError(f"{url} is not on this machine; open-loop load is sent to loopback only. Run perf beside the server.")


def run_load(
    url: str,
    bodies: list[bytes],
    due_s: np.ndarray,
    progress: Callable[[int], object] = lambda _: None,
    add_time: AddTime | None = None,
) -> Outcome:
    """Send bodies[i] at due_s[i] (sorted, float64 [N] seconds) to the gRPC server at `url`.

    progress: gets 1 … PARTS, as each part of the load begins
    add_time: called as a request leaves, with its body and the Unix time in seconds at which it was due. Returns the body to
        send. Nobody knows this time earlier, because the clock starts once the connection is open and all requests are encoded
    """
    require_loopback(url)
    outcome = Outcome.empty((np.asarray(due_s) * 1e9).astype(np.int64))
    with prevent_delays(), contextlib.closing(UnaryCalls(url, INFER, DEADLINE_S)) as calls:
        send_all(calls, bodies, outcome, progress, add_time)
    return outcome


@contextlib.contextmanager
def prevent_delays() -> Iterator[None]:
    """Let due requests leave in time: without garbage collection, with quick thread switches and a high priority."""
    gc.collect()
    gc.disable()  # a collection would delay every request due meanwhile
    switch_s, niceness = sys.getswitchinterval(), os.getpriority(os.PRIO_PROCESS, 0)
    sys.setswitchinterval(SWITCH_S)
    with contextlib.suppress(PermissionError):  # so that a due request leaves before the server takes the core
        os.setpriority(os.PRIO_PROCESS, 0, PRIORITY)
    try:
        yield
    finally:
        with contextlib.suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, niceness)
        sys.setswitchinterval(switch_s)
        gc.enable()


def send_all(
    calls: UnaryCalls,
    bodies: list[bytes],
    outcome: Outcome,
    progress: Callable[[int], object],
    add_time: AddTime | None,
) -> None:
    """Send bodies[i] at due_ns[i], and fill `outcome`."""
    requests = [calls.encode_call(number, body) for number, body in enumerate(bodies)]
    clock, cpu_s, start_ns, start_unix_s = time.perf_counter_ns, time.thread_time(), time.perf_counter_ns(), time.time()

    def receive(wait_ns: int) -> None:
        for number, at_ns, error, message in calls.take_answers(max(wait_ns, 0) / 1e9):
            if error:
                outcome.errors[error] += 1
            else:
                outcome.answered_ns[number] = at_ns - start_ns
                outcome.messages[number] = message

    part_starts = {part * len(bodies) // PARTS: part + 1 for part in range(PARTS)}
    for number, due_ns in enumerate(outcome.due_ns.tolist()):
        if number in part_starts:
            progress(part_starts[number])
        receive(start_ns + due_ns - clock())  # even when late, so that arrived answers are read at once
        while (left_ns := start_ns + due_ns - clock()) > 0:
            receive(left_ns)
        if calls.unanswered >= MAX_IN_FLIGHT:
            outcome.errors["not sent: too many requests in flight"] += 1
            continue
        if add_time:
            requests[number] = calls.encode_call(number, add_time(bodies[number], start_unix_s + due_ns / 1e9))
        if calls.send(number, requests[number]):
            outcome.sent_ns[number] = clock() - start_ns  # after sending, which may wait for flow control
    while calls.in_flight:  # answers or deadlines end it
        receive(int(DEADLINE_S * 1e9))
    receive(0)
    outcome.cpu_s, outcome.wall_s = time.thread_time() - cpu_s, (clock() - start_ns) / 1e9


def measure_floor_ns(url: str) -> np.ndarray:
    """Return latencies, int64 [N], of a call that does nothing, with one client: the cost of this client and of gRPC alone."""
    require_loopback(url)
    latencies_ns = np.empty(FLOOR_CALLS, np.int64)
    with contextlib.closing(UnaryCalls(url, LIVE, DEADLINE_S)) as calls:
        for number in range(FLOOR_CALLS):
            request, start_ns = calls.encode_call(number, b""), time.perf_counter_ns()
            calls.send(number, request)
            while not (answers := calls.take_answers(DEADLINE_S)):
                pass
            if answers[0].error:
                raise ServerError(f"The server at {url} does not say that it is live: {answers[0].error}. Is it the gRPC port?")
            latencies_ns[number] = answers[0].at_ns - start_ns
    return latencies_ns
