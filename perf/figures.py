"""Define figures with bounds, and report them at the end of a measurement.

Every measurement prints a table of its figures and bounds, writes them to experiments/results/<name>.json, from which
docs/results.md is generated, and prints the same document as one line of JSON, the last one on stdout. The exit code is 1
when a bound is missed or answers differ.
"""

from __future__ import annotations

import math
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from pydantic import BaseModel, FiniteFloat
from rich.console import Console

from perf.command import BROKEN
from perf.report.results import replace_text, to_json_line
from perf.report.tables import Row, Table
from server.start.environment import PROJECT

RESULTS = PROJECT / "experiments" / "results"
NOT_MEASURED = "not measured"
ResultsFolder = Annotated[Path, typer.Option("--results", file_okay=False, writable=True, help="folder of the result files")]


class Figure(BaseModel, frozen=True):
    """One figure, a value per round; its median counts. Without values, or where the median is no finite number, it was not
    measured, and misses every bound.

    at_most, at_least: its bounds, where there are any
    """

    name: str
    values: list[float]
    unit: str = ""
    at_most: FiniteFloat | None = None
    at_least: FiniteFloat | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.values)) if self.values else math.nan

    @property
    def met(self) -> bool | None:
        """Whether the median keeps the bounds; None without a bound."""
        if self.at_most is None and self.at_least is None:
            return None
        if not math.isfinite(self.median):
            return False
        below = self.at_most is None or self.median <= self.at_most
        return below and (self.at_least is None or self.median >= self.at_least)

    def to_record(self) -> Record:
        low, high = (_round(end(self.values)) if self.values else None for end in (np.min, np.max))
        low_high = {"low": low, "high": high} if low != high else {}
        bounds = {"at_most": self.at_most, "at_least": self.at_least}
        record = Record(figure=self.name, value=_round(self.median), unit=self.unit, **low_high, **bounds)
        # A median just beyond its bound is written as it is: rounded, it could be the bound itself, and count as met.
        return record if record.met == self.met else record.model_copy(update={"value": self.median})


class Record(BaseModel, frozen=True):
    """One figure as a result file keeps it: the median of the rounds, and the lowest and the highest where they differ.

    value None: not measured
    """

    figure: str
    value: float | None = None
    low: float | None = None
    high: float | None = None
    unit: str = ""
    at_most: FiniteFloat | None = None
    at_least: FiniteFloat | None = None

    @property
    def bound(self) -> str:
        bounds = [f"at least {self.at_least:g}"] if self.at_least is not None else []
        return ", ".join(bounds + ([f"at most {self.at_most:g}"] if self.at_most is not None else []))

    @property
    def met(self) -> bool | None:
        values = [] if self.value is None else [self.value]
        return Figure(name=self.figure, values=values, at_most=self.at_most, at_least=self.at_least).met


class Result(BaseModel, frozen=True):
    """A result file. conditions: data, sizes and machine, as far as a reader needs them to repeat the command."""

    name: str
    title: str
    command: str
    conditions: str
    figures: list[Record]

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        replace_text(folder / f"{self.name}.json", self.model_dump_json(indent=1, exclude_defaults=True) + "\n")


def finish(
    name: str,
    title: str,
    command: str,
    conditions: str,
    figures: list[Figure],
    results: Path,
    machine: dict[str, Any],
    differing_answers: str = "",
) -> None:
    """Print the figures, write the result file and the last line. Raises typer.Exit where a bound is missed.

    name: of the result and, but for characters that file names should not have, of its file
    machine: from `read_machine`; differing_answers: which answers are wrong, "" if none; if any, the figures are not written
    """
    name = re.sub(r"[^\w.-]+", "-", name)
    today = datetime.now(UTC).date()
    setup = f"{conditions}; {today}, {machine['cores']} cores, load average {machine['load_before']} at the start"
    result = Result(name=name, title=title, command=command, conditions=setup, figures=[f.to_record() for f in figures])
    print_table(tabulate_figures(title, figures))
    missed = [figure.name for figure in figures if figure.met is False]
    if differing_answers:
        print(f"Answers differ, so these figures do not count and are not written: {differing_answers}")
    else:
        result.write(results)
    print(to_json_line(result.model_dump(exclude_defaults=True) | machine | {"missed": missed, "differing": differing_answers}))
    if missed or differing_answers:
        raise typer.Exit(BROKEN)


def tabulate_figures(title: str, figures: list[Figure]) -> Table:
    rows = []
    for figure in figures:
        record = figure.to_record()
        spread = "" if record.low is None else f"{record.low:,.4g} … {record.high:,.4g}"
        verdict = {None: "", True: "met", False: "MISSED"}[figure.met]
        value = NOT_MEASURED if record.value is None else f"{figure.median:,.4g} {figure.unit}"
        rows.append(Row((figure.name, value, spread, record.bound, verdict), figure.met))
    return Table(title, ("figure", "median", "of the rounds", "bound", ""), tuple(rows))


def print_table(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else 150).print(table.to_rich())


def _round(value: float) -> float | None:
    """Return a value with four significant digits, because more are not reproducible; None if it is not finite."""
    return float(f"{value:.4g}") if math.isfinite(value) else None
