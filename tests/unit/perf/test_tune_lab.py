"""Candidates of a heat, on servers that only pretend: whoever is measured runs, and nobody else."""

from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from export.settings import Settings
from perf import turns
from perf.tune import lab
from perf.tune.lab import Lab
from perf.tune.space import SERVER_THREADS
from repository.recorded import Recorded
from serving.contract.tensors import ensemble_spec, stage_specs
from tests.unit.perf.conftest import AXES

CANDIDATES = [{"compute.rank_threads": 2}, {SERVER_THREADS: 2}]
ROWS = 3
USERS = {"user_id": np.arange(ROWS)[:, None]}


@pytest.fixture
def running(monkeypatch):
    """Tags of the servers that run. A server starts running, and must run when it is told to stop."""
    tags: set[str] = set()

    class Server:
        started = 0

        def __init__(self, folder, threads, run_dir):
            Server.started += 1
            self.grpc_url = self.http_url = f"server-{Server.started}"
            self.state = SimpleNamespace(tag=self.grpc_url)

        def __enter__(self):
            tags.add(self.state.tag)
            return self

        def __exit__(self, *exc):
            tags.remove(self.state.tag)

    class Process:
        def __init__(self, tag):
            self.tag = tag

        def suspend(self):
            tags.remove(self.tag)

        def resume(self):
            tags.add(self.tag)

    monkeypatch.setattr(lab, "TritonServer", Server)
    monkeypatch.setattr(turns, "members", lambda tag: [Process(tag)])
    monkeypatch.setattr(turns, "psutil", SimpleNamespace(Process=Process, NoSuchProcess=psutil.NoSuchProcess))
    return tags


@pytest.fixture
def asked(running, monkeypatch):
    """What `Lab` asks, in order: (whom, who ran then)."""
    asked = []

    def load(url, *_):
        asked.append((url, set(running)))
        return SimpleNamespace(ok=np.ones(ROWS, bool), latency_ns=np.full(ROWS, 1_000_000))

    def closed(target, *_):
        asked.append((target.grpc_url, set(running)))
        return SimpleNamespace(achieved_rate=100.0, latency=SimpleNamespace(p50_ms=1.0))

    spec = ensemble_spec(stage_specs(AXES))
    recorded = Recorded({tensor.name: tensor.filled(ROWS) for tensor in spec.inputs if tensor.optional} | USERS, {})
    for name, value in {
        "settings_of": Settings(),
        "read_config": None,
        "layout_of": "ensemble",
        "pinned_generation": 1,
        "read_specs": {spec.name: spec},
        "read_recorded_of": recorded,
        "make_variant": None,
        "read_memory": [],
    }.items():
        monkeypatch.setattr(lab, name, lambda *_, value=value: value)
    monkeypatch.setattr(Lab, "_differing_answers", lambda *_: "")
    monkeypatch.setattr(lab, "run_load", load)
    monkeypatch.setattr(lab.analyzer, "measure", closed)
    return asked


def test_only_the_candidate_that_is_measured_runs(asked, running, tmp_path):
    repository = tmp_path / "repository"
    with Lab(repository, clients=4, window_s=0.1, rng=np.random.default_rng(0)) as own:
        trials = own.measure(CANDIDATES, turns=2)
    assert [(trial.changes, len(trial.own), len(trial.current)) for trial in trials] == [(c, 2, 2) for c in CANDIDATES]
    assert all(ran == {whom} for whom, ran in asked)
    heat = asked[1:]  # the first one found the rate that is offered
    assert {whom for whom, _ in heat} == {"server-2", "server-3", "server-4"}
    assert len(heat) == 2 * 3 * 3  # turns, servers, and what each is asked
    assert not running
