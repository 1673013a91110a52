"""One thread for what a request need not wait for. Its queue is bounded: work that finds it full is dropped, and counted."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable

QUEUE_LENGTH = 256
LINGER_S = 0.001  # the request that leaves a job here should be answered first: both need the interpreter
SWITCH_S = 0.0002  # what a request may wait for the interpreter while a job runs; Python's own 5 ms became its p99


class Background:
    """Runs jobs one after the other, and between them `upkeep`, a method, about every `upkeep_every_s`.

    The thread ends with `close`, or when the object that `upkeep` belongs to is no more.
    """

    def __init__(self, upkeep: Callable[[], None], upkeep_every_s: float) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._upkeep, self._upkeep_every_s = weakref.WeakMethod(upkeep), upkeep_every_s
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="embedding-tiers", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> bool:
        """False: the queue is full, the job is dropped."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def settle(self) -> None:
        """Return when all jobs submitted so far are done."""
        self._jobs.join()

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        upkeep_at_s = 0.0
        while upkeep := self._upkeep():
            if time.monotonic() >= upkeep_at_s:
                self._guarded(upkeep)
                upkeep_at_s = time.monotonic() + self._upkeep_every_s
            del upkeep
            try:
                job = self._jobs.get(timeout=self._upkeep_every_s)
            except queue.Empty:
                continue
            if job is not None:
                time.sleep(LINGER_S)
                self._guarded(job)
            self._jobs.task_done()
            if job is None:
                return
            del job

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        """A failed insertion costs a later miss; the thread must live on."""
        try:
            job()
        except Exception:
            logging.getLogger(__name__).exception("background work of the embedding tiers failed")
