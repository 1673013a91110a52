"""Report what the logs say: the progress of the experiment for `GET /v1/experiment`, and the calibration of scores as metrics.

Joining answers with events takes seconds of Python. In a thread it would hold the interpreter's lock and delay every
recommendation, so `python -m trials progress | calibration` does it in a process of its own, at low priority.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Callable
from pathlib import Path

from gateway.metrics import Metrics
from serving.contract.errors import DependencyError

log = logging.getLogger("gateway")

PROJECT = Path(__file__).parents[1]
KEPT_S = 10.0  # age up to which a report is reused
TIMEOUT_S = 120.0  # for one report
NICENESS = 10
CALIBRATED_EVERY_S = 600.0
UNREADABLE = "The logs of answers and events cannot be read. The gateway's log has the details."


class LogReports:
    """Reads the reports of a command of `python -m trials`, one at a time, and keeps the last. Belongs to one event loop."""

    def __init__(self, repo: Path, command: str, now: Callable[[], float] = time.monotonic) -> None:
        self._repo, self._command, self._now, self._reading = repo.resolve(), command, now, asyncio.Lock()
        self._report: bytes | DependencyError = b""
        self._read_s = float("-inf")

    async def read_latest(self) -> bytes:
        """Return the report as JSON, at most KEPT_S old.

        Raises DependencyError if the logs cannot be read within TIMEOUT_S.
        """
        async with self._reading:
            if self._now() - self._read_s > KEPT_S:
                try:
                    self._report = await self._read()
                except DependencyError as error:  # kept as well, so that waiting callers do not try again one by one
                    self._report = error
                self._read_s = self._now()
            if isinstance(self._report, DependencyError):
                raise self._report
            return self._report

    async def _read(self) -> bytes:
        command = (sys.executable, "-m", "trials", self._command, "--repo", str(self._repo))
        try:
            process = await asyncio.create_subprocess_exec(*command, cwd=PROJECT, stdout=PIPE, stderr=PIPE)
            try:
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
                async with asyncio.timeout(TIMEOUT_S):
                    report, errors = await process.communicate()
            finally:
                if process.returncode is None:  # the process hangs, or the gateway ends
                    process.kill()
                    await process.wait()
        except TimeoutError as error:
            log.warning("%s was killed after %g s", " ".join(command[1:4]), TIMEOUT_S)
            raise DependencyError(
                f"The logs of answers and events could not be read within {TIMEOUT_S:g} s. Try again."
            ) from error
        except OSError as error:  # too little memory, or too many processes
            log.warning("%s cannot run: %s", " ".join(command[1:4]), error)
            raise DependencyError(UNREADABLE) from error
        if process.returncode:
            log.warning("%s failed: %s", " ".join(command[1:4]), errors.decode(errors="replace"))
            raise DependencyError(UNREADABLE)
        return report


async def watch_calibration(reports: LogReports, metrics: Metrics) -> None:
    """Show the calibration of scores as metrics every CALIBRATED_EVERY_S, until cancelled. Without a report, they are empty."""
    while True:
        await asyncio.sleep(CALIBRATED_EVERY_S)
        try:
            metrics.show_calibration(json.loads(await reports.read_latest()))
        except DependencyError as error:
            log.warning("the calibration of scores is not known: %s", error)
            metrics.show_calibration({})
