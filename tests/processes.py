"""Processes that tests start and kill.

Each is forked from a helper process that calls nothing: a fork beside the threads of gRPC or of a broker may abort or hang.
All tests of a process share the helper. It imports in advance what would take each child a second.
"""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["tests.unit.live.consuming", "tests.unit.live.writing", "tests.unit.tables.test_slots", "tests.unit.tables.updating"]
)
