"""Start processes under a supervisor of their own (server/supervisor.py), which restarts them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from server import log, supervisor
from server.environment import PROJECT


def start_supervised(
    log_path: Path, command: Sequence[str], folder: Path = PROJECT, every_s: float | None = None
) -> subprocess.Popen:
    """Run `python COMMAND` in a folder from now on, in a session of its own. Return its supervisor. Both write to `log_path`.

    every_s: time after which a command that ended well runs again; None: it runs once
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log.rotate(log_path)
    repeated = [] if every_s is None else ["--every", f"{every_s:g}"]
    with log_path.open("wb") as log_file:
        return subprocess.Popen(
            [sys.executable, "-m", supervisor.__name__, *repeated, str(folder), sys.executable, *command],
            cwd=PROJECT,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
