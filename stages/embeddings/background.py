"""One thread for what a request need not wait for. Its queue is bounded: work that finds it full is dropped, and counted."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

QUEUE_LENGTH = 256


class Background:
    """Runs jobs one after the other, and `when_idle` after every `idle_s` without one."""

    def __init__(self, when_idle: Callable[[], None], idle_s: float) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(QUEUE_LENGTH)
        self._when_idle, self._idle_s = when_idle, idle_s
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
        while True:
            try:
                job = self._jobs.get(timeout=self._idle_s)
            except queue.Empty:
                self._guarded(self._when_idle)
                continue
            if job is not None:
                self._guarded(job)
            self._jobs.task_done()
            if job is None:
                return

    @staticmethod
    def _guarded(job: Callable[[], None]) -> None:
        """A failed insertion costs a later miss; the thread must live on."""
        try:
            job()
        except Exception:
            logging.getLogger(__name__).exception("background work of the embedding tiers failed")
