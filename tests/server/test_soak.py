"""Soaks in short: embedding tables under updates and SIGKILLs (experiments/soak.py), the service under load and faults."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from server.environment import PROJECT
from serving.tables.store.memory import ARENA_PREFIX
from tests import repositories

SECONDS = 10  # kills begin after 5 s
SERVICE_MINUTES = 0.1  # of load: a kill and a move, however slow the machine is


def test_every_served_row_is_one_that_may_be_served_then(tmp_path):
    command = [sys.executable, "-m", "experiments.soak", "--seconds", str(SECONDS), "--instances", "2", "--rows", "5000"]
    command += ["--results", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=300)
    assert done.stdout, done.stderr
    figures = {figure["figure"]: figure["value"] for figure in json.loads(done.stdout.splitlines()[-1])["figures"]}
    late = figures["wrong rows, late"]  # how late a row may be is a speed: the command judges it on an idle machine
    assert figures["wrong rows"] - late == figures["instances that failed"] == 0, done.stdout + done.stderr
    assert min(figures["look-ups"], figures["rows published"]) > 100
    assert figures["kills"] >= 1


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


def test_load_a_fault_and_a_move_bring_no_wrong_answer_and_no_error(tmp_path):
    """experiments/gateway_soak.py, a fault every 5 s or as soon as the one before is over. `make soak` runs it for an hour."""
    command = [sys.executable, "-m", "experiments.gateway_soak", "--repo", str(repositories.small_repository())]
    command += ["--minutes", str(SERVICE_MINUTES), "--fault-every-s", "5", "--results", str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=600)
    figures = {figure["figure"]: figure["value"] for figure in json.loads(done.stdout.splitlines()[-1])["figures"]}
    said = done.stdout + done.stderr
    assert figures["wrong or mixed answers"] == figures["any status but 200"] == figures["faults without recovery"] == 0, said
    assert figures["faults and moves"] >= 2, said  # a slow machine takes long to come back from each
    assert figures["requests"] > 100, said
