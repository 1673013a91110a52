"""`python -m server.supervisor [--every SECONDS] FOLDER COMMAND…`: keep a process running in FOLDER until SIGTERM or SIGINT.

    start ─▶ exits with 0, or a stop was requested: exit with its exit code
      ▲  └─▶ is killed, crashes or cannot be started: log it, and restart it after a pause
      └──────────────┘

The pause doubles with every crash, from 0.2 s to 30 s, and starts anew after ten seconds without a crash. With --every, a
process that exits with 0 is started again after SECONDS; between the runs it takes no memory. Its first run waits some
seconds, so as not to slow down a server that is just starting.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import time

from server.signals import name_signal
from serving.contract.logs import print_json_line

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 30.0
FIRST_ROUND_AFTER_S = 8.0  # with --every, at most
STEADY_S = 10.0  # a process that ran this long is restarted after the first pause again
NOT_STARTED = 127  # exit code, as shells state it
LOGGER = "server.supervisor"  # of the supervisor's lines in the shared log


class Supervisor:
    """Runs one process at a time. `stop` is for signal handlers, and may be called at any moment."""

    def __init__(self, folder: str, command: list[str], every_s: float | None = None) -> None:
        self._folder, self._command, self._every_s = folder, command, every_s
        self._stopping = False
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()  # an Event's lock must not be taken in a signal handler
        self._process: subprocess.Popen | None = None

    def run(self) -> int:
        """Run until `stop` is called or, without `every_s`, the process exits with 0. Return its last exit code."""
        pause_s = FIRST_PAUSE_S
        if self._every_s is not None and self._wait_for_stop(min(FIRST_ROUND_AFTER_S, self._every_s)):
            return 0
        while True:
            started_s = time.monotonic()
            code, ending = self._run_once()
            if self._stopping or (code == 0 and self._every_s is None):
                return code
            if code == 0 and self._every_s is not None:
                pause_s = FIRST_PAUSE_S
                if self._wait_for_stop(self._every_s):
                    return code
                continue
            if time.monotonic() - started_s > STEADY_S:
                pause_s = FIRST_PAUSE_S
            print_json_line("WARNING", LOGGER, f"{ending}; started again in {pause_s:g} s")
            if self._wait_for_stop(pause_s):
                return code
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    def _run_once(self) -> tuple[int, str]:
        """Run the process to its end. Return its exit code, NOT_STARTED without one, and how it ended."""
        try:
            self._process = subprocess.Popen(self._command, cwd=self._folder)
        except OSError as error:  # for instance for lack of memory, which passes
            return NOT_STARTED, f"not started, {error}"
        if self._stopping:  # stopped while the process was being started
            self._process.terminate()
        code = self._process.wait()
        return code, f"ended, exit code {code}" if code >= 0 else f"ended, killed by {name_signal(-code)}"

    def _wait_for_stop(self, timeout_s: float) -> bool:
        """Wait until `stop` is called, at most `timeout_s`. Return whether it was."""
        with contextlib.suppress(queue.Empty):
            self._wake.get(timeout=timeout_s)
        return self._stopping

    def stop(self) -> None:
        """Terminate the process, and let `run` return."""
        self._stopping = True
        self._wake.put(None)
        if self._process is not None:
            self._process.terminate()


def main() -> int:
    arguments = sys.argv[1:]
    every_s = None
    if arguments[0] == "--every":
        every_s, arguments = float(arguments[1]), arguments[2:]
    supervisor = Supervisor(arguments[0], arguments[1:], every_s)
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: supervisor.stop())
    code = supervisor.run()
    return code if code >= 0 else 128 - code  # as shells report a process that a signal ended


if __name__ == "__main__":
    sys.exit(main())
