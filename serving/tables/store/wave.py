"""Run a wave of blocking reads in parallel, on a few threads and the calling one.

An SSD read takes about 80 us and releases the interpreter; waking a thread takes about 10 us. The futures and the queue of a
ThreadPoolExecutor take three times that, which is much for a request that waits for ten rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Wave:
    """`n_threads` threads beside the callers of `run`. Concurrent callers share the idle threads."""

    def __init__(self, n_threads: int) -> None:
        self._idle = deque(_Reader() for _ in range(n_threads))
        self._all = tuple(self._idle)

    def run(self, action: Callable[..., Any], parts: Sequence[tuple]) -> list[Any]:
        """Return [action(*part) for part in parts], run in parallel. Raises the error of one of them after all have ended."""
        if len(parts) <= 1:
            return [action(*part) for part in parts]
        todo, results, failures = deque(enumerate(parts)), [None] * len(parts), []
        ended, all_ended = itertools.count(1), threading.Lock()
        all_ended.acquire()

        def work() -> None:
            while True:
                try:
                    at, part = todo.popleft()
                except IndexError:
                    return
                try:
                    results[at] = action(*part)
                except Exception as error:
                    failures.append(error)
                if next(ended) == len(parts):
                    all_ended.release()

        for _ in parts[1:]:
            try:
                reader = self._idle.pop()
            except IndexError:  # the other threads have taken all parts
                break
            reader.start(work, self._idle)
        work()
        all_ended.acquire()
        if failures:
            raise failures[0]
        return results

    def close(self) -> None:
        """End the threads. No thread may be in `run`."""
        for reader in self._all:
            reader.end()


class _Reader:
    """A thread that waits for work."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], deque[_Reader]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedding-reads", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None], idle: deque[_Reader]) -> None:
        """Wake the thread to run `work`, then put it back among the idle ones."""
        self._jobs.put((work, idle))

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while job := self._jobs.get():
            work, idle = job
            work()
            del job, work  # and the arrays that they reference
            idle.append(self)
