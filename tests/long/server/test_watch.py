"""The supervisor of a server: what it notices, and that it ends together with the server where it owns it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from repository.experiments import find_running
from repository.file_stamps import read_stamp
from repository.generations import pin
from repository.lock import LOCK_FILE
from repository.registry import RECORD_FILE, read_acts
from server.control import stop_server
from server.generations.activation import find_served_generation
from server.generations.challenger import find_loaded_challengers
from server.observer import HANGS_S, Observer
from server.processes import is_running
from server.start.lock import hold_start_lock
from server.start.ports import find_free_ports
from server.state import ServerState, make_state_path, read_state
from server.watch import LOGGER, TICK_S, Watch, build_arguments
from serving.contract.artifacts import MANIFEST_FILE
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES
from tests.tags import draw_tag
from tests.triton_double import TritonDouble
from tests.unit.server.conftest import SETTINGS, read_saved, run_with_dead_stubs
from tests.unit.server.shops import begin_experiment, make_shop, make_unwritable, spoil_updater
from tests.waiting import until


@pytest.fixture
def state(sleeping, tmp_path) -> ServerState:
    """Return the saved state of a process that does nothing in the place of a server."""
    sleeping.save(tmp_path)
    return sleeping


@pytest.fixture
def serve(state, installed_double, tmp_path) -> Callable[..., ServerState]:
    """serve(repo, generation, more settings) -> the saved state of that process, as of a server of the repository"""

    def serve(repo: Path, generation: int, **settings: object) -> ServerState:
        served = replace(state, repo=repo, generation=generation, settings=SETTINGS | settings)
        served.save(tmp_path)
        return served

    return serve


def catches(pid: int, signum: signal.Signals) -> bool:
    """Return whether a process has a handler for a signal."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return bool(int(status["SigCgt"], 16) >> (signum - 1) & 1)


def test_a_stub_that_died_before_anybody_looked_is_missed(tmp_path):
    with run_with_dead_stubs(tag := draw_tag(), tmp_path, 1) as server:
        state = ServerState(server.pid, tag, tmp_path, tmp_path / "log", find_free_ports())
        assert Observer(state).find_fault() == "1 of its Python model process(es) died"


def test_a_supervisor_that_owns_its_server_stops_it_and_exits_itself(state, tmp_path):
    supervisor = subprocess.Popen([sys.executable, *build_arguments(state, tmp_path), "--owner"])
    try:
        until(lambda: catches(supervisor.pid, signal.SIGTERM))
        supervisor.terminate()
        assert supervisor.wait(60) == 128 + signal.SIGTERM
    finally:
        supervisor.kill()
    assert not make_state_path(tmp_path, state.ports.grpc).exists()
    assert not is_running(state.pid, state.tag)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_whose_exception_python_ignores_ends_a_supervisor_after_its_look(state, tmp_path):
    class Finalised:
        def __del__(self) -> None:
            watching.exit_on_signal(signal.SIGTERM, None)

    watching = Watch(tmp_path, state.ports.grpc)
    with ThreadPoolExecutor(1) as pool:
        supervised = pool.submit(watching.run)
        Finalised()
        with pytest.raises(SystemExit, match=str(128 + signal.SIGTERM)):
            supervised.result(30)


def test_a_server_that_accepts_calls_and_answers_none_does_not_hold_up_its_supervisor(state):
    ended = threading.Event()

    class Silence(grpc.GenericRpcHandler):
        def service(self, handler_call_details):
            return grpc.unary_unary_rpc_method_handler(lambda request, context: ended.wait(60) or b"")

    server = grpc.server(ThreadPoolExecutor(8), handlers=[Silence()])
    server.add_insecure_port(state.grpc_url)
    server.start()
    begun_s = time.monotonic()
    try:
        assert Observer(state).find_fault() == ""
    finally:
        ended.set()
        server.stop(None)
    assert time.monotonic() - begun_s < HANGS_S


