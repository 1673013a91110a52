"""Send malformed requests over gRPC, HTTP and REST, and forged records to the stages, with valid requests beside them.

Over gRPC they go to `recommend`, and to `observe` and `upsert`, which must write nothing of them.

    python -m experiments.malformed --repo model_repository [--requests 100000]
    NUMBA_BOUNDSCHECK=1 NUMBA_CACHE_DIR=/tmp/checked python -m experiments.malformed --repo model_repository --loops 2000

The second form sends nothing: it runs the stages in this process on the same forged records, with the bounds of every compiled
loop checked. Counted as wrong: a process that ended, a request without any reply, a valid answer that differs, a forged event
or change that is accepted, 5xx from the gateway, a NaN score, growing memory, and a stage that refuses most forged records, so
that its loops were not tried.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import grpc
import numpy as np
import typer

from experiments.forged import (
    Known,
    forge_fields,
    forge_http,
    forge_request,
    forge_rest,
    forge_rest_write,
    forge_stage_request,
)
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.rest_load import Connections
from experiments.served import Served, serve_with_gateway
from perf.command import run
from server.processes import find_server_members
from serving.contract.errors import ConfigError
from serving.contract.tensors import LIVE_MODELS, STAGES, make_ensemble_spec, make_live_specs
from serving.pipeline import Pipeline
from triton_recommender import Recommender

INFER = "/inference.GRPCInferenceService/ModelInfer"
THREADS, REPLY_S = 8, 30.0
WRITES, REST, REST_WRITES = "gRPC, to models that write", "REST", "REST, events and changes"
ACCEPTED = ("OK", "200", "207")
NO_REPLY = ("no reply", "closed", "DEADLINE_EXCEEDED")  # the caller learns nothing
LOOPS, NO_NUMBER = "loops with bounds checked", "scores that are no numbers"
KNOWN_ANSWERS = 20
ANSWERED_SHARE = 0.25  # of the forged records of each stage, at least


class ValidRequests(threading.Thread):
    """Asks for some users again and again, and counts answers that differ from the first ones."""

    def __init__(self, url: str, users: list[int]) -> None:
        super().__init__(daemon=True)
        self._client, self._users, self._stop_asking = Recommender(url, timeouts=REPLY_S), users, threading.Event()
        self._expected = {user: self._client.recommend(user).item_ids for user in users}
        self.asked = self.wrong = 0

    def run(self) -> None:
        while not self._stop_asking.wait(0.01):
            user = self._users[self.asked % len(self._users)]
            try:
                self.wrong += self._client.recommend(user).item_ids != self._expected[user]
            except Exception as error:  # whatever it is, a valid request failed
                print(f"valid request: {error}", flush=True)
                self.wrong += 1
            self.asked += 1

    def finish(self) -> None:
        self._stop_asking.set()
        self.join()
        self._client.close()


def send_grpc(url: str, bodies: list[bytes]) -> Counter:
    """Send encoded requests as they are. Return how often each status came back."""
    with grpc.insecure_channel(url) as channel, ThreadPoolExecutor(THREADS) as pool:
        call = channel.unary_unary(INFER)

        def send(body: bytes) -> str:
            try:
                call(body, timeout=REPLY_S)
                return "OK"
            except grpc.RpcError as error:
                return error.code().name

        return Counter(pool.map(send, bodies))


def send_http(port: int, requests: list[bytes]) -> Counter:
    """Send HTTP requests as they are. Return how often each status, or "closed", came back."""

    async def send_all() -> Counter:
        connections = Connections(port, THREADS)
        statuses: Counter = Counter()

        async def send(request: bytes) -> None:
            try:
                status, _ = await connections.ask(request)
                statuses[str(status)] += 1
            except TimeoutError:
                statuses["no reply"] += 1
            except OSError:
                statuses["closed"] += 1

        await asyncio.gather(*map(send, requests))
        await connections.close()
        return statuses

    return asyncio.run(send_all())


def attack(
    served: Served, pipeline: Pipeline, known: Known, count: int, rng: np.random.Generator
) -> tuple[dict[str, Counter], ValidRequests]:
    """Send `count` requests, a thousand of each kind at a time. Return the statuses by kind, and the valid requests."""
    specs, generation, http_port = pipeline.specs, pipeline.info.generation, served.state.ports.http
    recommend, live = make_ensemble_spec(specs), make_live_specs(tuple(column.tensor for column in pipeline.info.context))
    kinds: dict[str, Callable[[int], Counter]] = {
        "gRPC": lambda size: send_grpc(served.grpc_url, [forge_request(recommend, known, rng) for _ in range(size)]),
        WRITES: lambda size: send_grpc(
            served.grpc_url, [forge_request(live[LIVE_MODELS[i % 2]], known, rng) for i in range(size)]
        ),
        "forged records": lambda size: send_grpc(
            served.grpc_url, [forge_stage_request(specs[STAGES[i % 4]], generation, known, rng) for i in range(size)]
        ),
        "HTTP": lambda size: send_http(http_port, [forge_http(rng) for _ in range(size)]),
        REST: lambda size: send_http(served.port, [forge_rest(known, rng) for _ in range(size)]),
        REST_WRITES: lambda size: send_http(served.port, [forge_rest_write(rng) for _ in range(size)]),
    }
    statuses: dict[str, Counter] = {kind: Counter() for kind in kinds}
    valid = ValidRequests(served.grpc_url, served.draw_user_ids(KNOWN_ANSWERS, rng))
    valid.start()
    n_sent = 0
    while n_sent < count:
        size = min(1_000, max((count - n_sent) // len(kinds), 1))
        for kind, send in kinds.items():
            statuses[kind] += send(size)
            n_sent += size
    valid.finish()
    return statuses, valid


def count_unanswered(statuses: Mapping[str, Counter]) -> int:
    """Return how many requests had no reply. statuses: by kind of request"""
    return sum(counts[status] for counts in statuses.values() for status in NO_REPLY)


def check_loops(pipeline: Pipeline, known: Known, count: int, rng: np.random.Generator) -> Counter:
    """Run every stage on forged records in this process. Count the outcomes by stage, and the scores that are no numbers."""
    outcomes: Counter = Counter({f"{stage}: answered": 0 for stage in STAGES})
    for number in range(count):
        stage = STAGES[number % len(STAGES)]
        fields = forge_fields(pipeline.specs[stage], pipeline.info.generation, known, rng)
        if pipeline.stages[stage].find_faults(fields):
            outcomes[f"{stage}: refused"] += 1
            continue
        try:
            outputs = pipeline.stages[stage](fields)
        except Exception as error:  # counted by kind: an IndexError is the one to look for
            outcomes[f"{stage}: {type(error).__name__}"] += 1
            continue
        outcomes[f"{stage}: answered"] += 1
        outcomes[NO_NUMBER] += stage == "rerank" and not np.isfinite(outputs["scores"]).all()
    return outcomes


def make_loop_figures(outcomes: Counter, count: int) -> list[Figure]:
    """Return the figures of `check_loops`. count: of all records"""
    enough = ANSWERED_SHARE * (count // len(STAGES))
    bounds = {f"{stage}: answered": {"at_least": enough} for stage in STAGES}
    figures = [Figure(name=f"{LOOPS}: {name}", values=[n], **bounds.get(name, {})) for name, n in sorted(outcomes.items())]
    bad = outcomes[NO_NUMBER] + sum(n for name, n in outcomes.items() if name.endswith("IndexError"))
    return [*figures, Figure(name=f"{LOOPS}: outside, or no number", values=[bad], at_most=0)]


def main(
    repo: Annotated[Path, typer.Option(help="repository to serve")] = Path("model_repository"),
    requests: Annotated[int, typer.Option(min=5)] = 100_000,
    loops: Annotated[int, typer.Option(help="run so many forged records in this process, and send nothing")] = 0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Send malformed requests. Exit code 1 when anything but a coded error, or an answer, comes back."""
    machine, rng, pipeline = read_machine(), np.random.default_rng(0), Pipeline.load(repo)
    known = Known.read(repo, pipeline)
    if loops:
        if os.environ.get("NUMBA_BOUNDSCHECK") != "1":
            raise ConfigError("Bounds are not checked. Set NUMBA_BOUNDSCHECK=1 and a NUMBA_CACHE_DIR of its own.")
        figures = make_loop_figures(check_loops(pipeline, known, loops, rng), loops)
        command = f"NUMBA_BOUNDSCHECK=1 python -m experiments.malformed --repo {repo} --loops {loops}"
        finish("malformed-loops", "Forged records in the stages", command, f"{loops} records", figures, results, machine)
        return
    with serve_with_gateway(repo) as served:
        # Warm: the first explanation loads the models into the gateway.
        send_grpc(served.grpc_url, [forge_request(make_ensemble_spec(pipeline.specs), known, rng) for _ in range(200)])
        send_http(served.port, [forge_rest(known, rng) for _ in range(1_000)])
        before, before_mb = {process.pid for process in find_server_members(served.state.tag)}, served.measure_rss_mb()
        statuses, valid = attack(served, pipeline, known, requests, rng)
        after, after_mb = {process.pid for process in find_server_members(served.state.tag)}, served.measure_rss_mb()
    rest = statuses[REST] + statuses[REST_WRITES]
    server_errors = sum(n for status, n in rest.items() if status in ("500", "502", "504"))
    accepted = sum(statuses[kind][status] for kind in (WRITES, REST_WRITES) for status in ACCEPTED)
    figures = [
        Figure(name="requests sent", values=[sum(sum(counts.values()) for counts in statuses.values())]),
        Figure(name="processes that ended", values=[len(before - after)], at_most=0),
        Figure(name="requests without a reply", values=[count_unanswered(statuses)], at_most=0),
        Figure(name="forged events and changes that were accepted", values=[accepted], at_most=0),
        Figure(name="5xx of the gateway, but for 503", values=[server_errors], at_most=0),
        Figure(name="valid requests beside them", values=[valid.asked], at_least=1),
        Figure(name="valid requests with a wrong answer or none", values=[valid.wrong], at_most=0),
        Figure(name="memory afterwards over before", values=[after_mb / before_mb], at_most=1.1),
    ]
    for kind, counts in statuses.items():
        figures += [Figure(name=f"{kind}: {status}", values=[number]) for status, number in counts.most_common()]
    command = f"python -m experiments.malformed --repo {repo} --requests {requests}"
    finish("malformed", "Malformed requests", command, f"{requests:,} requests", figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.malformed")
