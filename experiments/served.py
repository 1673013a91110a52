"""A tritonserver with its gateway on free ports, for experiments that speak REST."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from export.relayout import relayout
from server import gateway, processes, watch
from server.control import stop_server
from server.environment import MEASURED_DIR
from server.launcher import TritonServer
from server.ports import find_free_port
from server.state import ServerState, make_state_path, read_state

SETTINGS = "requests_per_s = 1_000_000\nburst = 1_000_000\n"


@dataclass
class Served:
    repo: Path
    run_dir: Path
    grpc_port: int
    port: int  # of the gateway

    @property
    def state(self) -> ServerState:
        state = read_state(make_state_path(self.run_dir, self.grpc_port))
        assert state is not None
        return state

    @property
    def grpc_url(self) -> str:
        return f"localhost:{self.grpc_port}"

    def measure_rss_mb(self) -> float:
        """Return the memory of all processes of the server and its gateway, in MB."""
        total = 0
        for process in processes.find_members(self.state.tag):
            try:
                total += process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return total / 1e6

    def find_gateway_processes(self) -> list[psutil.Process]:
        """Return the gateway alone, without its supervisor."""
        return [p for p in gateway.list_gateways(self.state.tag) if "server.supervisor" not in p.cmdline()]

    def draw_user_ids(self, count: int, rng: np.random.Generator) -> list[int]:
        """Return random users that the repository knows."""
        known = np.load(next(self.repo.glob("preprocess/*/store/user_ids.npy")), mmap_mode="r")
        return rng.choice(np.asarray(known), count).tolist()


def publish_twice(repo: Path, copy: Path) -> None:
    """Publish the models of a repository as two generations of a new one."""
    for _ in range(2):
        relayout(repo, copy, "ensemble")


@contextmanager
def serve_with_gateway(
    repo: Path, settings: str = "", supervised: bool = False, run_dir: Path = MEASURED_DIR
) -> Iterator[Served]:
    """Serve a repository. settings: more lines of the gateway's TOML; run_dir: RUN_DIR, if publications shall know of it"""
    port = find_free_port()
    config = run_dir / f"gateway-{port}.toml"
    config.parent.mkdir(parents=True, exist_ok=True)
    config.write_text(SETTINGS + settings)
    server = TritonServer(repo, run_dir=run_dir).start()
    assert server.state is not None
    state = server.state
    try:
        state = gateway.follow(state, port, str(config), run_dir)
        if supervised:
            watch.start_supervisor(state, run_dir)
        yield Served(repo.resolve(), run_dir, state.ports.grpc, port)
    finally:
        stop_server(state, run_dir)
        config.unlink(missing_ok=True)
