"""Servers that live side by side: only the one whose turn it is runs.

An idle server of five processes still takes about 1 % of two cores and wakes every few milliseconds: enough of them and what is
measured beside them has cold caches and a twentieth less of the machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import psutil

from server.processes import members


class Turns:
    """Of one server: its processes are stopped except inside `turn()`."""

    def __init__(self, tag: str) -> None:
        self._processes = members(tag)

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        self.resume()
        try:
            yield
        finally:
            self.pause()

    def pause(self) -> None:
        self._each(psutil.Process.suspend)

    def resume(self) -> None:
        self._each(psutil.Process.resume)

    def _each(self, do) -> None:
        for process in self._processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # whoever asks it next says that it died
                do(process)


@contextlib.contextmanager
def taking_turns(tag: str) -> Iterator[Turns]:
    """Stopped from here on; at the end it runs again, so that it can be told to stop."""
    turns = Turns(tag)
    turns.pause()
    try:
        yield turns
    finally:
        turns.resume()
