"""Load the gateway, and the gRPC port, with more than they can answer: goodput, latency, memory and recovery.

    python -m experiments.overload --repo model_repository [--seconds 10]

Open loop: requests leave when they are due. Goodput counts recommendations of the server, not popular items, within the SLO.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
import uvloop
from tritonclient.grpc import service_pb2 as pb

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from experiments.rest_load import Answers, compute_percentile_ms, draw_due_s, encode_get, send_closed_loop, send_open_loop
from experiments.served import Served, serve_with_gateway
from perf.command import run
from perf.load.open_loop import run_load
from perf.load.workload import read_specs, serialise
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE
from triton_recommender.tensors import BUDGET, DEADLINE

SLO_S = 0.3
DEADLINE_MS, LONG_MS = 250, 5_000
HIGH_SHARE = 0.05
CLIENTS = (2, 4, 8, 16)  # closed loop; more than are admitted would ask again and again for popular items
IDLE_PER_S = 20.0
FACTORS = (1, 2, 5)
RECOVERY_LIMIT_S = 10.0


def make_requests(served: Served, count: int, deadline_ms: int, rng: np.random.Generator) -> tuple[list[bytes], np.ndarray]:
    """Return requests of random users, and which of them are of high priority, bool [N]."""
    is_high = rng.random(count) < HIGH_SHARE
    requests = [
        encode_get(f"/v1/recommendations?user={user}", x_deadline_ms=str(deadline_ms), x_priority=priority)
        for user, priority in zip(served.draw_user_ids(count, rng), np.where(is_high, "high", "normal"), strict=True)
    ]
    return requests, is_high


def measure_idle(served: Served, seconds: float, rng: np.random.Generator) -> Answers:
    due_s = draw_due_s(IDLE_PER_S, seconds, rng)
    return uvloop.run(send_open_loop(served.port, make_requests(served, len(due_s), LONG_MS, rng)[0], due_s))


def compute_idle_ms(answers: Answers) -> float:
    """Return the p99 of an idle server, which bounds that of an overloaded one. Raises ServerError if it answered nothing."""
    if not len(accepted_s := answers.select_accepted_s()):
        raise ServerError(f"Even without load, the server answered none of {len(answers.status)} requests. Look at its log.")
    return compute_percentile_ms(accepted_s, 99)


def measure_peak(served: Served, seconds: float, rng: np.random.Generator) -> float:
    """Return the most answers per second within the SLO: of any number of CLIENTS in a closed loop, or at twice that rate."""
    best = 0.0
    for client_count in CLIENTS:
        count = 200
        for _ in range(2):  # the first round tells how many requests the seconds hold
            requests, _ = make_requests(served, count, LONG_MS, rng)
            answers, taken_s = uvloop.run(send_closed_loop(served.port, requests, client_count))
            rate = answers.find_good(SLO_S).sum() / taken_s
            count = max(int(rate * seconds), 200)
        best = max(best, rate)
    due_s = draw_due_s(2 * best, seconds, rng)
    answers = uvloop.run(send_open_loop(served.port, make_requests(served, len(due_s), LONG_MS, rng)[0], due_s))
    return max(best, answers.find_good(SLO_S).sum() / due_s[-1])


def measure_overload(
    served: Served, factor: int, peak: float, deadline_ms: int, seconds: float, rng: np.random.Generator
) -> dict[str, float]:
    due_s = draw_due_s(factor * peak, seconds, rng)
    requests, is_high = make_requests(served, len(due_s), deadline_ms, rng)
    answers = uvloop.run(send_open_loop(served.port, requests, due_s))
    high = answers.select(is_high)
    sent_late_s = answers.sent_late_s[~np.isnan(answers.sent_late_s)]
    return {
        "goodput over peak": answers.find_good(SLO_S).sum() / due_s[-1] / peak,
        "p99 of accepted": compute_percentile_ms(answers.select_accepted_s(), 99),
        "p99 of accepted, high priority": compute_percentile_ms(high.select_accepted_s(), 99),
        "share of high priority accepted": len(high.select_accepted_s()) / max(len(high.status), 1),
        "sent late, such as for want of a free connection: p99": compute_percentile_ms(sent_late_s, 99),
        "without any answer": float((answers.status != 200).sum()),
        "recovered after": measure_recovery(served, rng),
    }


def measure_recovery(served: Served, rng: np.random.Generator) -> float:
    """Return the seconds until the first of ten requests in a row that the server answers well: RECOVERY_LIMIT_S at most."""
    begun_s, in_a_row, first_s = time.monotonic(), 0, 0.0
    while in_a_row < 10 and time.monotonic() - begun_s < RECOVERY_LIMIT_S:
        answers, _ = uvloop.run(send_closed_loop(served.port, make_requests(served, 1, LONG_MS, rng)[0], 1))
        first_s = time.monotonic() - begun_s if in_a_row == 0 else first_s
        in_a_row = in_a_row + 1 if answers.find_good(SLO_S).all() else 0
    return first_s if in_a_row == 10 else RECOVERY_LIMIT_S


def encode_queries(served: Served, count: int, rng: np.random.Generator) -> list[bytes]:
    """Return encoded questions of random users."""
    spec, user_ids = read_specs(served.repo, served.state.generation)[ENSEMBLE], served.draw_user_ids(count, rng)
    return serialise(spec, spec.fill_optional(count) | {"user_id": np.array(user_ids)[:, None]})


def add_deadline(body: bytes, deadline_unix_ms: float, budget_ms: int) -> bytes:
    """Return an encoded request with a deadline, by appending a message that has only that: Protobuf merges the two."""
    more = pb.ModelInferRequest()
    more.parameters[DEADLINE].int64_param, more.parameters[BUDGET].int64_param = int(deadline_unix_ms), budget_ms
    return body + more.SerializeToString()


def measure_grpc(
    served: Served, factor: float, peak: float, deadline_ms: int | None, seconds: float, within_s: float = 0.5
) -> dict[str, float]:
    """Return goodput, which is answers within `within_s` over the peak, and the share of requests without an answer.

    deadline_ms: of each request, from the instant it is due; None: requests without one
    """
    rng = np.random.default_rng(1)
    due_s = draw_due_s(factor * peak, seconds, rng)
    bodies = encode_queries(served, len(due_s), rng)

    def add_time(body: bytes, due_unix_s: float) -> bytes:
        return body if deadline_ms is None else add_deadline(body, 1_000 * due_unix_s + deadline_ms, deadline_ms)

    outcome = run_load(served.grpc_url, bodies, due_s, add_time=add_time)
    return {
        "goodput over peak": float((outcome.latency_ns <= 1e9 * within_s).sum() / seconds / peak),
        "share without an answer": 1 - float(outcome.ok.mean()),
    }


def make_figures(load: str, values: dict[str, float], idle_ms: float) -> list[Figure]:
    """Return the figures of `measure_overload` or `measure_grpc` with their bounds, which hold at the peak as beyond it.

    load: begins their names; idle_ms: p99 of an idle server
    """
    bounds: dict[str, dict[str, float]] = {
        "goodput over peak": {"at_least": 0.8},
        "p99 of accepted": {"at_most": 1_000 * SLO_S},
        "p99 of accepted, high priority": {"at_most": 2 * idle_ms},
        "without any answer": {"at_most": 0.0},
        "recovered after": {"at_most": 2.0},
    }
    units = {"recovered after": "s"}
    return [
        Figure(
            name=f"{load}: {name}",
            values=[value],
            unit=units.get(name, "ms" if "p99" in name else ""),
            **bounds.get(name, {}),
        )
        for name, value in values.items()
    ]


def main(
    repo: Annotated[Path, typer.Option(help="repository to serve")] = Path("model_repository"),
    seconds: Annotated[float, typer.Option(help="duration of each load", min=1)] = 10.0,
    results: ResultsFolder = RESULTS,
) -> None:
    """Send 1, 2 and 5 times as many requests as are answered at the peak. Exit code 1 when a bound is missed."""
    machine, rng, figures = read_machine(), np.random.default_rng(0), []
    with serve_with_gateway(repo) as served:
        measure_peak(served, 2.0, rng)  # warm
        idle_ms = compute_idle_ms(measure_idle(served, max(seconds, 5.0), rng))
        peak = measure_peak(served, seconds, rng)
        before_mb = served.measure_rss_mb()
        figures += [Figure(name="idle p99", values=[idle_ms], unit="ms"), Figure(name="peak", values=[peak], unit="/s")]
        for deadline_ms in (DEADLINE_MS, LONG_MS):
            for factor in FACTORS:
                values = measure_overload(served, factor, peak, deadline_ms, seconds, rng)
                figures += make_figures(f"{factor} times the peak, deadline {deadline_ms} ms", values, idle_ms)
        figures.append(Figure(name="memory afterwards over before", values=[served.measure_rss_mb() / before_mb], at_most=1.25))
        for deadline, words in ((500, "deadline of 0.5 s"), (None, "no deadline")):
            load = f"gRPC at 3.5 times the gateway's peak, {words}"
            figures += make_figures(load, measure_grpc(served, 3.5, peak, deadline, seconds), idle_ms)
    command = f"python -m experiments.overload --repo {repo} --seconds {seconds:g}"
    finish("overload", "More load than can be answered", command, f"{seconds:g} s each", figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.overload")
