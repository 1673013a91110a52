"""The launcher against the real tritonserver, with toy models."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple
from pathlib import Path

import psutil
import pytest
import tritonclient.grpc as grpcclient

from repository.tables import find_tables_settings
from server.control import clear_stale, find_running_servers, stop_server
from server.launcher import MEMORY_RACE, TritonServer
from server.processes import SHM_DIR, find_members, is_running
from server.start.environment import PROJECT
from server.start.ports import Ports, find_free_ports, is_free
from server.state import read_known_servers
from server.status.health import is_ready, open_local_client, read_model_states, wait_ready
from serving.contract.errors import ConfigError, ServerError
from tests.present import present
from tests.server.support import toys
from tests.waiting import until


def start_and_fail(repo: Path, run_dir: Path, **options) -> str:
    """The message of a start that must fail, which leaves no process, no state file and no shared memory behind."""
    server = TritonServer(repo, run_dir=run_dir, ready_timeout_s=300.0, **options)
    with pytest.raises(ServerError) as failure:
        server.start()
    # a killed process takes a moment to end
    until(lambda: not any(str(run_dir) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))
    assert list(run_dir.glob("servers/*")) == []
    assert list(SHM_DIR.glob(f"triton_{server.ports.grpc}_*")) == []  # tags begin with the port
    return str(failure.value)


def wait_for_metric(url: str, line: str) -> None:
    """The server counts a request a moment after it has answered it."""
    deadline = time.monotonic() + 10
    while line not in urllib.request.urlopen(url).read().decode():
        assert time.monotonic() < deadline, f"{line} never appeared"
        time.sleep(0.05)


def test_starts_answers_and_leaves_nothing(tmp_path, run_dir):
    """Its models see the threads that they were given, and not the checkout."""
    checks = "import os\nassert os.environ['OMP_NUM_THREADS'] == '3'\nassert not os.path.exists('serving')\n"
    repo = toys.publish(tmp_path / "repo", 1, checks + toys.MODEL)
    with TritonServer(repo, run_dir=run_dir, threads=3, ready_timeout_s=300.0) as server:
        tag, ports = server.state.tag, server.ports
        assert read_model_states(server.grpc_url) == {(name, 1): ("READY", "") for name in ("first", "second", "recommend")}
        assert [process.name() for process in find_members(tag)].count("triton_python_backend_stub") == 2
        with grpcclient.InferenceServerClient(server.grpc_url) as client:
            assert toys.ask(client, 7) == toys.expected(7, generation=1)
        wait_for_metric(server.metrics_url, 'nv_inference_request_success{model="recommend",version="1"} 1')
        with urllib.request.urlopen(f"http://{server.http_url}/v2/health/ready") as reply:
            assert reply.status == 200
        assert find_running_servers(run_dir) == [server.state]
    assert find_members(tag) == []
    assert all(map(is_free, astuple(ports)))
    assert list(SHM_DIR.glob(f"{tag}*")) == []
    assert find_running_servers(run_dir) == []


def test_two_servers_at_once_and_stopping_one_leaves_the_other(repo, launch, run_dir):
    one, other = launch(repo), launch(repo)
    one.stop()
    assert find_running_servers(run_dir) == [other.state]
    with grpcclient.InferenceServerClient(other.grpc_url) as client:
        assert toys.ask(client, 3) == toys.expected(3, generation=1)


def test_another_server_at_its_port_is_not_taken_for_the_one_that_starts(repo, run_dir, tmp_path):
    """It could have been anybody's: ports are free for all users of the machine until somebody listens."""
    loads, may_end = tmp_path / "loads", tmp_path / "may-end"
    code = f"import os, time\nopen({str(loads)!r}, 'w').close()\n"
    code += f"while not os.path.exists({str(may_end)!r}):\n    time.sleep(0.05)\n"
    ports = find_free_ports()
    late = TritonServer(toys.publish(repo.parent / "other", 1, code + toys.MODEL), ports, run_dir=run_dir)
    early = TritonServer(repo, ports, run_dir=tmp_path / "elsewhere")
    with ThreadPoolExecutor(1) as thread:
        starting = thread.submit(late.start)
        try:
            until(loads.exists)
            early.start()
            time.sleep(1.0)  # ten looks at its readiness
            assert not starting.done()
            may_end.touch()
            with pytest.raises(ServerError, match="already in use"):
                starting.result()
            with open_local_client(early.grpc_url) as client:
                assert toys.ask(client, 5) == toys.expected(5, generation=1)
        finally:
            may_end.touch()
            early.stop()
            late.stop()


