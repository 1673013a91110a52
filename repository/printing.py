"""Print tables for people, without cutting a cell."""

from __future__ import annotations

import os

from rich.console import Console
from rich.table import Table

UNLIMITED = 10_000  # characters: wider than any table


def print_table(table: Table) -> None:
    """Print a table as wide as the terminal, long cells on several lines.

    A file or a pipe gets every cell in one piece, unless COLUMNS sets a width.
    """
    console = Console(markup=False)  # names of tags, experiments and categories may have brackets
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = UNLIMITED
    for column in table.columns:
        column.overflow = "fold"
    console.print(table)
