"""Servers that live side by side run when it is their turn, and at no other time."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable

import psutil

from perf import turns


def until(condition: Callable[[], bool]) -> None:
    """A signal takes effect a moment after it was sent."""
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def test_processes_run_in_their_turn_only(monkeypatch):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        process = psutil.Process(child.pid)
        monkeypatch.setattr(turns, "members", lambda tag: [process])
        with turns.taking_turns("tag") as server:
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            with server.turn():
                until(lambda: process.status() != psutil.STATUS_STOPPED)
            until(lambda: process.status() == psutil.STATUS_STOPPED)
        until(lambda: process.status() != psutil.STATUS_STOPPED)
        child.kill()
        child.wait()
        server.pause()  # of a process that is gone: no concern of the one whose turn it is
