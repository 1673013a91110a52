"""Start, stop and wait after an earlier command left something behind, or with a slow server; all without a server."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from tritonclient.utils import InferenceServerException
from typer.testing import CliRunner

from repository.challenger import write_challenger
from server import __main__ as commands
from server import experiment, health
from server.ports import Ports
from server.state import ServerState
from serving.contract.errors import ConfigError, ServerError
from serving.live.experiment import EXPERIMENT_FILE, Experiment
from tests.server import toys

PORTS = Ports(1, 2, 3)


@pytest.fixture
def repo(tmp_path, monkeypatch):
    """A repository of two generations with a running server that holds a challenger; no experiment was ever started."""
    repo = toys.publish(tmp_path / "repo", 1)
    toys.publish(repo, 2)
    write_challenger(repo, 2)
    (tmp_path / "live").mkdir()
    monkeypatch.setattr(experiment, "experiment_folder", lambda repo: tmp_path / "live")
    monkeypatch.setattr(experiment, "running_servers", lambda *_: [SimpleNamespace(grpc_url="localhost:1", repo=repo)])
    monkeypatch.setattr(experiment, "unload_challenger", lambda *_: 2)
    return repo


def stop(repo) -> str:
    return CliRunner().invoke(experiment.app, ["stop", "--repo", str(repo)], catch_exceptions=False).output


def test_the_challenger_of_an_interrupted_start_is_unloaded(repo):
    assert stop(repo) == "no experiment began: generation 2 is unloaded\n"


def test_the_challenger_of_an_interrupted_start_is_unloaded_also_after_a_promotion(repo, tmp_path):
    (tmp_path / "live" / EXPERIMENT_FILE).write_text(Experiment("spring", 3, 1, 0.0, state="promoted").text())
    assert stop(repo) == "experiment spring is over: generation 2 is unloaded\n"


def test_there_is_nothing_to_stop_without_experiment_and_challenger(repo):
    (repo / "challenger" / "config.pbtxt").unlink()
    with pytest.raises(ConfigError, match="so there is none to stop"):
        stop(repo)


def test_a_server_started_elsewhere_that_is_too_slow_is_not_ready_yet(monkeypatch):
    class SlowClient(nullcontext):
        def __enter__(self):
            return self

        def is_server_ready(self, client_timeout: float) -> bool:
            raise InferenceServerException("Deadline Exceeded")

    def refuse(grpc_url: str) -> None:
        raise ServerError("it lists its models only to callers with its key")

    monkeypatch.setattr(health, "model_states", refuse)
    monkeypatch.setattr(health, "local_client", SlowClient)
    assert not health.is_ready("elsewhere:8001")


@pytest.mark.parametrize(("fault", "lost"), [("its files are damaged", 0), ("", 2)])
def test_a_broken_server_is_started_again_with_its_own_settings(fault, lost, tmp_path, monkeypatch):
    running = ServerState(1, "triton_of_nobody", tmp_path, tmp_path / "log", PORTS, {"threads": 4, "tls": "/keys"}, fault=fault)
    started: list[dict] = []

    def with_settings(repo, ports, settings, **_):
        started.append(settings)
        return SimpleNamespace(start=lambda: SimpleNamespace(state=running))

    monkeypatch.setattr(commands, "_find_running", lambda *_: running)
    monkeypatch.setattr(commands, "count_lost_stubs", lambda pid: lost)
    monkeypatch.setattr(commands, "stop_server", lambda *_: None)
    monkeypatch.setattr(commands, "known_servers", lambda run_dir: [])
    monkeypatch.setattr(commands, "TritonServer", SimpleNamespace(with_settings=with_settings))
    monkeypatch.setattr(commands, "RUN_DIR", tmp_path)
    ports = ["--grpc-port", "1", "--http-port", "2", "--metrics-port", "3"]
    CliRunner().invoke(
        commands.app, ["start", "--repo", str(tmp_path), *ports, "--cache-mib", "8", "--unsupervised"], catch_exceptions=False
    )
    assert started == [{"threads": 4, "tls": "/keys", "cache_mib": 8}]
