"""Soak the whole service: load at half of the peak through the gateway, a fault a minute, and moves between two generations.

    python -m experiments.gateway_soak --repo model_repository [--minutes 60] [--fault-every-s 60]

The second generation blocks every second item, so that its lists differ from those of the first. The soak fails on any status
but 200, on a request without an answer, on an answer that differs from the first one of the same user and generation, if the
generations' lists are alike, if memory grows by more than a tenth, or if the server does not answer in time after a fault. Once
the gateway itself was killed, its port refuses connections until it is back. These requests are counted, and fail nothing.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.fault_backends import keep_paused
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.overload import measure_peak
from experiments.rest_load import Connections, encode_get
from experiments.served import Served, publish_with_half, serve_with_gateway
from perf.command import run
from repository.generations import list_published_generations
from server import control
from serving.contract.errors import RecommenderError

USERS = 200
LOAD_SHARE = 0.5  # of the peak
RECOVERY_LIMIT_S = 60.0  # from a fault until the server answers again
FEWEST_FAULTS = 2  # a fault and a move, however slow the machine is
PAUSE_S = 2.0  # for which a process is paused
Period = tuple[float, float]  # begin and end, time.monotonic()


@dataclass
class Watched:
    """Observations of the load.

    statuses: HTTP status -> requests; unanswered_s: time.monotonic() of each request that ended without an answer
    degraded: answers by the gateway's fallback; wrong: answers that differ from the first one
    first: (generation, user) -> item ids of the first answer
    """

    statuses: Counter[int] = field(default_factory=Counter)
    unanswered_s: list[float] = field(default_factory=list)
    degraded: int = 0
    wrong: int = 0
    first: dict[tuple[int, int], list] = field(default_factory=dict)
    answered_s: float = 0.0  # time.monotonic() of the latest answer of the server itself

    @property
    def differing_share(self) -> float:
        """The share of users with two different lists, among those whom both generations answered; 0 without such users."""
        by_user: defaultdict[int, list[list]] = defaultdict(list)
        for (_, user), items in self.first.items():
            by_user[user].append(items)
        differ = [lists[0] != lists[1] for lists in by_user.values() if len(lists) > 1]
        return sum(differ) / len(differ) if differ else 0.0

    def record(self, user: int, status: int, body: bytes) -> None:
        self.statuses[status] += 1
        if status != 200:
            print(f"status {status}: {body[:200]!r}", file=sys.stderr)
            return
        answer = json.loads(body)
        if "gateway_fallback" in answer["degraded"]:
            self.degraded += 1
            return
        if not answer["degraded"]:
            items = [item["id"] for item in answer["items"]]
            self.wrong += self.first.setdefault((answer["generation"], user), items) != items
        self.answered_s = time.monotonic()


class Load(threading.Thread):
    """Sends requests at a mean rate, with Poisson arrivals, until `finish` is called."""

    def __init__(self, port: int, users: list[int], requests_per_s: float) -> None:
        super().__init__(daemon=True)
        self.watched, self._port, self._users, self._requests_per_s = Watched(), port, users, requests_per_s
        self._stop_sending = threading.Event()

    def run(self) -> None:
        asyncio.run(self._send())

    async def _send(self) -> None:
        connections, tasks, due_s = Connections(self._port), set[asyncio.Task](), time.monotonic()
        rng = np.random.default_rng(0)
        while not self._stop_sending.is_set():
            due_s += rng.exponential(1 / self._requests_per_s)
            await asyncio.sleep(max(due_s - time.monotonic(), 0))
            task = asyncio.create_task(self._ask(connections, int(rng.choice(self._users))))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        await connections.close()

    async def _ask(self, connections: Connections, user: int) -> None:
        try:
            self.watched.record(user, *await connections.ask(encode_get(f"/v1/recommendations?user={user}")))
        except (OSError, TimeoutError):
            self.watched.unanswered_s.append(time.monotonic())

    def finish(self) -> Watched:
        self._stop_sending.set()
        self.join()
        return self.watched


def pause(pid: int) -> None:
    with keep_paused(pid):
        time.sleep(PAUSE_S)


def move(served: Served) -> None:
    """Move the server to the other generation."""
    now = served.state.generation
    others = [generation for generation in list_published_generations(served.repo) if generation != now]
    if others:
        control.activate(served.state, others[0], served.run_dir)


GATEWAY_KILLED = "gateway killed"
FAULTS: dict[str, Callable[[Served], None]] = {
    "rank killed": lambda served: served.find_stub("rank").kill(),
    "moved to the other generation": move,
    "tritonserver killed": lambda served: os.kill(served.state.pid, signal.SIGKILL),
    "retrieve paused": lambda served: pause(served.find_stub("retrieve").pid),
    "moved back": move,
    "live writer killed": lambda served: served.find_stub("observe").kill(),
    GATEWAY_KILLED: lambda served: served.find_gateway_processes()[0].kill(),
    "tritonserver paused": lambda served: pause(served.state.pid),
}


def soak(served: Served, seconds: float, every_s: float, rng: np.random.Generator) -> list[Figure]:
    """Send load and cause the faults in turn, one per `every_s`, for `seconds` and for FEWEST_FAULTS at least."""
    peak = measure_peak(served, 1.0, rng)
    load, recovered_s, broken = Load(served.port, served.draw_user_ids(USERS, rng), LOAD_SHARE * peak), [], 0
    down: list[Period] = []
    load.start()
    time.sleep(min(every_s, 5.0))
    begun_s, before_mb, number = time.monotonic(), served.measure_rss_mb(), 0
    while time.monotonic() - begun_s < seconds or number < FEWEST_FAULTS:
        name = list(FAULTS)[number % len(FAULTS)]
        number += 1
        fault_s = time.monotonic()
        try:
            FAULTS[name](served)
        except RecommenderError as error:  # a move while the server is not back: print it, and go on
            print(f"{name}: {error}", file=sys.stderr)
        time.sleep(0.5)
        seen_s = time.monotonic()
        while load.watched.answered_s < seen_s and time.monotonic() - fault_s < RECOVERY_LIMIT_S:
            time.sleep(0.05)
        answered_s = load.watched.answered_s
        broken += answered_s < seen_s
        down += [(fault_s, time.monotonic())] if name == GATEWAY_KILLED else []
        recovered_s.append((answered_s if answered_s >= seen_s else time.monotonic()) - fault_s)
        print(f"{time.monotonic() - begun_s:.0f} s: {name}, answers after {recovered_s[-1]:.1f} s", file=sys.stderr, flush=True)
        time.sleep(max(every_s - (time.monotonic() - fault_s), 0))
    return make_figures(load.finish(), recovered_s, broken, served.measure_rss_mb() / before_mb, down)


def make_figures(
    watched: Watched, recovered_s: list[float], broken: int, memory_ratio: float, down: list[Period]
) -> list[Figure]:
    """Return the figures of a soak with their bounds.

    recovered_s: seconds after each fault or move until the server answered; broken: how many it did not recover from in time
    down: from each end of the gateway until the server answered through the next one
    """
    statuses = sum(count for status, count in watched.statuses.items() if status != 200)
    refused = sum(any(begun_s <= at_s <= ended_s for begun_s, ended_s in down) for at_s in watched.unanswered_s)
    return [
        Figure(name="requests", values=[watched.statuses.total() + len(watched.unanswered_s)], at_least=1),
        Figure(name="faults and moves", values=[len(recovered_s)], at_least=1),
        Figure(name="wrong or mixed answers", values=[watched.wrong], at_most=0),
        Figure(name="users whom the two generations answer differently", values=[watched.differing_share], at_least=0.9),
        Figure(name="any status but 200", values=[statuses], at_most=0),
        Figure(name="requests without an answer", values=[len(watched.unanswered_s) - refused], at_most=0),
        Figure(name="refused while the gateway was down", values=[refused]),
        Figure(name="answered with popular items", values=[watched.degraded]),
        Figure(name="faults without recovery", values=[broken], at_most=0),
        Figure(name="until the server answers again", values=recovered_s, unit="s"),
        Figure(name="memory afterwards over before", values=[memory_ratio], at_most=1.1),
    ]


def main(
    repo: Annotated[Path, typer.Option(help="repository whose models are served, in two generations")] = Path(
        "model_repository"
    ),
    minutes: Annotated[float, typer.Option(min=0.1)] = 60.0,
    fault_every_s: Annotated[float, typer.Option(min=5)] = 60.0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Soak the service under load and faults. Exit code 1 when anything was wrong."""
    machine = read_machine()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        publish_with_half(repo, copy, Path(folder))
        with serve_with_gateway(copy, "deadline_ms = 2_000\n", supervised=True) as served:
            figures = soak(served, 60 * minutes, fault_every_s, np.random.default_rng(0))
    command = f"python -m experiments.gateway_soak --repo {repo} --minutes {minutes:g} --fault-every-s {fault_every_s:g}"
    finish("service-soak", "The service under load and faults", command, f"{minutes:g} minutes", figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.gateway_soak")
