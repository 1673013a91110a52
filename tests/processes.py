"""Processes that tests start and kill.

Each is forked from a helper process that calls nothing: a fork beside the threads of gRPC or of a broker may abort or hang.
All tests of a process share the helper. It imports in advance what would take each child a second.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["tests.unit.live.consuming", "tests.unit.live.writing", "tests.unit.tables.test_slots", "tests.unit.tables.updating"]
)


@contextmanager
def running(target: Callable[..., object], *arguments: object) -> Iterator[BaseProcess]:
    """Run a process while the block runs, and kill it at the end, also where the test fails: it may never end by itself."""
    process = PROCESSES.Process(target=target, args=arguments)
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
