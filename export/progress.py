"""Print the progress of an export: a line per finished phase, and details on request.

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


@dataclass
class Phase:
    """A running phase. result: the text for its line."""

    result: str = ""


class Progress:
    """Prints lines that begin with the seconds since the start."""

    def __init__(self, console: Console, verbose: bool = False) -> None:
        self._console, self._verbose = console, verbose
        self._status = console.status("")
        self._started_s = time.monotonic()

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
        self._console.print(f"[dim]{time.monotonic() - self._started_s:5.0f} s[/]  {escape(text)}", highlight=False)

    def warn(self, text: str) -> None:
        """Print a line that somebody should look into."""
        self._console.print(f"[yellow]warning[/]: {escape(text)}", highlight=False)

    def note_memory(self) -> None:
        """Print the most memory that this process had in use so far."""
        peak_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.note(f"at most {peak_kib / 2**20:.1f} GiB of memory were in use")

    def note_detail(self, text: str) -> None:
        """Print a line when details were requested; on a terminal, show it until the next one."""
        self._status.update(escape(text.strip()))
        if self._verbose:
            self.note(f"  {text}")
