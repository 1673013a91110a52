"""Start, stop and wait after an earlier command left something behind, or with a slow server; all without a server."""

from __future__ import annotations

import os
import re
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from repository.challenger import read_challengers, write_challenger
from repository.experiments import find_experiment_folder, find_running
from repository.generations import pin, write_pins
from repository.lock import LOCK_FILE
from repository.registry import read_acts
from server.control import WATCH_MODULE, find_running_servers, stop_server
from server.generations.activation import find_served_generation
from server.generations.challenger import find_loaded_challengers
from server.processes import is_running
from server.start.ports import LOOPBACK, find_free_ports
from server.start.tls import AUTHORITIES, CERTIFICATE, KEY
from server.state import ServerState, make_state_path, read_state
from server.status import health
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ConfigError, RecommenderError, ServerError
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import EXPERIMENT_FILE, Experiment
from serving.live.store import find_live_folder, open_store
from tests.present import present
from tests.server.support import toys
from tests.tags import run_tagged
from tests.triton_double import TritonDouble
from tests.unit.server.conftest import SETTINGS, call, run_with_dead_stubs
from tests.unit.server.shops import begin_experiment, damage, make_shop, make_unwritable


@pytest.fixture
def repo(run_dir, sleeping) -> Iterator[Path]:
    """A repository of two generations with a running server that holds a challenger; no experiment was ever started."""
    repo = make_shop(run_dir / "repo", generations=2)
    write_challenger(repo, 2)
    replace(sleeping, repo=repo, generation=1).save(run_dir)
    double = TritonDouble(repo, sleeping.ports.grpc)
    yield repo
    double.stop()


def stop(repo: Path) -> str:
    return call("experiment", "stop", "--repo", repo).output


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


def test_what_starts_a_server_again_keeps_its_tls_and_its_gateway(sleeping, run_dir):
    chosen = {"host": "127.0.0.1", "tls": "/etc/tls", "gateway_port": 9090, "gateway_config": "", "no_http": True, "threads": 1}
    replace(sleeping, settings=chosen).save(run_dir)
    said = call("status").output
    hangs = "FAILS: its process runs, but nothing answers there: it is starting, or it hangs. Stop it, then start it again: "
    ports = sleeping.ports
    assert f"{hangs}make stop GRPC_PORT={ports.grpc} && .venv/bin/python -m server start --repo " in said
    assert said.endswith(f" --metrics-port {ports.metrics} --no-http --tls /etc/tls --gateway-port 9090\n")


def test_a_server_that_is_looked_for_at_another_port_is_named(sleeping, run_dir):
    sleeping.save(run_dir)
    said = call("diagnose", "--grpc-port", sleeping.ports.http).output
    assert f"is the port right? Servers that were started here: --grpc-port {sleeping.ports.grpc}." in said


class Start:
    """Calls `server start` of a double of tritonserver. ports: those of every start"""

    def __init__(self, run_dir: Path) -> None:
        self.ports, self._run_dir = find_free_ports(), run_dir

    def __call__(self, repo: Path, *options: object) -> str:
        ports = ("--grpc-port", self.ports.grpc, "--http-port", self.ports.http, "--metrics-port", self.ports.metrics)
        return call("start", "--repo", repo, *ports, "--unsupervised", *options).output

    def read_saved(self) -> ServerState:
        return present(read_state(make_state_path(self._run_dir, self.ports.grpc)))

    def list_loaded(self) -> tuple[int, list[int]]:
        """Return the generation that answers, and the challengers beside it."""
        url = self.read_saved().grpc_url
        return find_served_generation(url), find_loaded_challengers(url)


@pytest.fixture
def start(run_dir, installed_double) -> Iterator[Start]:
    """Yield a Start. What it started is stopped after the test."""
    yield Start(run_dir)
    for state in find_running_servers(run_dir):
        stop_server(state, run_dir)


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
    if fault == "two pins":
        config = repo / ENSEMBLE / "config.pbtxt"
        config.write_text(config.read_text().replace("model_version: 1", "model_version: 2", 1))
        return r"is pinned to versions \[1, 2\]; expected one", []
    write_challenger(repo, 2)  # which is not there
    make_unwritable(repo)
    return f"{LOCK_FILE} cannot be written", []


