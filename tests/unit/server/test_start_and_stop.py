"""Start, stop and wait after an earlier command left something behind, or with a slow server; all without a server."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from typer.testing import CliRunner, Result

from repository.challenger import read_challengers, write_challenger
from repository.experiments import find_experiment_folder, find_running, start_experiment
from repository.generations import pin, write_pins
from repository.lock import LOCK_FILE
from repository.registry import read_acts
from server import __main__ as commands
from server import experiment
from server.control import WATCH_MODULE, find_running_servers, stop_server
from server.generations.activation import find_served_generation
from server.generations.challenger import find_loaded_challengers
from server.processes import STUB_PROGRAM, is_running
from server.start.ports import LOOPBACK, Ports, find_free_ports
from server.start.tls import AUTHORITIES, CERTIFICATE, KEY
from server.state import ServerState, make_state_path, read_state
from server.status import health
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ConfigError, RecommenderError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import EXPERIMENT_FILE, Experiment
from tests.present import present
from tests.repositories import copy_generation, copy_lean_repository, copy_small_fused_repository, copy_to_change
from tests.server import toys
from tests.tags import draw_tag, run_tagged
from tests.triton_double import TritonDouble, write_wheel
from tests.unit.server.three_generations import make_repository_with_experiment
from tests.unit.server.unwritable import make_unwritable

SETTINGS = {"threads": 1, "cache_mib": 0, "host": "127.0.0.1", "no_http": False, "tls": "", "follow_pin": False}
# A server whose stubs have ended, and which never asks what became of them.
PARENT = """
import subprocess, sys, time
stubs = [subprocess.Popen([sys.argv[2]]) for _ in range(int(sys.argv[3]))]
print("started", flush=True)
time.sleep(600)
"""


@pytest.fixture
def repo(tmp_path, monkeypatch, sleeping) -> Iterator[Path]:
    """A repository of two generations with a running server that holds a challenger; no experiment was ever started."""
    repo = copy_lean_repository(tmp_path / "repo")
    copy_generation(repo)
    write_challenger(repo, 2)
    monkeypatch.setattr(experiment, "RUN_DIR", tmp_path)
    state = replace(sleeping, repo=repo, generation=1)
    state.save(tmp_path)
    double = TritonDouble(repo, state.ports.grpc)
    yield repo
    double.stop()


@pytest.fixture
def sleeping(tmp_path) -> Iterator[ServerState]:
    """The state of a process that does nothing in the place of a server."""
    tag = draw_tag()
    with run_tagged(tag) as server:
        yield ServerState(server.pid, tag, tmp_path, tmp_path / "log", find_free_ports())


def stop(repo) -> str:
    return CliRunner().invoke(experiment.app, ["stop", "--repo", str(repo)], catch_exceptions=False).output


def test_the_challenger_of_an_interrupted_start_is_unloaded(repo):
    assert stop(repo) == "no experiment began: generation 2 is unloaded\n"


def test_the_challenger_of_an_interrupted_start_is_unloaded_also_after_a_promotion(repo):
    find_experiment_folder(repo).mkdir()
    (find_experiment_folder(repo) / EXPERIMENT_FILE).write_text(Experiment("spring", 3, 1, 0.0, state="promoted").write_text())
    assert stop(repo) == "experiment spring is over: generation 2 is unloaded\n"


def test_there_is_nothing_to_stop_without_experiment_and_challenger(repo):
    (repo / "challenger" / "config.pbtxt").unlink()
    with pytest.raises(ConfigError, match="so there is none to stop"):
        stop(repo)


def test_a_server_started_elsewhere_that_is_too_slow_is_not_ready_yet(tmp_path):
    """It lists its models only to callers with its key."""

    class Slow(TritonDouble):
        def ServerReady(self, request, context):
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    port = find_free_ports().grpc
    double = Slow(toys.publish(tmp_path / "repo", 1), port)
    double.before_index = lambda _: "This protocol is restricted"
    try:
        assert not health.is_ready(f"localhost:{port}")
        with pytest.raises(ServerError, match=r"another checkout: run the command there\. Or the key was .* make stop"):
            health.read_model_states(f"localhost:{port}")
    finally:
        double.stop()


def test_what_starts_a_server_again_keeps_its_tls_and_its_gateway(sleeping, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    chosen = {"host": "127.0.0.1", "tls": "/etc/tls", "gateway_port": 9090, "gateway_config": "", "no_http": True, "threads": 1}
    replace(sleeping, settings=chosen).save(tmp_path)
    said = CliRunner().invoke(commands.app, ["status"], catch_exceptions=False).output
    hangs = "FAILS: its process runs, but nothing answers there: it is starting, or it hangs. Stop it, then start it again: "
    ports = sleeping.ports
    assert f"{hangs}make stop GRPC_PORT={ports.grpc} && .venv/bin/python -m server start --repo " in said
    assert said.endswith(f" --metrics-port {ports.metrics} --no-http --tls /etc/tls --gateway-port 9090\n")


def test_a_server_that_is_looked_for_at_another_port_is_named(sleeping, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    sleeping.save(tmp_path)
    elsewhere = ["diagnose", "--grpc-port", str(sleeping.ports.http)]
    said = CliRunner().invoke(commands.app, elsewhere, catch_exceptions=False).output
    assert f"is the port right? Servers that were started here: --grpc-port {sleeping.ports.grpc}." in said


@pytest.fixture
def start(tmp_path, monkeypatch) -> Iterator[Callable[..., Result]]:
    """start(repo, ports) -> the result of `server start` with a double of tritonserver, which is stopped after the test."""
    write_wheel(tmp_path / "wheel")
    monkeypatch.syspath_prepend(tmp_path / "wheel")
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)

    def start(repo: Path, ports: Ports, *options: str) -> Result:
        numbers = ["--grpc-port", str(ports.grpc), "--http-port", str(ports.http), "--metrics-port", str(ports.metrics)]
        arguments = ["start", "--repo", str(repo), *numbers, "--unsupervised", *options]
        return CliRunner().invoke(commands.app, arguments, catch_exceptions=False)

    yield start
    for state in find_running_servers(tmp_path):
        stop_server(state, tmp_path)


def damage(repo: Path, generation: int) -> Path:
    """Change a file of a generation. Return its path."""
    path = repo / "rank" / str(generation) / "stage.json"
    path.write_bytes(path.read_bytes()[:-2] + b"\n\n")
    return path


def spoil_start(fault: str, repo: Path) -> tuple[str, list[str]]:
    """Let the next start fail. Return a pattern of its message, and the options to start with."""
    if fault == "damaged":
        return f"{damage(repo, 1)} is not the file that was published: .* so nothing was started and nothing stopped.", []
    if fault == "removed":
        shutil.rmtree(repo)
        return "There is no model repository at", []
    if fault == "host":
        return "No server can listen at 192.0.2.1", ["--host", "192.0.2.1"]  # an address of documentation (RFC 5737)
    if fault == "TLS":
        folder = repo.with_name("tls")
        folder.mkdir()
        for name in (CERTIFICATE, KEY, AUTHORITIES):
            (folder / name).write_text("not PEM")
        return f"{AUTHORITIES} in {folder} cannot be used", ["--tls", str(folder)]
    copy_generation(repo)
    if fault == "two pins":
        config = repo / ENSEMBLE / "config.pbtxt"
        config.write_text(config.read_text().replace("model_version: 1", "model_version: 2", 1))
        return r"is pinned to versions \[1, 2\]; expected one", []
    write_challenger(repo, 2)
    shutil.rmtree(repo / ENSEMBLE / "2")
    make_unwritable(repo)
    return f"{LOCK_FILE} cannot be written", []


@pytest.mark.parametrize("fault", ["damaged", "removed", "two pins", "challenger", "TLS", "host"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_start_that_would_fail_stops_nothing(is_ended, fault, sleeping, tmp_path, start):
    """A server that is out of service may have ended. Its gateway answers all the same."""
    repo = copy_lean_repository(tmp_path / "shop")
    said, options = spoil_start(fault, repo)
    with run_tagged(sleeping.tag) as helper:
        pid = 2**22 if is_ended else sleeping.pid
        state = replace(sleeping, pid=pid, repo=repo, generation=1, fault=fault, settings=SETTINGS)
        state.save(tmp_path)
        with pytest.raises(RecommenderError, match=said):
            start(repo, sleeping.ports, *options)
        assert [helper.poll(), is_running(sleeping.pid, sleeping.tag)] == [None, True]
    assert read_state(make_state_path(tmp_path, sleeping.ports.grpc)) == state


def test_the_remedy_for_damaged_files_is_not_to_stop_the_server(sleeping, tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    replace(sleeping, fault="rank/1/stage.json is damaged").save(tmp_path)
    mend = "Put the files back as they were published, or export the repository again (`make export`). "
    for command in ("status", "diagnose"):
        said = CliRunner().invoke(commands.app, [command], catch_exceptions=False).output
        assert f"took it out of service. {mend}Then start it again: .venv/bin/python -m server start --repo " in said
        with run_tagged(sleeping.tag, "-m", WATCH_MODULE):
            said = CliRunner().invoke(commands.app, [command], catch_exceptions=False).output
        assert f"took it out of service. {mend}Its supervisor then starts it again by itself\n" in said
        assert "stop" not in said


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_start_leaves_a_damaged_generation_for_the_newest_intact_one(is_writable, tmp_path, start):
    repo, ports = copy_lean_repository(tmp_path / "shop"), find_free_ports()
    copy_generation(repo)
    pin(repo, 2)
    path = damage(repo, 2)
    if not is_writable:
        make_unwritable(repo)
    result = start(repo, ports)
    state = present(read_state(make_state_path(tmp_path, ports.grpc)))
    assert f"WARNING: {path} is not the file that was published" in result.stderr
    assert "Starting with generation 1, which is intact." in result.stderr
    assert (state.generation, find_served_generation(state.grpc_url)) == (1, 1)
    assert read_pinned_generation(repo) == (1 if is_writable else 2)
    if is_writable:
        (act,) = read_acts(repo)
        assert (act.author, act.action, act.generation) == ("server", "pinned", 1)
        assert str(path) in act.reason
    else:
        assert result.stderr.count("cannot be written") == 2  # the pin and the record


def cut_short(repo: Path) -> Path:
    path = repo / "retrieve" / "2" / "item_vectors.npy"
    path.write_bytes(path.read_bytes()[:-8])
    return path


def remove_stage(repo: Path) -> Path:
    shutil.rmtree(repo / "rank" / "2")
    return repo / "rank" / "2"


def remove_ensemble(repo: Path) -> Path:
    shutil.rmtree(repo / ENSEMBLE / "2")
    return repo / ENSEMBLE / "2"


@pytest.mark.parametrize("spoil", [lambda repo: damage(repo, 2), cut_short, remove_stage, remove_ensemble])
def test_a_start_leaves_out_a_challenger_with_damaged_files(spoil, tmp_path, start):
    repo, ports = copy_lean_repository(tmp_path / "shop"), find_free_ports()
    copy_generation(repo)
    write_challenger(repo, 2)
    write_pins(repo, 1)
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    path = spoil(repo)
    result = start(repo, ports)
    assert result.stderr.startswith(f"WARNING: {path}")
    assert "So the challenger, generation 2, is left out. Its experiment spring is rolled back. To test it" in result.stderr
    url = present(read_state(make_state_path(tmp_path, ports.grpc))).grpc_url
    assert (find_served_generation(url), find_loaded_challengers(url)) == (1, [])
    told = CliRunner().invoke(experiment.app, ["status", "--repo", str(repo)], catch_exceptions=False).output
    assert told.startswith("spring: rolled back, ab, generation 2 beside 1, share 0.0%")
    assert f"; {path}" in told
    assert (read_acts(repo)[-1].action, read_acts(repo)[-1].generation) == ("rolled back", 2)


@pytest.mark.parametrize("layout", ["ensemble", "fused"])
def test_a_start_that_is_refused_leaves_the_experiment_as_it_was(layout, tmp_path, start):
    """Champion and challenger are damaged: whoever puts all files back finds the experiment running."""
    repo, ports = tmp_path / "shop", find_free_ports()
    (copy_lean_repository if layout == "ensemble" else copy_small_fused_repository)(repo)
    for model in list(repo.glob("*/1")):
        copy_to_change(model, model.with_name("2"))
    write_challenger(repo, 2)
    write_pins(repo, 1)
    start_experiment(repo, Experiment("spring", 1, 2, 0.5))
    acts, path = read_acts(repo), find_stage_folder(repo, "rank", 1) / "stage.json"
    published = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(published + b"\n")
    challenger = (repo / ENSEMBLE / "2").rename(tmp_path / "removed")
    with pytest.raises(RecommenderError, match="so nothing was started and nothing stopped"):
        start(repo, ports)
    assert (read_acts(repo), read_challengers(repo)) == (acts, (2,))
    assert present(find_running(repo)).name == "spring"
    path.write_bytes(published)
    challenger.rename(repo / ENSEMBLE / "2")
    assert "WARNING" not in start(repo, ports).stderr
    assert find_loaded_challengers(present(read_state(make_state_path(tmp_path, ports.grpc))).grpc_url) == [2]


@pytest.mark.parametrize("damaged", [2, 3])  # champion, challenger
def test_a_start_that_is_refused_for_a_taken_port_changes_nothing(damaged, tmp_path, start):
    repo, ports = make_repository_with_experiment(tmp_path / "shop"), find_free_ports()
    damage(repo, damaged)
    acts, pinned = read_acts(repo), read_pinned_generation(repo)
    with socket.create_server((LOOPBACK, ports.http)), pytest.raises(ServerError, match=f"http port {ports.http} is taken by"):
        start(repo, ports)
    assert (read_acts(repo), read_pinned_generation(repo), read_challengers(repo)) == (acts, pinned, (3,))
    assert present(find_running(repo)).name == "spring"


def test_a_fused_repository_starts_without_a_challenger_that_was_removed(tmp_path, start):
    repo, ports = copy_small_fused_repository(tmp_path / "shop"), find_free_ports()
    shutil.copytree(repo / ENSEMBLE / "1", repo / ENSEMBLE / "2")
    write_challenger(repo, 2)
    path = remove_ensemble(repo)
    assert start(repo, ports).stderr.startswith(f"WARNING: {path} is missing. So the challenger, generation 2, is left out.")
    assert find_served_generation(present(read_state(make_state_path(tmp_path, ports.grpc))).grpc_url) == 1


def test_a_damaged_challenger_beside_a_damaged_champion_is_left_out(tmp_path, start):
    """The champion says where experiments are, so that this one cannot be rolled back."""
    repo, ports = copy_lean_repository(tmp_path / "shop"), find_free_ports()
    copy_generation(repo)
    for model in repo.glob("*/1"):
        copy_to_change(model, model.with_name("3"))
    write_challenger(repo, 2)
    write_pins(repo, 1)
    damage(repo, 2)
    (repo / "preprocess" / "1" / "stage.json").write_text("{")
    result = start(repo, ports)
    assert "is left out. Its experiment is not rolled back: " in result.stderr
    url = present(read_state(make_state_path(tmp_path, ports.grpc))).grpc_url
    assert (find_served_generation(url), find_loaded_challengers(url)) == (3, [])


@pytest.mark.parametrize(("others", "chosen"), [((1,), 1), ((), 3)])
def test_a_challenger_answers_in_place_of_a_damaged_champion_only_where_no_other_is_intact(others, chosen, tmp_path, start):
    """The experiment of a champion that is left ends, with this as the reason."""
    repo, ports = make_repository_with_experiment(tmp_path / "shop"), find_free_ports()
    if not others:
        damage(repo, 1)
    path = damage(repo, 2)
    said = start(repo, ports).stderr
    assert f"Starting with generation {chosen}, which is intact." in said
    assert f"WARNING: experiment spring is stopped: generation {chosen} answers in place of the champion, 2: {path} is " in said
    url = present(read_state(make_state_path(tmp_path, ports.grpc))).grpc_url
    assert (find_served_generation(url), find_loaded_challengers(url), find_running(repo)) == (chosen, [], None)
    assert [(act.action, act.generation) for act in read_acts(repo)[-2:]] == [("experiment stopped", 3), ("pinned", chosen)]


@pytest.mark.parametrize(("fault", "lost"), [("its files are damaged", 0), ("", 2)])
def test_a_broken_server_is_started_again_with_its_own_settings(fault, lost, sleeping, tmp_path, start):
    repo = toys.publish(tmp_path / "repo", 1)
    own = SETTINGS | {"threads": 4, "no_http": True}
    stub = shutil.copy(present(shutil.which("true")), tmp_path / STUB_PROGRAM)
    parent = [sys.executable, "-c", PARENT, sleeping.tag, str(stub), str(lost)]
    ports = sleeping.ports
    with subprocess.Popen(parent, stdout=subprocess.PIPE, text=True) as server:
        assert present(server.stdout).readline() == "started\n"
        broken = replace(sleeping, pid=server.pid, repo=repo, settings=own, fault=fault)
        broken.save(tmp_path)
        said = start(repo, ports, "--cache-mib", "8").output
    started = present(read_state(make_state_path(tmp_path, ports.grpc)))
    assert said.startswith(f"starting again: {fault or '2 of its Python model process(es) died'}")
    assert is_running(started.pid, started.tag)
    assert started.tag != broken.tag
    assert started.settings == own | {"cache_mib": 8}


def test_settings_of_a_gateway_need_its_port(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    arguments = ["start", "--repo", str(tmp_path), "--gateway-config", "gateway.toml"]
    with pytest.raises(ConfigError, match=r"--gateway-config needs --gateway-port\. Add it\."):
        CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
