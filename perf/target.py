"""Use a running server, or start one, to measure it; several servers take turns."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from perf.command import console
from perf.load.open_loop import require_loopback
from server.control import clear_stale, find_running_servers
from server.generations.activation import find_served_generation
from server.keys import find_tls_folder
from server.launcher import TritonServer
from server.processes import find_members
from server.start.environment import MEASURED_DIR, RUN_DIR
from server.start.ports import Ports
from server.state import ServerState
from server.status.health import is_ready, list_unready, read_model_states
from serving.contract.errors import ConfigError, ServerError


@dataclass(frozen=True)
class Site:
    """Addresses of one ready server, and the published generation it answers with."""

    grpc_url: str
    http_url: str
    metrics_url: str
    repo: Path
    generation: int
    tag: str | None  # finds its processes; None if `server` did not start it, and then there are no memory figures


@contextlib.contextmanager
def serve(url: str, repo: Path) -> Iterator[Site]:
    """Use the server at `url`, or start one on `repo` for the duration, on free ports. Raises ConfigError for one with TLS."""
    require_loopback(url)
    clear_stale(MEASURED_DIR)
    if find_running_servers(MEASURED_DIR):
        console.print("warning: another measurement runs on this machine. Each takes processor time from the other.")
    if read_model_states(url) is not None:
        if find_tls_folder(url):
            raise ConfigError(
                f"The server at {url} speaks TLS, and load is sent without. Measure one without: leave out --url, or start a "
                "server without --tls."
            )
        if not is_ready(url):
            raise ServerError(
                f"The server at {url} is not ready: {list_unready(url)}. `make stop`, then `make perf` starts its own."
            )
        yield find_site(url, repo)
        return
    console.print(f"No server answers at {url}: one is started on {repo} for this measurement.", markup=False, highlight=False)
    with own_server(repo) as server:
        yield read_site(server.state)


def own_server(repo: Path) -> TritonServer:
    """Return a server on free ports. `make stop` leaves it alone while the measurement runs, and ends it if that was killed."""
    return TritonServer(repo, run_dir=MEASURED_DIR)


def find_site(url: str, repo: Path) -> Site:
    """Return a running server: one of ours with its ports; for others, Triton's default distances between ports are assumed."""
    host, _, port = url.rpartition(":")
    state = next((state for state in find_running_servers(RUN_DIR) if state.ports.grpc == int(port)), None)
    if state is None:
        ports = Ports(int(port), int(port) - 1, int(port) + 1)
        metrics = f"http://{host}:{ports.metrics}/metrics"
        return Site(url, f"{host}:{ports.http}", metrics, repo.resolve(), find_served_generation(url), None)
    if state.repo != repo.resolve():
        raise ConfigError(f"The server at {url} serves {state.repo}, not {repo}. Pass --repo {state.repo}, or another --url.")
    return read_site(state)


def read_site(state: ServerState) -> Site:
    http, metrics = f"{state.host}:{state.ports.http}", f"http://{state.host}:{state.ports.metrics}/metrics"
    return Site(state.grpc_url, http, metrics, state.repo, find_served_generation(state.grpc_url), state.tag)


class Turns:
    """Suspends the processes of one server except inside `turn()`."""

    def __init__(self, tag: str) -> None:
        self._processes = find_members(tag)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        self._apply(psutil.Process.suspend)

    def resume(self) -> None:
        self._apply(psutil.Process.resume)

    def _apply(self, action) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # the next request shows that it died
                action(process)


@contextlib.contextmanager
def take_turns(tag: str) -> Iterator[Turns]:
    """Suspend a server for the block, and resume it at the end so that it can be stopped."""
    turns = Turns(tag)
    turns.pause()
    try:
        yield turns
    finally:
        turns.resume()
