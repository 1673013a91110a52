"""Serve one generation, then two in an experiment of each mode, in turns: latency of one client, and memory of all processes.

    python -m experiments.two_generations --repo model_repository [--requests 500] [--rounds 5]

Both generations are the same models, so that only the number differs. Half of the users meet the challenger: "two" is an A/B
test, in "shadow" it is asked and not shown, in "interleaved" both are asked at once.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, run_in_turns
from experiments.rest_load import Connections, compute_percentile_ms, encode_get, send_closed_loop
from experiments.served import Served, publish_twice, serve_with_gateway
from perf.command import run
from repository.experiments import end_experiment
from server.experiment import begin_experiment
from server.generations.challenger import unload_challenger
from serving.contract.errors import ServerError
from serving.live.experiment import Experiment, Mode

P50_OVER_ONE = 1.1  # bound of an A/B test
MODES: dict[str, Mode] = {"two": "ab", "shadow": "shadow", "interleaved": "interleave"}


def ask(served: Served, users: list[int], mode: str) -> dict[str, float]:
    """Return the latencies of one client, and the memory of the server and its gateway."""
    requests = [encode_get(f"/v1/recommendations?user={user}", x_deadline_ms="5000") for user in users]
    asyncio.run(send_closed_loop(served.port, requests[: len(requests) // 5], 1))  # warm
    answers, _ = asyncio.run(send_closed_loop(served.port, requests, 1))
    latencies_s = answers.select_accepted_s()
    if len(latencies_s) < len(requests):
        raise ServerError(f"{len(requests) - len(latencies_s)} of {len(requests)} requests were not answered by the server.")
    percentiles = {f"{mode}: p{percent}": compute_percentile_ms(latencies_s, percent) for percent in (50, 99)}
    return percentiles | {f"{mode}: memory": served.measure_rss_mb()}


def serve_two(served: Served, users: list[int], challenger: int, mode: str) -> dict[str, float]:
    """Let an experiment run while one client asks, and end it. mode: a key of MODES"""
    name = f"{mode}-{time.time_ns()}"  # a name serves once
    begin_experiment([served.state], served.repo, Experiment(name, 0, challenger, 0.5, MODES[mode]))
    try:
        counts = asyncio.run(count_generations(served, users[:100]))
        expected = {served.state.generation, challenger} if mode == "two" else {served.state.generation}
        if set(counts) != expected:
            raise ServerError(f"Users met the generations {dict(counts)}; expected {expected}.")
        return ask(served, users, mode)
    finally:
        end_experiment(served.repo, "measured")
        unload_challenger(served.grpc_url, served.repo)


async def count_generations(served: Served, users: list[int]) -> Counter[int]:
    connections = Connections(served.port, 1)
    answers = [await connections.ask(encode_get(f"/v1/recommendations?user={user}")) for user in users]
    await connections.close()
    return Counter(json.loads(body)["generation"] for _, body in answers)


def make_figures(values: dict[str, list[float]]) -> list[Figure]:
    """Return the figures. values: by name, one of each round"""
    figures = [Figure(name=name, values=each, unit="MB" if "memory" in name else "ms") for name, each in values.items()]
    for mode in MODES:
        for name in (": p50", ": p99", ": memory"):
            ratios = np.divide(values[f"{mode}{name}"], values[f"one{name}"]).tolist()
            bound = P50_OVER_ONE if (mode, name) == ("two", ": p50") else None
            figures.append(Figure(name=f"{mode} over one{name}", values=ratios, at_most=bound))
    return figures


def main(
    repo: Annotated[Path, typer.Option(help="repository whose models are served")] = Path("model_repository"),
    requests: Annotated[int, typer.Option(help="of each round", min=100)] = 500,
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    results: ResultsFolder = RESULTS,
) -> None:
    """Compare one generation with two. Exit code 1 when two cost more than 1.1 times the p50 of one."""
    machine = read_machine()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        publish_twice(repo, copy)
        with serve_with_gateway(copy, "deadline_ms = 5_000\n") as served:
            users = served.draw_user_ids(requests, np.random.default_rng(0))
            challenger = 1 if served.state.generation == 2 else 2
            tasks = {mode: partial(serve_two, served, users, challenger, mode) for mode in MODES}
            values = run_in_turns({"one": partial(ask, served, users, "one"), **tasks}, rounds)
    command = f"python -m experiments.two_generations --repo {repo} --requests {requests} --rounds {rounds}"
    conditions = f"one client over REST, {requests} requests a round, {rounds} rounds"
    finish("two-generations", "Two generations at once", command, conditions, make_figures(values), results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.two_generations")
