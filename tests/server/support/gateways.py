"""A gateway in front of a real tritonserver."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx

from server.control import stop_server
from server.helpers import gateway
from server.launcher import TritonServer
from server.processes import find_members
from server.start.ports import find_free_port, is_free
from server.start.tls import ServerTls
from tests.repositories import copy_small_fused_repository, copy_small_repository
from tests.server.support.load import Clients
from tests.waiting import until

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
def served_gateway(folder: Path, tls: ServerTls | None = None, fused: bool = True) -> Iterator[Served]:
    """Run a server of the small shop, with a live store of its own, and a gateway, all in `folder`. tls: between the two."""
    repo = (copy_small_fused_repository if fused else copy_small_repository)(folder / "repository")
    config = folder / "gateway.toml"
    settings = ("deadline_ms = 5_000", "header_timeout_s = 1.0", "body_timeout_s = 1.0", "body_bytes = 100_000")
    config.write_text("\n".join((*settings, "exposure_share = 1.0", "")))
    server = TritonServer(repo, run_dir=folder / "run", tls=tls).start()
    port = find_free_port()
    state = gateway.follow(server.state, port, str(config), folder / "run")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as http:
            yield Served(server, port, http)
    finally:
        stop_server(state, folder / "run")
        assert find_members(state.tag) == []
        assert is_free(port)


@dataclass(frozen=True)
class Visit:
    """A user's answer. share: of the challenger when it was requested and when it came, None if it changed in between"""

    user: int
    share: float | None
    answer: dict


class Visitors(Clients):
    """Clients that ask a gateway for users in turn, without a pause.

    share: what a test says that the challenger's share is, None while it changes
    """

    def __init__(self, served: Served, users: Sequence[int], clients: int) -> None:
        super().__init__(clients)
        self.share: float | None = None
        self.visits: list[Visit] = []
        self._served, self._users = served, users

    def wait_for_each_user(self) -> None:
        """Wait until each user was answered once more, all the while at the present share, or until there is an error."""
        before = len(self.visits)
        users = set(self._users)
        until(lambda: self.errors or users == {visit.user for visit in self.visits[before:] if visit.share is not None})

    def _run(self, number: int) -> None:
        with httpx.Client(base_url=self._served.http.base_url, timeout=120) as http:
            for turn in count(number, self._clients):
                if self._stop.is_set():
                    return
                share, user = self.share, self._users[turn % len(self._users)]
                try:
                    answer = Served(self._served.server, self._served.port, http).recommend(user=user)
                except Exception as error:
                    self.errors.append(error)
                else:
                    self.visits.append(Visit(user, share if share == self.share else None, answer))
