"""How far a command is: on stderr, so that its last line on stdout stays what others read."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

console = Console(stderr=True, width=None if os.isatty(2) else 120)


@contextlib.contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """-> call it with what begins now; one bar on a terminal, one line each elsewhere."""
    columns = (TextColumn("{task.description:<44}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # drawn at every step only: a thread that draws in between takes the interpreter from what is measured in this process
    with Progress(*columns, console=console, disable=not console.is_terminal, auto_refresh=False) as bar:
        task = bar.add_task("", total=total)
        begun = 0

        def step(what: str) -> None:
            nonlocal begun
            begun += 1
            if console.is_terminal:
                bar.update(task, description=what, completed=begun - 1, refresh=True)
            else:
                console.print(f"[{begun}/{total}] {what}", markup=False, highlight=False)

        yield step
        bar.update(task, completed=total, refresh=True)
