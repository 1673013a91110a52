"""Call a gateway again and again: ask for recommendations, post events, read `/readyz`. Record each answer with its time.

Each kind of call has one caller, who waits for an answer before the next call: while answers are slow, there are few of them.
Events are of users and an item that nobody asks about, at one moment of event time, so that they change no answer: an answer
of the server that differs from the first one of its user is wrong.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

import httpx
import numpy as np
from confluent_kafka import Producer

from experiments.fault_backends import TOPIC
from live.archive import read_log
from serving.contract.errors import ServerError

FULL, POPULAR, WRONG, ACCEPTED = "answered in full", "popular items", "wrong", "accepted"
NO_CONNECTION, NO_ANSWER = "no connection", "no answer"
ASK_EVERY_S, POST_EVERY_S, PROBE_EVERY_S = 0.01, 0.02, 0.02
PATIENCE_S = 10.0  # timeout of a call
STREAK = 30  # this many consecutive answers in full count as recovered
ITEM, FIRST_USER = 999_999_999, 1_000_000_000
POLL_S = 0.02
PARTITIONS = 4  # of the mock's topics
SEEN_S = 2.0  # until every stage has seen an event


class Seen(NamedTuple):
    """One answer. at_s, end_s: monotonic times of the request and of its answer"""

    at_s: float
    end_s: float
    outcome: str


class Load:
    """Three callers of one gateway, one for each kind of call, each in a thread that starts with the context."""

    def __init__(self, port: int, users: list[int]) -> None:
        self._address, self._users = f"http://127.0.0.1:{port}", users
        self.answers: list[Seen] = []
        self.events: list[Seen] = []
        self.probes: list[Seen] = []
        self.acknowledged: set[str] = set()  # ids of events
        self._refused: dict[str, int] = {}  # id -> user of events that a caller must send again
        self._expected: dict[int, tuple[list, np.ndarray]] = {}
        self._stopping, self._count, self._time_ms = threading.Event(), 0, time.time_ns() // 1_000_000
        self._producer: Producer | None = None
        calls = (
            (self._ask, self.answers, ASK_EVERY_S),
            (self._post, self.events, POST_EVERY_S),
            (self._probe, self.probes, PROBE_EVERY_S),
        )
        self._threads = [threading.Thread(target=self._repeat, args=call, daemon=True) for call in calls]

    def __enter__(self) -> Load:
        with self._connect() as http:  # the first event moves the live clock, which changes answers
            while self._post(http) != ACCEPTED:
                time.sleep(POLL_S)
        time.sleep(SEEN_S)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def wait_until_full(self, limit_s: float) -> None:
        """Wait until the server answers in full, event after event is accepted, and `/readyz` says so. Raises ServerError."""
        begun_s = time.monotonic()
        while True:
            time.sleep(POLL_S)
            since = [seen for seen in self.answers[-STREAK:] if seen.at_s > begun_s]
            latest = [seen.outcome for seen in (self.events[-1:] + self.probes[-1:]) if seen.at_s > begun_s]
            if len(since) == STREAK and {seen.outcome for seen in since} <= {FULL} and latest == [ACCEPTED, FULL]:
                return
            if time.monotonic() - begun_s > limit_s:
                counts = Counter(seen.outcome for seen in self.answers if seen.at_s > begun_s)
                raise ServerError(f"After {limit_s:g} s the server does not answer in full: {counts}, {latest}. See its logs.")

    def send_again(self) -> None:
        """Post each refused event again until it is accepted."""
        with self._connect() as http:
            while self._refused:
                event_id, user = self._refused.popitem()
                while self._send(http, event_id, user) != ACCEPTED:
                    time.sleep(POST_EVERY_S)

    def send_messages(self, brokers: str, count: int) -> set[str]:
        """Send events to Kafka; while it is away, they wait to be sent. Return their ids."""
        if self._producer is None:
            self._producer = Producer({"bootstrap.servers": brokers, "reconnect.backoff.max.ms": 500, "log_level": 0})
        event_ids = set()
        for number in range(count):
            self._count += 1
            event_id, user = f"{self._time_ms}-kafka-{self._count}", FIRST_USER + self._count
            event = {"user_id": user, "item_id": ITEM, "event_id": event_id, "timestamp_ms": self._time_ms}
            self._producer.produce(TOPIC, json.dumps(event).encode(), partition=number % PARTITIONS)
            event_ids.add(event_id)
        return event_ids

    def count_lost(self, folder: Path, messages: set[str]) -> tuple[int, int]:
        """Return how many acknowledged events the log lacks, and how many of them and of Kafka's messages it has twice."""
        acknowledged = set(self.acknowledged)  # first, because more come meanwhile
        logged = Counter(event_id.decode() for _, batch in read_log(folder) for event_id in batch.event_ids)
        return compare_with_log(acknowledged, messages, logged)

    def _connect(self) -> httpx.Client:
        return httpx.Client(base_url=self._address, timeout=PATIENCE_S)

    def _repeat(self, call: Callable[[httpx.Client], str], seen: list[Seen], every_s: float) -> None:
        with self._connect() as http:
            while not self._stopping.wait(every_s):
                at_s = time.monotonic()
                try:
                    outcome = call(http)
                except httpx.TimeoutException:
                    outcome = NO_ANSWER
                except httpx.TransportError:
                    outcome = NO_CONNECTION
                seen.append(Seen(at_s, time.monotonic(), outcome))

    def _ask(self, http: httpx.Client) -> str:
        user = self._users[len(self.answers) % len(self._users)]
        response = http.get("/v1/recommendations", params={"user": user})
        if response.status_code != 200:
            return read_code(response)
        answer = response.json()
        if "gateway_fallback" in answer["degraded"]:
            return POPULAR
        items, scores = [item["id"] for item in answer["items"]], np.array([item["score"] for item in answer["items"]])
        if answer["degraded"]:
            return f"marked {' '.join(answer['degraded'])}"
        expected, expected_scores = self._expected.setdefault(user, (items, scores))
        return FULL if items == expected and np.allclose(scores, expected_scores, atol=1e-4) else WRONG

    def _post(self, http: httpx.Client) -> str:
        self._count += 1
        event_id, user = f"{self._time_ms}-{self._count}", FIRST_USER + self._count
        try:
            return self._send(http, event_id, user)
        finally:
            if event_id not in self.acknowledged:
                self._refused[event_id] = user

    def _send(self, http: httpx.Client, event_id: str, user: int) -> str:
        event = {"user": user, "item": ITEM, "id": event_id, "timestamp": self._time_ms}
        response = http.post("/v1/events", json=event)
        if response.status_code != 200:
            return read_code(response)
        self.acknowledged.add(event_id)
        return ACCEPTED

    def _probe(self, http: httpx.Client) -> str:
        response = http.get("/readyz")
        return FULL if response.status_code == 200 else f"{response.status_code}"


def read_code(response: httpx.Response) -> str:
    """Return the status of a refused request and its code."""
    return f"{response.status_code} {response.json()['error']['code']}"


def compare_with_log(acknowledged: set[str], messages: set[str], logged: Counter[str]) -> tuple[int, int]:
    """Return how many acknowledged events are not logged, and how many events and messages are logged twice.

    messages: ids of Kafka's messages, which a consumer that starts again may read again; logged: how often the log has each id
    """
    return len(acknowledged - logged.keys()), sum(logged[event_id] > 1 for event_id in acknowledged | messages)


def select(seen: Iterable[Seen], begun_s: float, ended_s: float) -> list[Seen]:
    """Return the answers whose call overlaps a period."""
    return [answer for answer in list(seen) if answer.end_s >= begun_s and answer.at_s <= ended_s]
