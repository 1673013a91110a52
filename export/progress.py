"""Print the progress of an export: a line per finished phase, and details on request.

On a terminal, the latest detail stands below; into a file, one is printed every half minute, so that a log of hours tells
how far it is.

52 s  features        9 s  6 categorical columns of users, 3 of items
95 s  retriever      43 s  3,908 items, fitted on 396,374 events
230 s  at most 1.4 GiB of memory were in use
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape

SILENT_S = 30.0  # longest silence where the output is not a terminal


@dataclass
class Phase:
    """A running phase. result: the text for its line."""

    result: str = ""


class Progress:
    """Prints lines that begin with the seconds since the start."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self._console, self._verbose = console, verbose
        self._status = console.status("")
        self._started_s = self._printed_s = time.monotonic()

    @contextmanager
    def phase(self, name: str) -> Iterator[Phase]:
        """Print a line when the block is done. On a terminal, show the latest detail meanwhile."""
        phase, begun_s = Phase(), time.monotonic()
        self._status.update(escape(name))
        with self._status:
            yield phase
        self.note(f"{name:<12} {time.monotonic() - begun_s:4.0f} s  {phase.result}")

    def note(self, text: str) -> None:
        """Print a line that everybody should see."""
        self._printed_s = time.monotonic()
        self._console.print(f"[dim]{self._printed_s - self._started_s:5.0f} s[/]  {escape(text)}", highlight=False)

    def warn(self, text: str) -> None:
        """Print a line that somebody should look into."""
        self._console.print(f"[yellow]warning[/]: {escape(text)}", highlight=False)

    def note_memory(self) -> None:
        """Print the most memory that this process had in use so far."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.note(f"at most {peak_kib / 2**20:.1f} GiB of memory were in use")

    def note_detail(self, text: str) -> None:
        """On a terminal, show a line until the next one; print it when details were requested, or after a long silence."""
        self._status.update(escape(text.strip()))
        is_late = not self._console.is_terminal and time.monotonic() - self._printed_s >= SILENT_S
        if self._verbose or is_late:
            self.note(f"  {text}")
