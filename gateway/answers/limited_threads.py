"""Run slow work in a few threads of its own, for at most MOST_WAITING requests at a time.

Work goes on when its caller is gone, so callers who give up and ask again would make all others wait ever longer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from triton_recommender import Overloaded

MOST_WAITING = 64

Result = TypeVar("Result")


class LimitedThreads:
    """Belongs to one event loop. name: what the threads find, such as "explanations" """

    def __init__(self, n_threads: int, name: str) -> None:
        self._threads, self._name, self._waiting = ThreadPoolExecutor(n_threads, name.replace(" ", "-")), name, 0

    async def run(self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Return what the work returns. Raises Overloaded, or what the work raises."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{self._waiting} requests for {self._name} wait already; expected fewer. Try again.")
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        finally:
            self._waiting -= 1

    def close(self, wait: bool) -> None:
        """Start no work that waits. wait: for the work that runs"""
        self._threads.shutdown(wait=wait, cancel_futures=True)
