"""Dead processes are started again, damaged files are not served: the supervisor, the gateway and a real tritonserver."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import httpx
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from experiments.faults import Site, change_for_now, take_port, truncate
from export.relayout import relayout
from repository.challenger import read_challengers
from repository.experiments import change_share, end_experiment, find_running, start_experiment
from repository.registry import read_acts
from server import __main__ as commands
from server import control, watch
from server.helpers import guard
from server.state import ServerState
from server.status.condition import examine
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ArtifactError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import Experiment
from tests.repositories import small_fused_repository
from tests.server.support.gateways import USER
from tests.server.support.supervised import RECOVERS_S, Supervised, supervised_shop


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Iterator[Supervised]:
    with supervised_shop(tmp_path_factory.mktemp("supervised")) as shop:
        yield shop


def test_what_is_paused_fails_readiness_is_started_again_and_is_told_afterwards(shop, monkeypatch):
    """A stub; tests/server/test_commands.py pauses tritonserver."""
    monkeypatch.setattr(commands, "RUN_DIR", shop.run_dir)
    before = shop.state
    shop.find_stub(ENSEMBLE).suspend()
    shop.wait(lambda: not shop.is_ready())
    shop.wait(lambda: shop.state.pid != before.pid)
    shop.recover()
    told = CliRunner().invoke(commands.app, ["diagnose", "--grpc-port", str(shop.grpc_port)], catch_exceptions=False)
    assert (told.exit_code, ": ready" in told.output) == (0, True)
    assert any("paused" in line for line in told.output.splitlines() if line.startswith("supervisor: "))


def test_a_gateway_that_is_paused_is_ended_and_comes_back(shop):
    (worker,) = shop.find_gateway_processes()
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


def test_a_challenger_that_fails_is_rolled_back_by_the_servers_own_guard(shop):
    """Generation 2 is not loaded: every user of its share gets the champion's answer, and the log says why.

    Before, the models' process is killed, and the server comes back with the generation that was active. The tests below kill
    tritonserver, tests/server/test_faults.py the live writer.
    """
    start_experiment(shop.repo, Experiment("spring", 1, 2, 0.0))
    shop.wait(lambda: len(guard.list_guards(shop.state.tag)) == 2)  # with its supervisor
    guards, before, answer = guard.list_guards(shop.state.tag), shop.state, shop.ask_in_full()
    shop.find_stub(ENSEMBLE).kill()
    shop.wait(lambda: shop.state.pid != before.pid)
    shop.recover()
    shop.wait(lambda: shop.ask()["items"] == answer["items"])  # popular ones while the server is slow at first
    assert shop.ask()["generation"] == answer["generation"] == shop.state.generation
    assert shop.state.log.with_name(f"{shop.state.log.name}.1").exists()
    event = {"user": USER, "item": answer["items"][-1]["id"]}
    assert shop.http.post("/v1/events", json=event).status_code == 200
    assert guard.list_guards(shop.state.tag) == guards
    change_share(shop.repo, 1.0)
    shop.wait(lambda: read_acts(shop.repo)[-1].action == "rolled back")
    assert "it failed in" in read_acts(shop.repo)[-1].reason
    shop.recover()
    shop.wait(lambda: guard.list_guards(shop.state.tag) == [])


def test_a_changed_artifact_is_not_served(shop, monkeypatch):
    """Without another generation, this one stays out of service until its files are as published. A start changes nothing."""
    monkeypatch.setattr(commands, "RUN_DIR", shop.run_dir)
    path = find_stage_folder(shop.repo, "rank", shop.state.generation) / "stage.json"
    published = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(published[:-2] + b"\n\n")
    shop.wait(lambda: not shop.is_ready())
    shop.wait(lambda: "stage.json is not the file that was published" in examine(shop.state.grpc_url, shop.state).fault)
    before, ports = shop.state, shop.state.ports
    numbers = ["--grpc-port", str(ports.grpc), "--http-port", str(ports.http), "--metrics-port", str(ports.metrics)]
    with pytest.raises(ArtifactError, match=r"stage\.json is not the file that was published.* and nothing stopped\."):
        CliRunner().invoke(commands.app, ["start", "--repo", str(shop.repo), *numbers], catch_exceptions=False)
    assert shop.state == before
    assert shop.ask()["degraded"] == ["gateway_fallback"]
    path.write_bytes(published)
    shop.recover()
    control.activate(shop.state, shop.state.generation, shop.run_dir)


@pytest.mark.parametrize(
    ("model", "name", "change"), [("retrieve", "item_vectors.npy", Path.unlink), (ENSEMBLE, "popular.json", truncate)]
)
def test_while_an_artifact_of_a_stage_is_gone_or_one_of_the_gateway_is_cut_short_popular_items_answer(
    shop, model, name, change
):
    """The gateway has read its own before."""
    expected, before = shop.ask_in_full()["items"], shop.state
    with change_for_now(find_stage_folder(shop.repo, model, before.generation) / name, change):
        shop.wait(lambda: not shop.is_ready() and name in examine(before.grpc_url, shop.state).fault)
        assert shop.ask()["degraded"] == ["gateway_fallback"]
    shop.recover()
    assert shop.state.pid != before.pid
    assert shop.ask_in_full()["items"] == expected


def test_a_restart_waits_for_a_port_that_another_process_has_taken(shop):
    """The supervisor names the port. The gateway gets no answer from the other process, and shows popular items."""
    before, site = shop.state, SimpleNamespace(served=shop, supervisor=find_watch(shop))
    with take_port(cast(Site, site)):
        shop.wait(lambda: "restart failed" in read_last_line(shop))
        assert str(before.ports.grpc) in read_last_line(shop)
        assert shop.ask()["degraded"] == ["gateway_fallback"]
    shop.recover()
    assert (shop.state.ports, shop.state.pid != before.pid) == (before.ports, True)


def read_last_line(shop: Supervised) -> str:
    """Return the last line of the supervisor's log."""
    return watch.read_last_lines(shop.run_dir, shop.grpc_port, 1)[0]