@contextmanager
def watched(state: ServerState, run_dir: Path) -> Iterator[None]:
    """Supervise a server in a thread; what was started in its place is stopped in the end."""
    supervisor = threading.Thread(target=Watch(run_dir, state.ports.grpc).run)
    supervisor.start()
    try:
        yield
    finally:
        while supervisor.is_alive():
            state.forget(run_dir)  # again and again: a restart saves the state anew
            supervisor.join(0.1)
        stop_server(state, run_dir)


def wait_until_out_of_service(state: ServerState, run_dir: Path, spoil: Callable[[], object] = lambda: None) -> None:
    """Let the process that does nothing look like a server that answers until its supervisor finds a fault.

    spoil: called once it answers
    """
    double = TritonDouble(state.repo, state.ports.grpc)
    try:
        spoil()
        until(lambda: read_saved(state, run_dir).fault)
    finally:
        double.stop()


def wait_until_in_service(state: ServerState, run_dir: Path, generation: int) -> None:
    def answers() -> bool:
        now = read_state(make_state_path(run_dir, state.ports.grpc))  # None for a moment, while the server is started again
        return now is not None and now.generation == generation and not now.fault and is_running(now.pid, now.tag)

    until(answers)


@pytest.fixture
def said(capsys) -> Callable[[], str]:
    """said() -> all that was printed so far"""
    printed: list[str] = []

    def read() -> str:
        printed.append(capsys.readouterr().out)
        return "".join(printed)

    return read


def test_a_helper_that_does_not_start_is_no_reason_to_restart_the_server_again(serve, tmp_path, said):
    repo = make_shop(tmp_path / "shop")
    state = serve(repo, 1, gateway_url="http://127.0.0.1:8080")
    spoil_updater(repo, 1)
    os.kill(state.pid, signal.SIGKILL)
    path = make_state_path(tmp_path, state.ports.grpc)
    with watched(state, tmp_path):
        until(lambda: (now := read_state(path)) is not None and now.pid != state.pid)
        restarted = read_saved(state, tmp_path)  # at once: another supervisor may have to go on from it
        assert restarted == replace(state, pid=restarted.pid, log=restarted.log, content=restarted.content)
        until(lambda: "answers again" in said())
        assert read_state(path) == restarted
        assert is_running(restarted.pid, state.tag)
    assert "The updater of generation 1 did not start" in said()
    assert said().count("answers again") == 1


def test_a_damaged_champion_is_left_for_the_generation_before_its_experiment_stops_and_that_is_recorded(serve, tmp_path, said):
    repo = make_shop(tmp_path / "shop", generations=3)
    begin_experiment(repo, 2, 3)
    state = serve(repo, 2)
    (repo / "rank" / "2" / MANIFEST_FILE).write_text("{damaged")
    os.kill(state.pid, signal.SIGKILL)  # it must not be started with damaged files
    with watched(state, tmp_path):
        until(lambda: "answers again" in said())
        now = read_saved(state, tmp_path)
        assert (find_served_generation(now.grpc_url), find_loaded_challengers(now.grpc_url)) == (1, [])
    assert find_running(repo) is None
    assert "experiment spring is stopped: generation 1 answers in place of the champion, 2: " in said()
    act = read_acts(repo)[-1]
    assert (act.author, act.action, act.generation, read_pinned_generation(repo)) == ("server", "pinned", 1, 1)
    assert MANIFEST_FILE in act.reason


def test_a_damaged_generation_is_left_although_the_repository_cannot_be_written(serve, tmp_path, said):
    repo = make_shop(tmp_path / "shop", generations=2)
    pin(repo, 2)
    state = serve(repo, 2, follow_pin=True)
    make_unwritable(repo)
    (repo / "rank" / "2" / MANIFEST_FILE).write_text("{damaged")
    with watched(state, tmp_path):
        until(lambda: "answers again" in said())
        now = read_saved(state, tmp_path)
        assert (now.generation, read_pinned_generation(repo), find_served_generation(now.grpc_url)) == (1, 2, 1)
        assert now.settings == state.settings
        os.kill(now.pid, signal.SIGKILL)  # a restart keeps the generation, which the configs do not name
        until(lambda: said().count("answers again") == 2)
        assert find_served_generation(now.grpc_url) == 1
        (repo / "rank" / "1" / MANIFEST_FILE).write_text("{damaged")
        until(lambda: "no other generation is intact" in said())  # and the supervisor goes on
    assert said().count(f"{repo / LOCK_FILE} cannot be written") == 1
    assert said().count(f"{repo / RECORD_FILE} cannot be written") == 1
    assert "Traceback" not in said()
    assert {json.loads(line)["logger"] for line in said().splitlines()} == {LOGGER}