@pytest.mark.parametrize(
    ("faults", "said"),
    [
        (["os._exit(9)"], ["The start lost the process of the model"]),
        (
            [f"print('{MEMORY_RACE}', flush=True); os.kill(os.getppid(), 6); time.sleep(900)", "time.sleep(900)"],
            ["The start was ended by a race for shared memory", "The start made no progress for 4 s"],
        ),
    ],
)
def test_a_start_that_another_may_mend_is_begun_again_at_most_twice(repo, run_dir, launch, tmp_path, capfd, faults, said):
    spoilt = "import os, time\n" + "".join(
        f"if '{{input}}' == 'x' and not os.path.exists('{begun}'):\n    open('{begun}', 'w').close()\n    {fault}\n"
        for begun, fault in zip((tmp_path / "first", tmp_path / "second"), faults, strict=False)
    )
    toys.publish(repo.parent / "other", 1, spoilt + toys.MODEL)
    server = launch(repo.parent / "other", stalled_after_s=4.0)
    with open_local_client(server.grpc_url) as client:
        assert toys.ask(client, 5) == toys.expected(5, generation=1)
    printed = capfd.readouterr().err
    assert [line in printed for line in said] == [True] * len(said)
    assert "loading: " in server.log_path.with_name(server.log_path.name + ".1").read_text()
    assert find_running_servers(run_dir) == [server.state]


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("raise RuntimeError('index.faiss is cut short: publish again')", "index.faiss is cut short: publish again"),
        ("import os; os._exit(9)", "ended while loading"),
    ],
    ids=["raises", "dies"],
)
def test_first_failing_model_is_named_with_its_log_lines(repo, run_dir, source, told):
    (repo / "second" / "1" / "model.py").write_text(source)
    message = start_and_fail(repo, run_dir)
    assert "second" in message.splitlines()[0]
    assert told in message


def test_ensemble_that_does_not_fit_its_steps_is_named(repo, run_dir):
    config = repo / "recommend" / "config.pbtxt"
    config.write_text(config.read_text().replace('key: "trail" value: "trail"', 'key: "nothing" value: "trail"', 1))
    message = start_and_fail(repo, run_dir)
    assert "model recommend failed to load" in message
    assert "nothing" in message


def test_unknown_repository_is_refused_before_anything_starts(tmp_path, run_dir):
    with pytest.raises(ConfigError, match=r"no model repository at .*nowhere.*make export"):
        TritonServer(tmp_path / "nowhere", run_dir=run_dir).start()


def test_a_model_that_never_gets_ready_runs_into_the_timeout(repo, run_dir):
    (repo / "second" / "1" / "model.py").write_text("import time; time.sleep(60)")
    server = TritonServer(repo, run_dir=run_dir, ready_timeout_s=2.0)
    with pytest.raises(ServerError, match="not ready after 2 s"):
        server.start()
    assert find_running_servers(run_dir) == []


def stop_all(run_dir: Path) -> None:
    for state in read_known_servers(run_dir):
        stop_server(state, run_dir)


@pytest.mark.parametrize("recover", [clear_stale, stop_all], ids=["start", "stop"])
def test_after_kill_9_stubs_and_shared_memory_are_cleared_and_the_port_is_usable(repo, launch, run_dir, recover):
    server = launch(repo)
    state = server.state
    os.kill(state.pid, signal.SIGKILL)
    while is_running(state.pid, state.tag):
        time.sleep(0.01)
    assert list(SHM_DIR.glob(f"{state.tag}*")) != []
    recover(run_dir)
    assert find_members(state.tag) == []
    assert list(SHM_DIR.glob(f"{state.tag}*")) == []
    again = launch(repo, ports=Ports(*astuple(server.ports)))
    assert is_ready(again.grpc_url)


def test_a_server_whose_owner_was_killed_is_ended_by_the_next_start(repo, run_dir):
    code = (
        "import sys, time; from pathlib import Path; from server.launcher import TritonServer\n"
        f"with TritonServer(Path({str(repo)!r}), run_dir=Path({str(run_dir)!r})): print('ready', flush=True); time.sleep(600)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], cwd=PROJECT, stdout=subprocess.PIPE, text=True)
    assert present(owner.stdout).readline() == "ready\n"
    (state,) = find_running_servers(run_dir)
    for process in find_members(state.tag):
        process.suspend()  # as one is that waits for its turn
    assert clear_stale(run_dir) == []
    owner.kill()
    owner.communicate()
    assert clear_stale(run_dir) == [state]
    assert find_members(state.tag) == []
    assert read_known_servers(run_dir) == []


def test_a_server_whose_state_cannot_be_kept_is_stopped_again(repo, run_dir):
    run_dir.mkdir(exist_ok=True)
    (run_dir / "servers").touch()  # in the place of the folder of state files
    with pytest.raises(FileExistsError, match="servers"):
        TritonServer(repo, run_dir=run_dir).start()
    # a killed process takes a moment to end
    until(lambda: not any(str(run_dir) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])))


def test_a_server_goes_on_without_the_updater_of_its_tables(repo, run_dir):
    settings = find_tables_settings(toys.add_stage(repo, 1, "rank"), 1)
    settings.parent.mkdir()
    settings.write_text('{"updates": {"source": "nobody"}}')
    server = TritonServer(repo, run_dir=run_dir, ready_timeout_s=300.0)
    with pytest.raises(ServerError, match="The updater of generation 1 did not start"):
        server.start()
    assert is_ready(server.grpc_url)
    server.stop()
    with pytest.raises(ServerError, match="The updater of generation 1 did not start"), TritonServer(repo, run_dir=run_dir):
        pass
    assert read_known_servers(run_dir) == []  # who enters a server and cannot leaves none behind


def test_a_dead_server_answers_no_wait():
    url = f"localhost:{find_free_ports().grpc}"
    with pytest.raises(ServerError, match="nothing answers there"):
        wait_ready(url, timeout_s=0.2)