@pytest.mark.parametrize("fault", ["damaged", "removed", "two pins", "challenger", "TLS", "host"])
@pytest.mark.parametrize("is_ended", [False, True])
def test_a_start_that_would_fail_stops_nothing(is_ended, fault, sleeping, tmp_path, start):
    """A server that is out of service may have ended. Its gateway answers all the same."""
    repo = make_shop(tmp_path / "shop")
    said, options = spoil_start(fault, repo)
    with run_tagged(sleeping.tag) as helper:
        pid = 2**22 if is_ended else sleeping.pid
        state = replace(sleeping, pid=pid, ports=start.ports, repo=repo, generation=1, fault=fault, settings=SETTINGS)
        state.save(tmp_path)
        with pytest.raises(RecommenderError, match=said):
            start(repo, *options)
        assert [helper.poll(), is_running(sleeping.pid, sleeping.tag)] == [None, True]
    assert start.read_saved() == state


def test_the_remedy_for_damaged_files_is_not_to_stop_the_server(sleeping, run_dir):
    replace(sleeping, fault="rank/1/stage.json is damaged").save(run_dir)
    mend = "Put the files back as they were published, or export the repository again (`make export`). "
    for command in ("status", "diagnose"):
        said = call(command).output
        assert f"took it out of service. {mend}Then start it again: .venv/bin/python -m server start --repo " in said
        with run_tagged(sleeping.tag, "-m", WATCH_MODULE):
            said = call(command).output
        assert f"took it out of service. {mend}Its supervisor then starts it again by itself\n" in said
        assert "stop" not in said


@pytest.mark.parametrize("is_writable", [True, False])
def test_a_start_leaves_a_damaged_generation_for_the_newest_intact_one(is_writable, tmp_path, start):
    repo = make_shop(tmp_path / "shop", generations=2)
    pin(repo, 2)
    path = damage(repo, 2)
    if not is_writable:
        make_unwritable(repo)
    said = start(repo)
    assert f"WARNING: {path} is not the file that was published" in said
    assert "Starting with generation 1, which is intact." in said
    assert (start.read_saved().generation, start.list_loaded()) == (1, (1, []))
    assert read_pinned_generation(repo) == (1 if is_writable else 2)
    if is_writable:
        act = read_acts(repo)[-1]
        assert (act.author, act.action, act.generation) == ("server", "pinned", 1)
        assert str(path) in act.reason
    else:
        assert said.count("cannot be written") == 3  # the pin, and two lines of the record


def test_a_start_on_a_repository_that_was_moved_without_its_live_store_says_so(tmp_path, start):
    shop, moved, third = make_shop(tmp_path / "shop"), tmp_path / "moved", tmp_path / "third"
    for _ in range(2):
        assert "WARNING" not in start(shop)
        call("stop")
    acts = [(act.author, act.action, act.generation, act.reason) for act in read_acts(shop)]
    assert acts == [("server", "served", 1, f"with {shop}.live")]
    shop.rename(moved)
    assert f"WARNING: {moved} was served with the live store {shop}.live before, and begins with an empty one in" in start(
        moved
    )
    call("stop")
    moved.rename(third)
    open_store(find_live_folder(third), create=True).close()  # this time the store is there
    assert "WARNING" not in start(third)


def test_the_log_of_a_server_is_appended_to_so_that_logrotate_may_cut_it_short(tmp_path, start):
    start(make_shop(tmp_path / "shop"))
    facts = Path(f"/proc/{start.read_saved().pid}/fdinfo/1").read_text()
    (flags,) = re.findall(r"^flags:\s+(\d+)$", facts, re.MULTILINE)
    assert int(flags, 8) & os.O_APPEND


@pytest.mark.parametrize("fault", ["changed", "cut short", "stage removed", "ensemble removed"])
def test_a_start_leaves_out_a_challenger_with_damaged_files(fault, tmp_path, start):
    repo = make_shop(tmp_path / "shop", generations=2)
    begin_experiment(repo)
    if fault == "changed":
        path = damage(repo, 2)
    elif fault == "cut short":
        path = repo / "retrieve" / "2" / "item_vectors.npy"
        path.write_bytes(path.read_bytes()[:-8])
    else:
        path = repo / ("rank" if fault == "stage removed" else ENSEMBLE) / "2"
        shutil.rmtree(path)
    said = start(repo)
    assert said.startswith(f"WARNING: {path}")
    assert "So the challenger, generation 2, is left out. Its experiment spring is rolled back. To test it" in said
    assert start.list_loaded() == (1, [])
    told = call("experiment", "status", "--repo", repo).output
    assert told.startswith("spring: rolled back, ab, generation 2 beside 1, share 0.0%")
    assert f"; {path}" in told
    assert (read_acts(repo)[-1].action, read_acts(repo)[-1].generation) == ("rolled back", 2)


