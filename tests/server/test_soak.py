"""Soaks in short: a minute of the service under load and faults; the one of embedding tables starts, and ends when told to.

That rows stay right under kills is in tests/long/tables/test_faults.py.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil

from experiments.gateway_soak import soak
from experiments.served import publish_with_half, serve_with_gateway
from server.start.environment import PROJECT
from serving.tables.store.memory import ARENA_PREFIX
from tests.repositories import small_repository

SOAK_S, FAULT_EVERY_S = 45.0, 15.0  # a stage is killed, the server moves, the server is killed


def test_a_minute_of_load_with_faults_and_a_move_brings_no_wrong_answer_and_no_error(tmp_path):
    """By the bounds of the experiment but one: a minute is too short for that of memory. `make soak` runs it for an hour."""
    repo, run_dir = tmp_path / "repository", tmp_path / "run"
    publish_with_half(small_repository(), repo, tmp_path)
    with serve_with_gateway(repo, "deadline_ms = 2_000\n", supervised=True, run_dir=run_dir) as served:
        figures = {figure.name: figure for figure in soak(served, SOAK_S, FAULT_EVERY_S, np.random.default_rng(0))}
    missed = {name: figure.values for name, figure in figures.items() if figure.met is False}
    assert missed.keys() <= {"memory afterwards over before"}, missed
    assert figures["faults and moves"].median >= 3
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
