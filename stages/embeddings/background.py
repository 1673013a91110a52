"""One thread for what a request need not wait for. Its queue is bounded: work that finds it full is dropped, and counted."""

from __future__ import annotations

import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

QUEUE_LENGTH = 256
WAKE_AT = 16  # jobs; fewer wait for the next upkeep: waking a thread costs the request that does it a tenth of an SSD read
LINGER_S = 0.001  # the request that leaves a job here should be answered first: both need the interpreter
SWITCH_S = 0.0002  # what a request may wait for the interpreter while a job runs; Python's own 5 ms became its p99


class Background:
    """Runs jobs one after the other, and between them `upkeep`, a method, about every `upkeep_every_s`.

    The thread ends with `close`, or when the object that `upkeep` belongs to is no more.
    """

    def __init__(self, upkeep: Callable[[], None], upkeep_every_s: float) -> None:
        self._jobs: deque[Callable[[], None]] = deque()
        self._woken, self._closing = threading.Event(), False
        self._upkeep, self._upkeep_every_s = weakref.WeakMethod(upkeep), upkeep_every_s
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_S))
        self._thread = threading.Thread(target=self._run, name="embedding-tiers", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None], soon: bool = False) -> bool:
        """False: the queue is full, the job is dropped. soon: do not wait for others."""
        if len(self._jobs) >= QUEUE_LENGTH:
            return False
        self._jobs.append(job)
        if soon or len(self._jobs) == WAKE_AT:
            self._woken.set()
        return True

    def settle(self) -> None:
        """Return when all jobs submitted so far are done."""
        done = threading.Event()
        self._jobs.append(done.set)
        self._woken.set()
        done.wait()

    def close(self) -> None:
        """Once all jobs submitted so far are done."""
        self._closing = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        upkeep_at_s = 0.0
        while upkeep := self._upkeep():
            if time.monotonic() >= upkeep_at_s:
                self._guarded(upkeep)
                upkeep_at_s = time.monotonic() + self._upkeep_every_s
            del upkeep
            if self._woken.wait(self._upkeep_every_s):
                self._woken.clear()
                time.sleep(LINGER_S)
            self._work_off()
            if self._closing:
                return

    def _work_off(self) -> None:
        while self._jobs:
            self._guarded(self._jobs.popleft())

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        """A failed insertion costs a later miss; the thread must live on."""
        try:
            job()
        except Exception:
            logging.getLogger(__name__).exception("background work of the embedding tiers failed")
