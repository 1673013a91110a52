"""Tags of processes that tests start, and a process that has one."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from uuid import uuid4

import psutil

from tests.waiting import until


def draw_tag() -> str:
    """Return a tag that no other test has, in this run or in another beside it: whoever ends a tag's processes ends all."""
    return f"triton_test_{uuid4().hex}_"


@contextmanager
def run_tagged(tag: str, *arguments: str) -> Iterator[subprocess.Popen]:
    """Run a process that does nothing, with a tag and `arguments` among its own, while the block runs.

    For a moment after its start, the kernel shows no arguments of it.
    """
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", *arguments, tag]) as process:
        try:
            until(lambda: tag in psutil.Process(process.pid).cmdline())
            yield process
        finally:
            process.kill()
