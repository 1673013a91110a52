"""Notice a stalled start: model processes that wait for something that never comes."""

from __future__ import annotations

import time

import psutil

from server.processes import find_server_members

IDLE_SHARE = 0.03  # of a processor; a server that waits for requests uses 0.01, one that loads models far more
LOOK_EVERY_S = 1.0


class StallWatch:
    """Watches a server while it loads its models. tag: of the server"""

    def __init__(self, tag: str) -> None:
        self._tag = tag
        self._looked_s = self._active_s = time.monotonic()
        self._log_size, self._processor_s = 0, 0.0

    def measure_idle_s(self, log_size: int) -> float:
        """Return for how many seconds the log has not grown and the processes have been idle, as of the last look.

        log_size: length of the log now, in characters
        """
        now_s = time.monotonic()
        if now_s - self._looked_s >= LOOK_EVERY_S:
            self._looked_s, processor_s = now_s, measure_processor_s(self._tag)
            if log_size != self._log_size or processor_s - self._processor_s > IDLE_SHARE * (now_s - self._active_s):
                self._active_s, self._log_size, self._processor_s = now_s, log_size, processor_s
        return self._looked_s - self._active_s


def measure_processor_s(tag: str) -> float:
    """Return the processor time that tritonserver and its model processes have used, in seconds."""
    total_s = 0.0
    for process in find_server_members(tag):
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        total_s += times.user + times.system
    return total_s
