"""What dies is started again, what is damaged is not served: the supervisor, the gateway and a real tritonserver."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from server import gateway, launcher, watch
from server.condition import examine
from server.launcher import TritonServer, stop_server
from server.processes import SHM_DIR, members, server_members
from server.state import ServerState, read_state, state_path
from serving.contract.artifacts import stage_folder
from tests.repositories import copy_small_repository
from tests.server.gateways import USER, free_port

RECOVERS_S = 60.0  # far above what it takes: the machine that runs the tests may be slow


@dataclass
class Supervised:
    """A server of the small shop with its gateway and supervisor."""

    repo: Path
    run_dir: Path
    grpc_port: int
    http: httpx.Client

    @property
    def state(self) -> ServerState:
        state = read_state(state_path(self.run_dir, self.grpc_port))
        assert state is not None
        return state

    def stub(self, model: str) -> psutil.Process:
        return next(process for process in server_members(self.state.tag) if f"/{model}/" in " ".join(process.cmdline()))

    def ask(self) -> dict:
        """Ask for recommendations: always 200, popular items where the server does not answer."""
        answer = self.http.get("/v1/recommendations", params={"user": USER, "k": 5})
        assert answer.status_code == 200, answer.text
        assert len(answer.json()["items"]) == 5
        return answer.json()

    def is_ready(self) -> bool:
        return self.http.get("/readyz").status_code == 200

    def wait(self, condition: Callable[[], bool], limit_s: float = RECOVERS_S) -> float:
        """Return the seconds until the condition holds. Shoppers ask meanwhile."""
        begun_s = time.monotonic()
        while not condition():
            assert time.monotonic() - begun_s < limit_s, "\n".join(watch.last_words(self.run_dir, self.grpc_port, 20))
            self.ask()
            time.sleep(0.05)
        return time.monotonic() - begun_s

    def recover(self) -> None:
        """Wait until the server answers as before."""
        self.wait(lambda: self.ask()["degraded"] == [] and self.is_ready())
        assert examine(self.state.grpc_url, self.state).fault == ""


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Iterator[Supervised]:
    folder = tmp_path_factory.mktemp("supervised")
    repo, run_dir, port = copy_small_repository(folder / "repository"), folder / "run", free_port()
    server = TritonServer(repo, run_dir=run_dir).start()
    state = gateway.follow(server.state, port, "", run_dir)
    watch.start_beside(state, run_dir)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            yield Supervised(repo, run_dir, state.ports.grpc, http)
    finally:
        stop_server(state, run_dir)
        assert members(state.tag) == []
        assert not state_path(run_dir, state.ports.grpc).exists()
        assert list(SHM_DIR.glob(f"{state.tag}*")) == []


@pytest.mark.parametrize("victim", ["rank", "observe", "tritonserver"])
def test_what_is_killed_comes_back_with_the_generation_that_was_active(shop, victim):
    before = shop.state
    answer = shop.ask()
    (shop.stub(victim) if victim != "tritonserver" else psutil.Process(before.pid)).kill()
    shop.wait(lambda: shop.state.pid != before.pid)
    shop.recover()
    assert shop.ask()["generation"] == answer["generation"] == shop.state.generation
    assert [item["id"] for item in shop.ask()["items"]] == [item["id"] for item in answer["items"]]
    assert shop.state.log.with_name(f"{shop.state.log.name}.1").exists()
    event = {"user": USER, "item": answer["items"][-1]["id"], "id": f"after {victim}"}
    assert shop.http.post("/v1/events", json=event).status_code == 200


@pytest.mark.parametrize("victim", ["retrieve", "tritonserver"])
def test_what_is_paused_fails_readiness_and_is_started_again(shop, victim):
    before = shop.state
    paused = shop.stub(victim) if victim != "tritonserver" else psutil.Process(before.pid)
    paused.suspend()
    shop.wait(lambda: not shop.is_ready())
    shop.wait(lambda: shop.state.pid != before.pid)
    shop.recover()
    assert any("paused" in line for line in watch.last_words(shop.run_dir, shop.grpc_port))


def test_a_gateway_that_is_paused_is_ended_and_comes_back(shop):
    worker = next(process for process in gateway.gateways(shop.state.tag) if "server.supervisor" not in process.cmdline())
    worker.suspend()
    worker.wait(RECOVERS_S)
    deadline_s = time.monotonic() + RECOVERS_S
    while True:
        try:
            shop.recover()
            return
        except httpx.TransportError:
            assert time.monotonic() < deadline_s
            time.sleep(0.1)


def test_a_changed_artifact_is_not_served(shop):
    """The last test: the generation stays out of service until its files are as published."""
    path = stage_folder(shop.repo, "rank", shop.state.generation) / "stage.json"
    published = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(published[:-2] + b"\n\n")
    shop.wait(lambda: not shop.is_ready())
    condition = examine(shop.state.grpc_url, shop.state)
    assert "stage.json is not the file that was published" in condition.fault
    assert shop.ask()["degraded"] == ["gateway_fallback"]
    path.write_bytes(published)
    shop.recover()
    launcher.activate(shop.state, shop.state.generation, shop.run_dir)
