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
TIMEOUT_S = 120.0  # of one report
NICENESS = 10


class ExperimentReports:
    """Reads reports, one at a time, and keeps the last one. Belongs to one event loop."""

    def __init__(self, repo: Path, now: Callable[[], float] = time.monotonic, timeout_s: float = TIMEOUT_S) -> None:
        self._repo, self._now, self._timeout_s, self._reading = repo.resolve(), now, timeout_s, asyncio.Lock()
        self._report: bytes | DependencyError = b""
        self._read_s = float("-inf")

    async def latest(self) -> bytes:
        """Return the report of the latest experiment as JSON (schema.ExperimentReport), at most KEPT_S old.

        Raises DependencyError if the logs cannot be read, or not in time.
        """
        async with self._reading:
            if self._now() - self._read_s > KEPT_S:
                try:
                    self._report = await self._read()
                except DependencyError as error:  # kept too, so that the callers that wait do not each try again
                    self._report = error
                self._read_s = self._now()
            if isinstance(self._report, DependencyError):
                raise self._report
            return self._report

    async def _read(self) -> bytes:
        command = (sys.executable, "-m", "trials", "progress", "--repo", str(self._repo))
        process = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdout=PIPE, stderr=PIPE)
        try:
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            async with asyncio.timeout(self._timeout_s):
                report, errors = await process.communicate()
        except TimeoutError as error:
            log.warning("%s was killed after %g s", " ".join(command[1:4]), self._timeout_s)
            raise DependencyError(
                f"The experiment's logs could not be read within {self._timeout_s:g} s. Try again."
            ) from error
        finally:
            if process.returncode is None:  # it hangs, or the gateway ends
                process.kill()
                await process.wait()
        if process.returncode:
            log.warning("%s failed: %s", " ".join(command[1:4]), errors.decode(errors="replace"))
            raise DependencyError("The experiment's logs cannot be read. The gateway's log has the details.")
        return report