def test_no_answer_comes_from_a_mapped_file_that_is_being_written(shop):
    """The writer waits until the server has ended. Out of service no writer waits, and a file that is cut short is noticed."""
    answer, path = shop.ask_in_full(), find_stage_folder(shop.repo, "retrieve", shop.state.generation) / "item_vectors.npy"
    shop.wait(lambda: is_leased(path))  # the supervisor may have begun just now
    published = path.read_bytes()
    path.chmod(0o644)
    stop, answers = threading.Event(), list[dict]()

    def ask_until_stopped() -> None:
        while not stop.is_set():
            answers.append(shop.ask())

    asking = threading.Thread(target=ask_until_stopped)
    asking.start()
    vectors = np.load(path, mmap_mode="r+")
    vectors[:] = np.roll(vectors, 7, axis=0)  # other vectors, each of them plausible
    del vectors
    shop.wait(lambda: not shop.is_ready())
    stop.set()
    asking.join()
    assert {tuple(item["id"] for item in one["items"]) for one in answers if one["degraded"] == []} <= {
        tuple(item["id"] for item in answer["items"])
    }
    assert any("opened for writing" in line for line in watch.read_last_lines(shop.run_dir, shop.grpc_port, 20))
    path.write_bytes(published[:-1])
    shop.wait(lambda: "is not the file that was published" in examine(shop.state.grpc_url, shop.state).fault)
    path.write_bytes(published)
    shop.recover()


def is_leased(path: Path) -> bool:
    """Return whether any process holds a lease on a file."""
    locks = (line.split() for line in Path("/proc/locks").read_text().splitlines())
    return any("LEASE" in lock and lock[5].endswith(f":{path.stat().st_ino}") for lock in locks)


def challenge(servers: list[ServerState], repo: Path, experiment: Experiment) -> None:
    from export.continuous import follow  # it imports what trains, which takes each worker seconds

    follow.challenge(servers, repo, experiment)


def test_no_answer_comes_from_an_array_of_a_challenger_that_is_being_written(shop):
    """The writer waits until the experiment is over and the challenger stopped. The server goes on."""
    before, challenger = shop.state, relayout(small_fused_repository(), shop.repo, "fused")
    path = find_stage_folder(shop.repo, "retrieve", challenger) / "item_vectors.npy"
    path.chmod(0o644)
    challenge([before], shop.repo, Experiment("winter", 0, challenger, 0.99))
    shop.wait(lambda: shop.ask()["generation"] == challenger and is_leased(path))
    expected, ran = shop.ask_in_full(), list[bool]()
    assert expected["generation"] == challenger

    def overwrite() -> None:
        vectors = np.load(path, mmap_mode="r+")
        ran.append(find_running(shop.repo) is not None)
        vectors[:] = np.roll(vectors, 7, axis=0)  # other vectors, each of them plausible

    answers, writing = list[dict](), threading.Thread(target=overwrite)
    writing.start()
    while writing.is_alive():
        answers.append(shop.ask())
    assert ran == [False]
    full = [answer for answer in answers if answer["degraded"] == []]
    assert all(answer["items"] == expected["items"] for answer in full if answer["generation"] == challenger)
    assert read_acts(shop.repo)[-1].reason.endswith(f"{path} was opened for writing")
    shop.wait(lambda: not read_challengers(shop.repo))
    shop.recover()
    assert shop.state == before


def test_a_server_that_dies_with_a_damaged_challenger_comes_back_without_it(shop):
    """Both happen before the supervisor looks."""
    before, challenger = shop.state, relayout(small_fused_repository(), shop.repo, "fused")
    supervisor = find_watch(shop)
    supervisor.suspend()
    try:
        challenge([before], shop.repo, Experiment("autumn", 0, challenger, 0.5))
        path = find_stage_folder(shop.repo, "rank", challenger) / "stage.json"
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-2] + b"\n\n")
        psutil.Process(before.pid).kill()
    finally:
        supervisor.resume()
    shop.wait(lambda: shop.state.pid != before.pid)
    shop.recover()
    assert shop.state.generation == before.generation
    assert not read_challengers(shop.repo)


def test_a_challenger_that_is_promoted_answers_everybody(shop, tmp_path):
    """Until a person decides otherwise: tests/unit/server/test_promotion.py."""
    challenger = relayout(small_fused_repository(), shop.repo, "fused")
    challenge([shop.state], shop.repo, Experiment("summer", 0, challenger, 0.0, promotes=True))
    end_experiment(shop.repo, "more clicks", state="promoted")
    shop.wait(lambda: shop.ask()["generation"] == challenger)
    shop.wait(lambda: read_acts(shop.repo)[-1].action == "activated")
    assert read_pinned_generation(shop.repo) == challenger
    shop.recover()


def find_watch(shop: Supervised) -> psutil.Process:
    """Return the process that looks at the server, without the one that starts it again."""
    found = control.list_supervisors(shop.state.tag)
    (process,) = [process for process in found if "server.supervisor" not in process.cmdline()]
    return process


def test_a_supervisor_that_is_killed_is_started_again_and_restarts_the_server(shop):
    find_watch(shop).kill()
    psutil.Process(shop.state.pid).kill()
    shop.recover()
    assert find_watch(shop).is_running()
