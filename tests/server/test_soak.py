"""The soak of embedding tables (experiments/soak.py) starts, and ends when it is told to.

That rows and answers stay right under kills and moves is in tests/long/tables/test_faults.py, test_supervision.py and
test_publication.py.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from server.environment import PROJECT
from serving.tables.store.memory import ARENA_PREFIX


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