def test_a_server_out_of_service_comes_back_with_an_intact_generation_that_is_published(serve, tmp_path):
    repo = make_shop(tmp_path / "shop", generations=2)
    published = {model: (repo / model / "2").rename(tmp_path / model) for model in (*STAGES, *LIVE_MODELS, ENSEMBLE)}
    state = serve(repo, 1)
    (repo / "rank" / "1" / MANIFEST_FILE).write_text("{damaged")
    with watched(state, tmp_path):
        wait_until_out_of_service(state, tmp_path)
        for model, folder in published.items():
            folder.rename(repo / model / "2")
        pin(repo, 2)  # the last step of a publication
        wait_until_in_service(state, tmp_path, generation=2)


def test_a_server_out_of_service_comes_back_once_the_files_of_the_pinned_generation_are_mended(serve, tmp_path):
    repo = make_shop(tmp_path / "shop", generations=2)
    pin(repo, 2)
    path = repo / "rank" / "2" / "stage.json"
    published = path.read_bytes()
    state = serve(repo, 1)
    for generation in ("1", "2"):
        (repo / "rank" / generation / "stage.json").write_text("{damaged")
    with watched(state, tmp_path):
        wait_until_out_of_service(state, tmp_path)
        time.sleep(4 * TICK_S)  # for it to read the damaged files
        path.write_bytes(published)
        wait_until_in_service(state, tmp_path, generation=2)


def test_a_removed_repository_takes_the_server_out_of_service_until_it_is_back(serve, tmp_path, said):
    repo = make_shop(tmp_path / "shop")
    backup = shutil.copytree(repo, tmp_path / "backup")
    state = serve(repo, 1)
    with watched(state, tmp_path):
        wait_until_out_of_service(state, tmp_path, lambda: shutil.rmtree(repo))
        backup.rename(repo)
        wait_until_in_service(state, tmp_path, generation=1)
    assert "Traceback" not in said()


def test_a_restart_that_waits_serves_the_generation_that_was_chosen_meanwhile(serve, tmp_path, said):
    """A round of `export follow` chooses it while it holds the lock on starts."""
    repo = make_shop(tmp_path / "shop", generations=2)
    state = serve(repo, 1)
    os.kill(state.pid, signal.SIGKILL)
    with ExitStack() as stack:
        with hold_start_lock(tmp_path, state.ports.grpc):
            stack.enter_context(watched(state, tmp_path))
            until(lambda: "restarting with generation 1" in said())
            pin(repo, 2)
            read_saved(state, tmp_path).change(tmp_path, generation=2)
        until(lambda: "answers again" in said())
        now = read_saved(state, tmp_path)
        assert (now.generation, find_served_generation(now.grpc_url)) == (2, 2)


def test_a_restart_with_another_generation_than_the_pinned_one_leaves_the_pin(serve, tmp_path, said):
    """If it was changed meanwhile, a power failure would lose it."""
    repo = make_shop(tmp_path / "shop", generations=2)
    pin(repo, 2)
    state, before = serve(repo, 1), [read_stamp(path) for path in repo.glob("*/config.pbtxt")]
    os.kill(state.pid, signal.SIGKILL)
    with watched(state, tmp_path):
        until(lambda: "answers again" in said())
        now = read_saved(state, tmp_path)
        assert (now.generation, find_served_generation(now.grpc_url), read_pinned_generation(repo)) == (1, 1, 2)
    assert [read_stamp(path) for path in repo.glob("*/config.pbtxt")] == before
