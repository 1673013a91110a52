"""Run a wave of blocking reads in parallel, on a few threads and the calling one.

An SSD read takes about 80 us and releases the interpreter's lock. Waking one of these threads takes about 10 us; a
ThreadPoolExecutor with its futures and queue takes about 30 us, which is much for a request that waits for ten rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Wave:
    """Threads that help the callers of `run`. Concurrent callers share the idle ones."""

    def __init__(self, n_threads: int) -> None:
        self._idle = deque(_Reader() for _ in range(n_threads))
        self._all = tuple(self._idle)

    def run(self, action: Callable[..., Any], parts: Sequence[tuple]) -> list[Any]:
        """Return [action(*part) for part in parts], run in parallel. Raises the error of one of them once all have ended."""
        if len(parts) <= 1:
            return [action(*part) for part in parts]
        todo, results, failures = deque(enumerate(parts)), [None] * len(parts), []
        ended, all_ended = itertools.count(1), threading.Lock()
        all_ended.acquire()

        def work() -> None:
            while True:
                try:
                    place, part = todo.popleft()
                except IndexError:
                    return
                try:
                    results[place] = action(*part)
                except Exception as error:
                    failures.append(error)
                if next(ended) == len(parts):
                    all_ended.release()

        for _ in parts[1:]:
            try:
                reader = self._idle.pop()
            except IndexError:  # no thread is idle
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
        """Wake the thread to run `work`. Afterwards it adds itself to `idle`."""
        self._jobs.put((work, idle))

    def end(self) -> None:
        """End the thread, and wait for that."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while job := self._jobs.get():
            work, idle = job
            work()
            del job, work  # so that the arrays that they reference are freed
            idle.append(self)
