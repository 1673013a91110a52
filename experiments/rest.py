"""REST beside gRPC: latency, throughput and processor time of the same questions, and what the gateway adds.

    python -m experiments.rest --repo model_repository [--seconds 5] [--rounds 3]

Four ways to the same stages, in turns: gRPC to tritonserver; REST through the gateway; the same where each question is a call
of its own (gateway/answers/joined_calls.py); REST to a plain FastAPI server that runs the pipeline in its own process, without
batching (experiments/plain_server.py).
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle, takewhile
from pathlib import Path
from typing import Annotated

import numpy as np
import psutil
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, run_in_turns
from experiments.rest_load import compute_percentile_ms, encode_get, send_closed_loop
from experiments.served import Served, serve_with_gateway
from perf.command import run
from perf.live.exchange import connect, require_message
from perf.load.unary import Answer
from perf.load.workload import read_specs, serialise
from server.processes import find_members
from server.start.environment import PROJECT
from server.start.ports import find_free_port
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE

CLIENTS = 8
SINGLE = "gateway without joined calls"
NO_LIMIT = 1_000_000  # of calls under way, so that no question waits for another one's call
STARTED_S = 60.0


def make_measures(latencies_s: np.ndarray, seconds: float, cpu_s: float, way: str, clients_n: int) -> dict[str, float]:
    """Return the figures of one way by name."""
    if not len(latencies_s):
        raise ServerError(f"{way} answered nothing. Look at its log.")
    name = f"{way}, {clients_n} client{'s' if clients_n > 1 else ''}"
    return {
        f"{name}: p50": compute_percentile_ms(latencies_s, 50),
        f"{name}: p99": compute_percentile_ms(latencies_s, 99),
        f"{name}: answers/s": len(latencies_s) / seconds,
        f"{name}: processor time of the servers per answer": 1_000 * cpu_s / len(latencies_s),
    }


def read_cpu_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def ask_grpc(served: Served, users: list[int], seconds: float, clients_n: int) -> dict[str, float]:
    """Ask by gRPC for some seconds, `clients_n` questions at a time.

    The client is as lean as that of REST: the time that a library takes in the caller is not what the gateway is compared with.
    """
    processes = [p for p in find_members(served.state.tag) if p not in served.find_gateway_processes()]
    spec = read_specs(served.repo, served.state.generation)[ENSEMBLE]
    bodies = serialise(spec, spec.fill_optional(len(users)) | {"user_id": np.array(users)[:, None]})
    latencies_s: list[float] = []

    def ask(body: bytes, on_done: Callable[[], None]) -> None:
        begun_ns = time.perf_counter_ns()

        def on_answer(answer: Answer) -> None:
            require_message(answer)
            latencies_s.append((answer.at_ns - begun_ns) / 1e9)
            on_done()

        exchange.send(body, on_answer)

    with connect(served.grpc_url) as exchange:
        exchange.ask(bodies[0])
        begun_s, before_s = time.perf_counter(), read_cpu_s(processes)
        bodies_in_time = takewhile(lambda _: time.perf_counter() < begun_s + seconds, cycle(bodies))
        exchange.run_closed_loop((partial(ask, body) for body in bodies_in_time), clients_n)
        taken_s = time.perf_counter() - begun_s
    return make_measures(np.array(latencies_s), taken_s, read_cpu_s(processes) - before_s, "gRPC", clients_n)


def ask_rest(
    way: str, port: int, processes: list[psutil.Process], users: list[int], seconds: float, n: int
) -> dict[str, float]:
    """Ask by REST: first some requests, to learn how many fill the seconds."""
    requests = [encode_get(f"/v1/recommendations?user={user}", x_deadline_ms="5000") for user in users]
    _, taken_s = asyncio.run(send_closed_loop(port, requests[:50], n))
    count = max(int(50 * seconds / taken_s), 50)
    before_s = read_cpu_s(processes)
    answers, taken_s = asyncio.run(send_closed_loop(port, [requests[i % len(requests)] for i in range(count)], n))
    return make_measures(answers.select_accepted_s(), taken_s, read_cpu_s(processes) - before_s, way, n)


@contextmanager
def plain_server(repo: Path) -> Iterator[tuple[int, psutil.Process]]:
    """Run experiments/plain_server.py -> its port and its process."""
    port = find_free_port()
    process = subprocess.Popen([sys.executable, "-m", "experiments.plain_server", str(repo), str(port)], cwd=PROJECT)
    try:
        deadline_s = time.monotonic() + STARTED_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=1).close()
                break
            except OSError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise ServerError("The plain server does not start; it said why above.") from None
                time.sleep(0.1)
        yield port, psutil.Process(process.pid)
    finally:
        process.terminate()
        process.wait()


def main(
    repo: Annotated[Path, typer.Option(help="repository to serve")] = Path("model_repository"),
    seconds: Annotated[float, typer.Option(help="of each way and number of clients", min=0.5)] = 5.0,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure the ways in turns. Exit code 1 when the gateway adds more than 2 ms."""
    machine = read_machine()
    with (
        serve_with_gateway(repo) as served,
        serve_with_gateway(repo, f"calls_in_flight = {NO_LIMIT}\n") as single,
        plain_server(repo.resolve()) as (plain_port, plain),
    ):
        users = served.draw_user_ids(1_000, np.random.default_rng(0))
        every, every_single = find_members(served.state.tag), find_members(single.state.tag)
        tasks: dict[str, Callable[[], dict[str, float]]] = {}
        for n in (1, CLIENTS):
            tasks[f"gRPC {n}"] = partial(ask_grpc, served, users, seconds, n)
            tasks[f"gateway {n}"] = partial(ask_rest, "gateway", served.port, every, users, seconds, n)
            tasks[f"{SINGLE} {n}"] = partial(ask_rest, SINGLE, single.port, every_single, users, seconds, n)
            tasks[f"plain FastAPI {n}"] = partial(ask_rest, "plain FastAPI", plain_port, [plain], users, seconds, n)
        for task in tasks.values():
            task()  # warm
        values = run_in_turns(tasks, rounds)
    units = {"p50": "ms", "p99": "ms", "answers/s": "/s"}
    figures = [Figure(name=name, values=each, unit=units.get(name.rpartition(": ")[2], "ms")) for name, each in values.items()]
    added = np.subtract(values["gateway, 1 client: p50"], values["gRPC, 1 client: p50"]).tolist()
    figures.append(Figure(name="what the gateway adds to p50, 1 client", values=added, unit="ms", at_most=2.0))
    joined, alone = (values[f"{way}, {CLIENTS} clients: answers/s"] for way in ("gateway", SINGLE))
    gains = np.divide(joined, alone).tolist()
    figures.append(Figure(name=f"joined calls over lone ones, {CLIENTS} clients: answers/s", values=gains, unit="x"))
    command = f"python -m experiments.rest --repo {repo} --seconds {seconds:g} --rounds {rounds}"
    finish("rest", "REST beside gRPC", command, f"{seconds:g} s each, {rounds} rounds", figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.rest")
