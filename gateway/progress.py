"""Report the progress of the experiment, for `GET /v1/experiment`.

Joining answers with events takes seconds of Python. In a thread it would hold the interpreter's lock and delay every
recommendation, so `python -m trials progress` does it in a process of its own, at low priority, when somebody asks.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

from serving.contract.errors import DependencyError

log = logging.getLogger("gateway")

PROJECT = Path(__file__).parents[1]
KEPT_S = 10.0  # for this long a report is reused
NICENESS = 10


class ExperimentReports:
    """Reads reports, one at a time, and keeps the last one. Belongs to one event loop."""

    def __init__(self, repo: Path, now: Callable[[], float] = time.monotonic) -> None:
        self._repo, self._now, self._reading = repo.resolve(), now, asyncio.Lock()
        self._report = b""
        self._read_s = float("-inf")

    async def latest(self) -> bytes:
        """Return the report of the latest experiment as JSON (schema.ExperimentReport), at most KEPT_S old.

        Raises DependencyError.
        """
        async with self._reading:
            if self._now() - self._read_s > KEPT_S:
                self._report = await self._read()
                self._read_s = self._now()
            return self._report

    async def _read(self) -> bytes:
        command = (sys.executable, "-m", "trials", "progress", "--repo", str(self._repo))
        process = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdout=PIPE, stderr=PIPE)
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            report, errors = await process.communicate()
        finally:
            if process.returncode is None:  # the gateway ends
                process.kill()
        if process.returncode:
            log.warning("%s failed: %s", " ".join(command[1:4]), errors.decode(errors="replace"))
            raise DependencyError("The experiment's logs cannot be read. The gateway's log has the details.")
        return report
