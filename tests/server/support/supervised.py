"""A tritonserver of the small shop with its gateway and supervisor, for tests of faults.

The layout is the fused one, because a server that is started again and again is then there in a third of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from experiments.served import Served
from server import watch
from server.control import stop_server
from server.helpers import gateway
from server.launcher import TritonServer
from server.processes import SHM_DIR, find_members
from server.start.ports import find_free_port
from server.state import ServerState, make_state_path
from server.status.condition import examine
from tests.repositories import copy_small_fused_repository
from tests.server.support.gateways import USER

RECOVERS_S = 180.0  # far above what it takes: the machine that runs the tests may be slow


@dataclass
class Supervised(Served):
    """A server of the small shop with its gateway and supervisor."""

    http: httpx.Client

    def ask(self) -> dict:
        """Return the gateway's answer, which must be 200 with five items, popular ones if the server does not answer."""
        answer = self.http.get("/v1/recommendations", params={"user": USER, "k": 5})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["items"]) == 5
        return answer.json()

    def ask_in_full(self) -> dict:
        """Return an answer that is not degraded. The first ones of a process may miss the deadline, on a busy machine."""
        answers: list[dict] = []

        def is_full() -> bool:
            answers.append(self.ask())
            return answers[-1]["degraded"] == []

        self.wait(is_full)
        return answers[-1]

    def is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200

    def wait(self, condition: Callable[[], bool], limit_s: float = RECOVERS_S) -> float:
        """Ask for recommendations until the condition holds, and return the seconds that it took."""
        begun_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begun_s < limit_s, "\n".join(watch.read_last_lines(self.run_dir, self.grpc_port, 20))
            self.ask()
            time.sleep(0.1)
        return time.monotonic() - begun_s

    def recover(self) -> None:
        """Wait until the server answers as before."""
        self.wait(lambda: self.ask()["degraded"] == [] and self.is_ready())
        assert examine(self.state.grpc_url, self.state).fault == ""


@contextmanager
def supervised_shop(folder: Path) -> Iterator[Supervised]:
    """Serve a copy of the small shop from `folder`, and stop it afterwards."""
    repo, run_dir, port = copy_small_fused_repository(folder / "repository"), folder / "run", find_free_port()
    server = TritonServer(repo, run_dir=run_dir).start()
    state = gateway.follow(server.state, port, "", run_dir)
    watch.start_supervisor(state, run_dir)
    with stopped_after(state, repo, run_dir, port) as shop:
        yield shop


@contextmanager
def stopped_after(state: ServerState, repo: Path, run_dir: Path, port: int) -> Iterator[Supervised]:
    """Yield a running shop, whose gateway is at `port`, and stop it. No process, state or shared memory may be left then."""
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield Supervised(repo, run_dir, state.ports.grpc, port, http)
    finally:
        stop_server(state, run_dir)
        assert find_members(state.tag) == []
        assert not make_state_path(run_dir, state.ports.grpc).exists()
        assert list(SHM_DIR.glob(f"{state.tag}*")) == []
