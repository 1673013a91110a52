"""A gateway in front of a real tritonserver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from server import gateway
from server.control import stop_server
from server.launcher import TritonServer
from server.ports import find_free_port, is_free
from server.processes import find_members
from server.tls import ServerTls
from tests.repositories import copy_small_repository

USER = 7


@dataclass
class Served:
    server: TritonServer
    port: int
    http: httpx.Client

    def recommend(self, **params) -> dict:
        response = self.http.get("/v1/recommendations", params={"user": USER, **params}, headers={"x-deadline-ms": "5000"})
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def served_gateway(folder: Path, tls: ServerTls | None = None) -> Iterator[Served]:
    """Run a server of the small shop, with a live store of its own, and a gateway, all in `folder`. tls: between the two."""
    repo = copy_small_repository(folder / "repository")
    config = folder / "gateway.toml"
    settings = ("deadline_ms = 5_000", "header_timeout_s = 1.0", "body_timeout_s = 1.0", "body_bytes = 100_000")
    config.write_text("\n".join((*settings, "exposure_share = 1.0", "")))
    server = TritonServer(repo, run_dir=folder / "run", tls=tls).start()
    port = find_free_port()
    state = gateway.follow(server.state, port, str(config), folder / "run")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield Served(server, port, http)
    finally:
        stop_server(state, folder / "run")
        assert find_members(state.tag) == []
        assert is_free(port)
