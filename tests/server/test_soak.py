"""Soaks in short: three faults of the service under load; the soak of embedding tables starts, and ends when told to.

That rows stay right under kills is in tests/long/tables/test_faults.py.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from experiments import gateway_soak, overload
from experiments.served import publish_with_half, serve_with_gateway
from server.start.environment import PROJECT
from serving.tables.store.memory import ARENA_PREFIX
from tests.repositories import small_repository

FAULTS, FAULT_EVERY_S = 3, 6.0  # a stage is killed, the server moves, the server is killed


def test_load_with_faults_and_a_move_brings_no_wrong_answer_and_no_error(tmp_path, monkeypatch):
    """By the bounds of the experiment but one: this is too short for that of memory. `make soak` runs it for an hour."""
    monkeypatch.setattr(gateway_soak, "FEWEST_FAULTS", FAULTS)
    monkeypatch.setattr(overload, "CLIENTS", (2,))  # any load will do: its peak need not be found
    monkeypatch.setattr(gateway_soak, "LOAD_SHARE", 0.2)
    repo, run_dir = tmp_path / "repository", tmp_path / "run"
    publish_with_half(small_repository(), repo, tmp_path)
    with serve_with_gateway(repo, "deadline_ms = 2_000\n", supervised=True, run_dir=run_dir) as served:
        found = gateway_soak.soak(served, 0.0, FAULT_EVERY_S, np.random.default_rng(0))
    figures = {figure.name: figure for figure in found}
    missed = {name: figure.values for name, figure in figures.items() if figure.met is False}
    assert missed.keys() <= {"memory afterwards over before"}, missed
    assert figures["faults and moves"].median == FAULTS
    assert figures["requests"].median > 100


def test_told_to_stop_it_ends_the_processes_that_it_started():
    command = [sys.executable, "-m", "experiments.soak", "--seconds", "600", "--instances", "1", "--rows", "500"]
    soak = subprocess.Popen(command, cwd=PROJECT)
    running = psutil.Process(soak.pid)
    arena = Path("/dev/shm") / f"{ARENA_PREFIX}soak-{soak.pid}"
    until_s = time.monotonic() + 60
    while not arena.exists() and time.monotonic() < until_s:
        time.sleep(0.05)
    started = running.children(recursive=True)
    try:
        assert len(started) >= 3  # a broker, an instance, the updater
        soak.send_signal(signal.SIGTERM)
        assert soak.wait(30) == 128 + signal.SIGTERM
        assert psutil.wait_procs(started, timeout=5)[1] == []
        assert not arena.exists()
    finally:
        for process in filter(psutil.Process.is_running, [running, *started]):
            process.kill()