@pytest.mark.parametrize("layout", ["ensemble", "fused"])
def test_a_start_that_is_refused_leaves_the_experiment_as_it_was(layout, tmp_path, start):
    """Champion and challenger are damaged: whoever puts all files back finds the experiment running."""
    repo = make_shop(tmp_path / "shop", 2, layout)
    begin_experiment(repo)
    acts = read_acts(repo)
    published = (find_stage_folder(repo, "rank", 1) / "stage.json").read_bytes()
    path = damage(repo, 1)
    challenger = (repo / ENSEMBLE / "2").rename(tmp_path / "removed")
    with pytest.raises(RecommenderError, match="so nothing was started and nothing stopped"):
        start(repo)
    assert (read_acts(repo), read_challengers(repo)) == (acts, (2,))
    assert present(find_running(repo)).name == "spring"
    path.write_bytes(published)
    challenger.rename(repo / ENSEMBLE / "2")
    assert "WARNING" not in start(repo)
    assert start.list_loaded() == (1, [2])


@pytest.mark.parametrize("damaged", [2, 3])  # champion, challenger
def test_a_start_that_is_refused_for_a_taken_port_changes_nothing(damaged, tmp_path, start):
    repo, port = make_shop(tmp_path / "shop", generations=3), start.ports.http
    begin_experiment(repo, 2, 3)
    damage(repo, damaged)
    acts, pinned = read_acts(repo), read_pinned_generation(repo)
    with socket.create_server((LOOPBACK, port)), pytest.raises(ServerError, match=f"http port {port} is taken by"):
        start(repo)
    assert (read_acts(repo), read_pinned_generation(repo), read_challengers(repo)) == (acts, pinned, (3,))
    assert present(find_running(repo)).name == "spring"


def test_a_damaged_challenger_beside_a_damaged_champion_is_left_out(tmp_path, start):
    """The champion says where experiments are, so that this one cannot be rolled back."""
    repo = make_shop(tmp_path / "shop", generations=3)
    write_challenger(repo, 2)
    write_pins(repo, 1)
    damage(repo, 2)
    (repo / "preprocess" / "1" / "stage.json").write_text("{")
    assert "is left out. Its experiment is not rolled back: " in start(repo)
    assert start.list_loaded() == (3, [])


@pytest.mark.parametrize(("others", "chosen"), [((1,), 1), ((), 3)])
def test_a_challenger_answers_in_place_of_a_damaged_champion_only_where_no_other_is_intact(others, chosen, tmp_path, start):
    """The experiment of a champion that is left ends, with this as the reason."""
    repo = make_shop(tmp_path / "shop", generations=3)
    begin_experiment(repo, 2, 3)
    if not others:
        damage(repo, 1)
    path = damage(repo, 2)
    said = start(repo)
    assert f"Starting with generation {chosen}, which is intact." in said
    assert f"WARNING: experiment spring is stopped: generation {chosen} answers in place of the champion, 2: {path} is " in said
    assert (start.list_loaded(), find_running(repo)) == ((chosen, []), None)
    assert [(act.action, act.generation) for act in read_acts(repo)[-2:]] == [("experiment stopped", 3), ("pinned", chosen)]


@pytest.mark.parametrize(("fault", "lost"), [("its files are damaged", 0), ("", 2)])
def test_a_broken_server_is_started_again_with_its_own_settings(fault, lost, sleeping, tmp_path, start):
    repo = toys.publish(tmp_path / "repo", 1)
    own = SETTINGS | {"threads": 4, "no_http": True}
    with run_with_dead_stubs(sleeping.tag, tmp_path, lost) as server:
        broken = replace(sleeping, pid=server.pid, ports=start.ports, repo=repo, settings=own, fault=fault)
        broken.save(tmp_path)
        said = start(repo, "--cache-mib", 8)
    started = start.read_saved()
    assert said.startswith(f"starting again: {fault or '2 of its Python model process(es) died'}")
    assert is_running(started.pid, started.tag)
    assert started.tag != broken.tag
    assert started.settings == own | {"cache_mib": 8}


def test_settings_of_a_gateway_need_its_port(run_dir):
    with pytest.raises(ConfigError, match=r"--gateway-config needs --gateway-port\. Add it\."):
        call("start", "--repo", run_dir, "--gateway-config", "gateway.toml")
