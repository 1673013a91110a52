"""One wave of reads that block: as many at once as there are threads, the asking one among them.

A read of the SSD takes about 80 us and leaves the interpreter to others; waking a thread for it takes about 10. Of a
ThreadPoolExecutor's futures and queue it would take three times that, which is much for a request that waits for ten rows.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any


class Wave:
    """`n_threads` threads beside those that call `run`. Several may call it at once: they share what threads are idle."""

    def __init__(self, n_threads: int) -> None:
        self._idle = deque(_Reader() for _ in range(n_threads))
        self._all = tuple(self._idle)

    def run(self, action: Callable[..., Any], parts: Sequence[tuple]) -> list[Any]:
        """Return [action(*part) for part in parts]. Raises what one of them raised, once all have ended."""
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
            except IndexError:  # the others take more than one part each
                break
            reader.start(work, self._idle)
        work()
        all_ended.acquire()
        if failures:
            raise failures[0]
        return results

    def close(self) -> None:
        """End the threads; nobody may be in `run`."""
        for reader in self._all:
            reader.end()


class _Reader:
    """A thread that waits to be handed something to do."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Callable[[], None], deque[_Reader]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="embedding-reads", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None], idle: deque[_Reader]) -> None:
        """Do it, then be idle again."""
        self._jobs.put((work, idle))

    def end(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while job := self._jobs.get():
            work, idle = job
            work()
            del job, work  # and what they hold
            idle.append(self)
