"""Make the tables of a run, for the terminal (rich) and the report (HTML)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import rich.box
import rich.table

from perf.report.results import Run
from perf.slo import Verdict

if TYPE_CHECKING:
    from perf.ratio import Ratio


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]
    kept: bool | None = None  # whether an SLO was kept; None: the row has none


@dataclass(frozen=True)
class Table:
    title: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]

    def to_rich(self) -> rich.table.Table:
        table = rich.table.Table(
            title=self.title, title_justify="left", title_style="bold", header_style="dim", box=rich.box.SIMPLE_HEAD
        )
        for number, head in enumerate(self.head):
            table.add_column(head, justify="left" if number == 0 else "right")
        for row in self.rows:
            table.add_row(*row.cells, style={None: None, True: "green", False: "bold red"}[row.kept])
        return table


def make_closed_table(run: Run) -> Table:
    rows = [
        Row(
            (
                f"{level.model}, {level.transport}",
                f"{level.value:g} {'clients' if level.mode == 'concurrency' else '/s offered'}",
                f"{level.achieved_rate:,.0f}",
                *(f"{getattr(level.latency, q):.2f}" for q in ("p50_ms", "p95_ms", "p99_ms")),
                f"{level.spread:.0%}",
            )
        )
        for level in run.closed
    ]
    head = ("Closed loop", "load", "answers/s", "p50 ms", "p95 ms", "p99 ms", "spread")
    return Table("perf_analyzer", head, tuple(rows))


def make_open_table(run: Run) -> Table:
    rows = []
    for load in run.open:
        rows.append(
            Row(
                (
                    load.name,
                    f"{load.offered_rate:,.0f}",
                    f"{load.achieved_rate:,.0f}",
                    *(_format_latency(load.latency)),
                    f"{load.error_share:.2%}",
                    f"{load.send_late.p99_ms:.2f}" if load.send_late else "-",
                    f"{load.generator_cores:.2f}",
                )
            )
        )
        rows += [Row((f"   {name}", "", "", *_format_latency(latency), "", "", "")) for name, latency in load.by_class.items()]
    head = (
        "Open loop",
        "offered/s",
        "answered/s",
        "p50 ms",
        "p95 ms",
        "p99 ms",
        "errors",
        "sent late p99 ms",
        "generator cores",
    )
    return Table("Open-loop load, latency from the due instant", head, tuple(rows))


def _format_latency(latency) -> tuple[str, ...]:
    return tuple(f"{getattr(latency, q):.2f}" if latency else "-" for q in ("p50_ms", "p95_ms", "p99_ms"))


def make_stage_table(run: Run) -> Table:
    """Return mean microseconds by stage and phase, of the ensemble's levels."""
    rows = []
    for level in run.select_curve("recommend"):
        for model, times in level.computing_models.items():
            phases = (times.queue_us, times.compute_input_us, times.compute_infer_us, times.compute_output_us)
            cells = (f"{level.value:g} clients, {model}", *(f"{value:,.0f}" for value in phases), f"{times.mean_batch:.1f}")
            rows.append(Row(cells))
    head = ("recommend", "queue us", "input us", "infer us", "output us", "mean batch")
    return Table("Server statistics by stage", head, tuple(rows))


def make_verdict_table(verdicts: list[Verdict]) -> Table:
    rows = (
        Row(
            (
                verdict.key,
                "not measured" if verdict.value is None else f"{verdict.value:g}",
                str(verdict.bound),
                "kept" if verdict.kept else "BROKEN",
                verdict.bound.why,
            ),
            verdict.kept,
        )
        for verdict in verdicts
    )
    return Table("SLO", ("objective", "measured", "bound", "verdict", "why"), tuple(rows))


def make_hit_rate_table(run: Run) -> Table:
    rows = tuple(Row((name, f"{rate:.1%}")) for name, rate in run.hit_rates.items())
    return Table("Cache hits, of the lookups that reached each", ("cache", "hits"), rows)


def make_ratio_table(ratios: list[Ratio]) -> Table:
    """Return the table of an interleaved comparison: medians, and ratios with their spread over the rounds."""
    rows = [
        Row(
            (
                ratio.metric,
                f"{np.median(ratio.a):,.2f}",
                f"{np.median(ratio.b):,.2f}",
                f"{ratio.median:.3f}",
                f"{ratio.low:.3f} … {ratio.high:.3f}",
                "every round agrees" if ratio.certain else "may be chance",
            )
        )
        for ratio in ratios
    ]
    head = ("metric", "A, median", "B, median", "B/A, median", "lowest … highest", "")
    return Table(f"B against A, {len(ratios[0].a)} interleaved rounds", head, tuple(rows))
