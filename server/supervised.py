"""Start processes under a supervisor of their own (server/supervisor.py), which restarts them."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from server import supervisor
from server.processes import read_command
from server.start.environment import PROJECT
from server.status import log

POLL_S = 0.05
SHOWN_S = 0.001  # usual time until the kernel shows the arguments of a new process


def start_supervised(
    log_path: Path, command: Sequence[str], folder: Path = PROJECT, every_s: float | None = None
) -> subprocess.Popen:
    """Run `python COMMAND` in a folder from now on, in a session of its own. Return its supervisor. Both write to `log_path`.

    every_s: time after which a command that ended well runs again; None: it runs once
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log.rotate(log_path)
    repeated = [] if every_s is None else ["--every", f"{every_s:g}"]
    with log_path.open("ab") as log_file:  # appended to, so that logrotate may cut it short (copytruncate)
        process = subprocess.Popen(
            [sys.executable, "-m", supervisor.__name__, *repeated, str(folder), sys.executable, *command],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    # Whoever stops the server finds the process by its arguments, which the kernel does not show for a moment.
    while process.poll() is None and not read_command(psutil.Process(process.pid)):
        time.sleep(SHOWN_S)
    return process


def wait_for_start(process: subprocess.Popen, log_path: Path, word: str, timeout_s: float) -> str:
    """Wait until a log has the word by which a process says that it started. Return "", or the log's last line if it did not.

    The supervisor writes to the same log as soon as the process has ended.
    """
    deadline_s, of_supervisor = time.monotonic() + timeout_s, f'"logger": "{supervisor.LOGGER}"'
    while word not in (text := log_path.read_text(errors="replace")):
        if of_supervisor in text or process.poll() is not None or time.monotonic() > deadline_s:
            lines = [line for line in text.splitlines() if line.strip() and of_supervisor not in line]
            return lines[-1] if lines else "it printed nothing"
        time.sleep(POLL_S)
    return ""
