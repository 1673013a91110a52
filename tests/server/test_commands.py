"""`python -m server …` as make calls it, against the real server."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from functools import partial

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from repository.generations import pin
from server import __main__ as commands
from server import watch
from server.control import find_running_servers, stop_server
from server.processes import find_dead_stubs, find_members, is_running
from server.start.ports import Ports, find_free_ports
from server.status.condition import QUESTION_TIMEOUT_S
from server.status.health import is_ready, open_local_client, wait_ready
from serving.contract.errors import ServerError, run_program
from serving.contract.generations import read_pinned_generation
from tests.server.support import toys
from tests.waiting import until
from triton_recommender.errors import STUB_DIED, make_status_error


@pytest.fixture
def ports() -> Ports:
    return find_free_ports()


@pytest.fixture
def start(repo, ports) -> tuple[object, ...]:
    """The command that starts a server of the toy repository at `ports`."""
    return ("start", "--repo", repo, "--grpc-port", ports.grpc, "--http-port", ports.http, "--metrics-port", ports.metrics)


@pytest.fixture
def call(run_dir, monkeypatch):
    """call("stop", …) -> what the command printed; servers it leaves running are stopped after the test."""
    monkeypatch.setattr(commands, "RUN_DIR", run_dir)

    def run(*arguments: object, exit_code: int = 0, supervised: bool = False) -> str:
        words = [str(argument) for argument in arguments]
        if words[0] == "start" and not supervised:
            words.append("--unsupervised")  # a supervisor would restart what these tests let die
        result = CliRunner().invoke(commands.app, words, catch_exceptions=False)
        assert result.exit_code == exit_code, result.output
        return result.output

    yield run
    for state in find_running_servers(run_dir):
        stop_server(state, run_dir)


def test_start_is_repeatable_follows_the_repository_and_stop_is_too(repo, ports, start, call):
    url = f"localhost:{ports.grpc}"
    assert call(*start).startswith("ready: ")
    assert call("status").startswith(f"running: {repo}")
    assert call("wait", "--url", url) == f"ready: {url}\n"
    assert "already running" in call(*start)
    assert "already running" in call(*start, "--threads", 1)
    with pytest.raises(
        ServerError,
        match=r"already runs with threads 1, cache_mib 0: .*Expected threads 3, cache_mib 8, which needs.*stop",
    ):
        call(*start, "--threads", 3, "--cache-mib", 8)
    toys.publish(repo, 2)
    pin(repo, 2)  # what publishing a new generation does
    assert call(*start).startswith("moved to the pinned generation: 1 -> 2\nalready running")
    with grpcclient.InferenceServerClient(url) as client:
        assert toys.ask(client, 1) == toys.expected(1, generation=2)
    toys.publish(repo, 3)
    pin(repo, 3)
    toys.remove(repo, 2)
    assert call(*start).startswith("ready: ")  # its generation is gone from the repository, so it is started again
    with grpcclient.InferenceServerClient(url) as client:
        assert toys.ask(client, 1) == toys.expected(1, generation=3)
    assert "generation 1 answers" in call("activate", "--generation", 1, "--grpc-port", ports.grpc)
    _running, condition = call("status").splitlines()  # the processes of the generation it left are not counted as lost
    assert condition.endswith("generation 1, first ready, recommend ready, second ready")
    assert call("stop", "--grpc-port", ports.grpc).startswith("stopped: ")
    assert "nothing to stop" in call("stop", "--grpc-port", ports.grpc)
    assert "nothing to stop" in call("stop")
    assert "no server is running" in call("status", exit_code=1)


def test_start_serves_a_generation_that_was_replaced_under_the_same_number(repo, ports, start, call):
    manifest = repo / "recommend" / "1" / "manifest.json"
    manifest.write_text('{"files": {}}')
    assert call(*start).startswith("ready: ")
    assert "already running" in call(*start)
    toys.publish(repo, 2)
    assert "generation 2 answers" in call("activate", "--generation", 2, "--grpc-port", ports.grpc)
    assert "already running" in call(*start)
    shutil.rmtree(repo)
    toys.publish(repo, 1)
    toys.publish(repo, 2)
    (repo / "recommend" / "2" / "manifest.json").write_text('{"files": {}, "another": 1}')
    pin(repo, 2)
    assert call(*start).startswith("ready: ")
    assert "already running" in call(*start)


def test_a_failed_start_is_one_message_and_diagnose_repeats_it(repo, ports, start, call, monkeypatch):
    (repo / "second" / "1" / "model.py").write_text("raise RuntimeError('tables.npy is cut short')")
    monkeypatch.setattr(sys, "argv", ["server", *map(str, start)])
    with pytest.raises(SystemExit) as caught:
        run_program(commands.app)
    message = str(caught.value)
    assert message.startswith("error: tritonserver ")
    assert "model second failed to load" in message
    assert "Traceback" not in message
    told = call("diagnose", "--grpc-port", ports.grpc, exit_code=1)
    assert "nothing answers there" in told
    assert "tables.npy is cut short" in told


def test_a_killed_model_process_is_reported_by_status_and_diagnose_and_start_starts_again(repo, ports, start, call, run_dir):
    url = f"localhost:{ports.grpc}"
    call(*start, "--threads", 2)
    assert f"server at {url}: ready" in call("diagnose", "--grpc-port", ports.grpc)
    state = find_running_servers(run_dir)[0]
    stub = next(process for process in find_members(state.tag) if process.pid != state.pid)
    stub.kill()
    while not find_dead_stubs(state.pid):
        time.sleep(0.01)
    with (
        grpcclient.InferenceServerClient(url) as client,
        pytest.raises(InferenceServerException, match=f"(?i){STUB_DIED}") as caught,
    ):
        toys.ask(client, 1)
    assert "make serve" in str(make_status_error("INTERNAL", str(caught.value), url, 1.0))
    remedy = f"--repo {repo} --grpc-port {ports.grpc} --http-port {ports.http} --metrics-port {ports.metrics}"
    for told in (call("status", exit_code=1), call("diagnose", "--grpc-port", ports.grpc, exit_code=1)):
        assert "1 of its Python model process(es) died" in told
        assert remedy in told
    told = call(*start)
    assert told.startswith("starting again: 1 of its Python model process(es) died")
    assert "ready: " in told
    with grpcclient.InferenceServerClient(url) as client:
        assert toys.ask(client, 1) == toys.expected(1, generation=1)
    assert find_running_servers(run_dir)[0].settings == state.settings  # 2 threads, as before
    assert "already running" in call(*start)
    assert call("status").startswith("running: ")


def test_status_and_diagnose_fail_while_recommend_is_not_loaded_or_does_not_answer(ports, start, call, run_dir):
    call(*start)
    state = find_running_servers(run_dir)[0]
    with open_local_client(state.grpc_url) as client:
        client.unload_model("recommend")
        until(lambda: not is_ready(state.grpc_url))
        told = call("status", exit_code=1)
        assert "first ready, recommend NOT READY, second ready" in told
        assert f"make stop GRPC_PORT={ports.grpc} && " in told
        client.load_model("recommend")
    assert "recommend ready" in call("status")

    stub = next(process for process in find_members(state.tag) if process.pid != state.pid)
    stub.suspend()
    assert is_ready(state.grpc_url)  # the models alone report no problem
    assert f"no server is running here on gRPC port {ports.http}" in call("status", "--grpc-port", ports.http, exit_code=1)
    for command in (("status",), ("status", "--grpc-port", ports.grpc), ("diagnose", "--grpc-port", ports.grpc)):
        begun_s = time.monotonic()
        assert f"recommend does not answer a request within {QUESTION_TIMEOUT_S:g} s" in call(*command, exit_code=1)
        assert time.monotonic() - begun_s < QUESTION_TIMEOUT_S + 5


def test_the_cause_of_a_servers_end_is_reported_first_and_its_log_is_kept(repo, ports, start, call, run_dir):
    call(*start)
    endings = {signal.SIGSEGV: "it crashed: ended by SIGSEGV", signal.SIGKILL: "it ended without a message, as after SIGKILL"}
    for ending, told in endings.items():
        state = find_running_servers(run_dir)[0]
        os.kill(state.pid, ending)
        while is_running(state.pid, state.tag):
            time.sleep(0.01)
        diagnosed = call("diagnose", "--grpc-port", ports.grpc, exit_code=1)
        assert diagnosed.startswith(f"server at {state.grpc_url}: {told}")
        assert "CUDA" not in diagnosed
        assert "NVML" not in diagnosed
        shown = call("status", exit_code=1)
        assert shown.startswith(f"ended: {repo}")
        assert told in shown
        lost = state.log.read_text()
        call(*start)
        assert call("status").startswith("running: ")
        assert state.log.with_name(f"{state.log.name}.1").read_text() == lost
    call("stop")
    assert "it was stopped (SIGTERM)" in call("diagnose", "--grpc-port", ports.grpc, exit_code=1)


def test_a_server_opened_to_the_network_says_so_and_stays_as_it_was_started(start, call):
    call(*start, "--host", "0.0.0.0", "--no-http")
    assert "no HTTP" in (told := call("status"))
    assert "open to whoever reaches 0.0.0.0" in told
    assert "already running" in call(*start)
    with pytest.raises(ServerError, match=r"already runs with host 0\.0\.0\.0.*Expected host 127\.0\.0\.1, which needs"):
        call(*start, "--host", "127.0.0.1")


def test_start_brings_a_supervisor_which_restarts_the_server_and_stop_ends_both(repo, ports, start, call, run_dir):
    call(*start, supervised=True)
    assert "supervised" in call("status")
    before = find_running_servers(run_dir)[0]
    toys.publish(repo, 2)
    pin(repo, 2)  # published, and never activated

    def runs_another(pid: int) -> bool:
        servers = find_running_servers(run_dir)
        return bool(servers) and servers[0].pid != pid

    for ending, told in ((signal.SIGKILL, ""), (signal.SIGSTOP, "paused")):
        ended = find_running_servers(run_dir)[0]
        os.kill(ended.pid, ending)
        until(partial(runs_another, ended.pid))
        line = [line for line in watch.read_last_lines(run_dir, ports.grpc) if "restarting" in line][-1]
        assert "restarting with generation 1" in line
        assert told in line
        wait_ready(before.grpc_url, 60)
        with grpcclient.InferenceServerClient(before.grpc_url) as client:
            assert toys.ask(client, 1) == toys.expected(1, generation=1)
        until(lambda: "answers again" in watch.read_last_lines(run_dir, ports.grpc)[-1])
    assert read_pinned_generation(repo) == 2  # the next `make serve` moves to it
    call("stop")
    assert find_members(before.tag) == []
    assert "no server is running" in call("status", exit_code=1)
