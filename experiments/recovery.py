"""Kill and pause processes of a supervised server, and measure when readiness fails and when the server answers again.

    python -m experiments.recovery --repo model_repository [--rounds 2]

A client asks the gateway without pause; another reads `/readyz` as a load balancer does. A server that was started again
answers when its models are loaded; meanwhile the gateway answers with popular items.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import httpx
import numpy as np
import typer

from experiments.gateway_soak import find_stub
from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine, run_in_turns
from experiments.served import Served, serve_with_gateway
from export.relayout import relayout
from perf.command import run
from server.supervisor import STEADY_S
from serving.contract.errors import ServerError

LIMIT_S = 60.0
POLL_S = 0.02
QUIET_S = STEADY_S + 1.0  # before a fault: the supervisor waits longer and longer to restart a process that keeps dying

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

FAULTS: dict[str, Callable[[Served], None]] = {
    "rank killed": lambda served: os.kill(find_stub(served, "rank"), signal.SIGKILL),
    "tritonserver killed": lambda served: os.kill(served.state.pid, signal.SIGKILL),
    "retrieve paused": lambda served: os.kill(find_stub(served, "retrieve"), signal.SIGSTOP),
}


class Shopper:
    """Asks one gateway. user: whose recommendations it asks for."""

    def __init__(self, http: httpx.Client, user: int) -> None:
        self._http, self._user = http, user

    def is_answered(self) -> bool:
        """Return whether the server, and not popular items, answers. Raises ServerError for any status but 200."""
        response = self._http.get("/v1/recommendations", params={"user": self._user, "k": 5})
        if response.status_code != 200:
            raise ServerError(f"The gateway answers {response.status_code}: {response.text[:200]}. See its log.")
        return response.json()["degraded"] == []

    def is_ready(self) -> bool:
        return self._http.get("/readyz").status_code == 200

    def wait(self, condition: Callable[[], bool], failure: str) -> float:
        """Return the seconds until the condition holds. Raises ServerError with `failure` after LIMIT_S."""
        begun_s = time.monotonic()
        while not condition():
            if time.monotonic() - begun_s > LIMIT_S:
                raise ServerError(f"After {LIMIT_S:g} s {failure}. See the supervisor's log.")
            time.sleep(POLL_S)
        return time.monotonic() - begun_s


def measure_fault(served: Served, name: str, shopper: Shopper) -> dict[str, float]:
    """Cause a fault, and return the seconds until each of its effects, by name."""
    shopper.wait(lambda: shopper.is_ready() and shopper.is_answered(), "the server does not answer")
    time.sleep(QUIET_S)
    pid, begun_s = served.state.pid, time.monotonic()
    FAULTS[name](served)
    shopper.wait(lambda: not shopper.is_ready(), "readiness still holds")
    unready_s = time.monotonic() - begun_s
    shopper.wait(lambda: served.state.pid != pid, "nothing started the server again")
    started_s = time.monotonic() - begun_s
    shopper.wait(shopper.is_answered, "the server does not answer again")
    answered_s = time.monotonic() - begun_s
    shopper.wait(shopper.is_ready, "readiness does not hold again")
    return {
        f"{name}: readiness fails after": unready_s,
        f"{name}: started again after": started_s,
        f"{name}: answers again after": answered_s,
    }


@app.command()
def main(
    repo: Annotated[Path, typer.Option(help="repository whose models are served")] = Path("model_repository"),
    rounds: Annotated[int, typer.Option(help="of four minutes", min=1)] = 2,
    results: ResultsFolder = RESULTS,
) -> None:
    """Exit code 1 when readiness fails later than after 2 s, or the server is started again later than after 5 s."""
    machine = read_machine()
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "repository"
        relayout(repo, copy, "ensemble")
        with serve_with_gateway(copy, supervised=True) as served:
            (user,) = served.draw_user_ids(1, np.random.default_rng(0))
            with httpx.Client(base_url=f"http://127.0.0.1:{served.port}", timeout=30) as http:
                shopper = Shopper(http, user)
                tasks = {name: partial(measure_fault, served, name, shopper) for name in FAULTS}
                values = run_in_turns(tasks, rounds)
    limits = {"readiness fails after": 2.0, "started again after": 5.0}
    figures = [
        Figure(name=name, values=values_s, unit="s", at_most=limits.get(name.rpartition(": ")[2]))
        for name, values_s in values.items()
    ]
    command = f"python -m experiments.recovery --repo {repo} --rounds {rounds}"
    finish("recovery", "What dies is started again", command, f"{rounds} rounds", figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.recovery")
