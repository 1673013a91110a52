"""Servers that live side by side run in their turn, and at no other time."""

from __future__ import annotations

import shutil
import subprocess

import psutil

from perf.target import take_turns
from server.processes import find_members
from tests.present import present
from tests.waiting import until


def test_processes_run_in_their_turn_only(tmp_path):
    """A process with the name and the tag of a server."""
    shutil.copy2(present(shutil.which("sleep")), tmp_path / "tritonserver")
    with subprocess.Popen([tmp_path / "tritonserver", "60"]) as child:
        process = psutil.Process(child.pid)
        until(lambda: process in find_members(str(tmp_path)))  # for a moment a program that starts has a name and no arguments
        with take_turns(str(tmp_path)) as server:
            until(lambda: process.status() == psutil.STATUS_STOPPED)
            with server.turn():
                until(lambda: process.status() != psutil.STATUS_STOPPED)
            until(lambda: process.status() == psutil.STATUS_STOPPED)
        until(lambda: process.status() != psutil.STATUS_STOPPED)
        child.kill()
        child.wait()
        server.pause()  # a process that is gone: the one whose turn it is reports that
