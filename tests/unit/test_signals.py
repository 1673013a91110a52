"""A signal that ends or wakes a process is handled wherever it interrupts it, also inside the pause that it should end."""

from __future__ import annotations

import subprocess
import sys

import pytest

from server.start.environment import PROJECT

# Raises the signal at one line of `run` and of what it calls, in the main thread, then at the next line, and so on.
EACH_LINE = """
import os, signal, sys
from pathlib import Path

folder = Path(sys.argv[1])
n_lines = 0

def raise_at(last):
    global n_lines
    n_lines = 0
    def trace(frame, event, _):
        global n_lines
        if frame.f_globals["__name__"] in ("pathlib", "json"):
            return None
        if n_lines or (frame.f_code.co_name == "run" and event == "call"):
            n_lines += 1
        if n_lines == last:
            sys.settrace(None)
            signal.raise_signal(signum)
            then()
        return trace
    sys.settrace(trace)

def then():
    pass

%s

for last in range(1, 60):
    raise_at(last)
    begin()
    sys.settrace(None)
    assert n_lines >= last, "ended without a signal"
print("ended at each line")
"""
WAITING = """
def run(stop):
    while not stop.wait(0.05):
        pass
"""
STOPPED = f"""{WAITING}
signum = signal.SIGTERM
from serving.contract.signals import stop_on_signals
def begin():
    run(stop_on_signals())
"""
CLIENT = f"""{WAITING}
signum = signal.SIGTERM
import clients
from triton_recommender.cache.events import run_until_interrupted
def begin():
    run_until_interrupted(run)
"""
SUPERVISOR = """
signum = signal.SIGTERM
from server import supervisor
def begin():
    sys.argv[1:] = ["--every", "0.05", str(folder), "true"]
    supervisor.main()
"""
WATCH = """
signum = signal.SIGIO
from server import watch
from server.state import make_state_path
path = make_state_path(folder, 8001)
then = path.unlink
def begin():
    path.parent.mkdir(exist_ok=True)
    path.touch()
    sys.argv[1:] = ["--grpc-port", "8001", "--run-dir", str(folder), "--tag", "tag"]
    watch.main()
"""


@pytest.mark.parametrize("program", [STOPPED, CLIENT, SUPERVISOR, WATCH], ids=["follower", "client", "supervisor", "watch"])
def test_a_signal_at_any_line_is_handled(tmp_path, program):
    command = [sys.executable, "-c", EACH_LINE % program, str(tmp_path)]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=50)
    assert done.stdout.splitlines()[-1:] == ["ended at each line"], done.stderr
