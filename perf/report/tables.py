"""The tables of a run: built once, shown on the terminal (rich) and in the report (HTML)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import rich.box
import rich.table

from perf.report.results import Run, summary
from perf.slo import OBJECTIVES, Verdict

if TYPE_CHECKING:
    from experiments.growth import Axis
    from experiments.overhead.breakdown import Breakdown
    from experiments.overhead.rounds import Overhead
    from perf.figure import Figure, Ratio
    from perf.observe.memory import ProcessMemory


@dataclass(frozen=True)
class Row:
    cells: tuple[str, ...]
    kept: bool | None = None  # an SLO that was kept or broken; None: neither


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


def closed_table(run: Run) -> Table:
    rows = [
        Row(
            (
                f"{level.model}, {level.transport}",
                f"{level.value:g} {'clients' if level.mode == 'concurrency' else '/s offered'}",
                f"{level.achieved_rate:,.0f}",
                *(f"{getattr(level.latency, q):.2f}" for q in ("p50_ms", "p95_ms", "p99_ms")),
                "-" if level.spread is None else f"{level.spread:.0%}",
            )
        )
        for level in run.closed
    ]
    head = ("Closed loop", "load", "answers/s", "p50 ms", "p95 ms", "p99 ms", "spread")
    return Table("perf_analyzer", head, tuple(rows))


def open_table(run: Run) -> Table:
    rows = []
    for load in run.open:
        rows.append(
            Row(
                (
                    load.name,
                    f"{load.offered_rate:,.0f}",
                    f"{load.achieved_rate:,.0f}",
                    *(_latency_cells(load.latency)),
                    f"{load.error_share:.2%}",
                    f"{load.send_late.p99_ms:.2f}" if load.send_late else "-",
                    f"{load.generator_cores:.2f}",
                )
            )
        )
        rows += [Row((f"   {name}", "", "", *_latency_cells(latency), "", "", "")) for name, latency in load.by_class.items()]
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


def _latency_cells(latency) -> tuple[str, ...]:
    return tuple(f"{getattr(latency, q):.2f}" if latency else "-" for q in ("p50_ms", "p95_ms", "p99_ms"))


def stage_table(run: Run) -> Table:
    """Mean microseconds by stage and phase, of the ensemble's levels."""
    rows = []
    for level in run.curve("recommend"):
        for model, times in level.kernels.items():
            phases = (times.queue_us, times.compute_input_us, times.compute_infer_us, times.compute_output_us)
            cells = (f"{level.value:g} clients, {model}", *(f"{value:,.0f}" for value in phases), f"{times.mean_batch:.1f}")
            rows.append(Row(cells))
    head = ("recommend", "queue us", "input us", "infer us", "output us", "mean batch")
    return Table("Server statistics by stage", head, tuple(rows))


def verdict_table(verdicts: list[Verdict]) -> Table:
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


def hit_rate_table(run: Run) -> Table:
    return Table(
        "Cache hit rates", ("cache", "hits"), tuple(Row((name, f"{rate:.1%}")) for name, rate in run.hit_rates.items())
    )


def comparison_tables(first: Run, second: Run) -> list[Table]:
    """Objectives and levels that both runs measured; a table without any is left out."""
    return [table for table in (objectives_table(first, second), comparison_table(first, second)) if table.rows]


def objectives_table(first: Run, second: Run) -> Table:
    a, b = summary(first), summary(second)
    rows = [
        Row((key, f"{a[key]:,.4g}", f"{b[key]:,.4g}", f"{b[key] / a[key]:.2f}" if a[key] else "-"))
        for key in OBJECTIVES
        if key in a and key in b
    ]
    return Table("B against A: what the SLO speaks of", ("objective", "A", "B", "B/A"), tuple(rows))


def comparison_table(first: Run, second: Run) -> Table:
    """Levels that both runs measured: the second as a ratio of the first."""
    rows = []
    after = {(level.model, level.transport, level.mode, level.value): level for level in second.closed}
    for level in first.closed:
        other = after.get((level.model, level.transport, level.mode, level.value))
        if other is None:
            continue
        rows.append(
            Row(
                (
                    f"{level.model}, {level.transport}, {level.value:g}",
                    f"{level.achieved_rate:,.0f}",
                    f"{other.achieved_rate:,.0f}",
                    f"{other.achieved_rate / level.achieved_rate:.2f}",
                    f"{level.latency.p50_ms:.2f}",
                    f"{other.latency.p50_ms:.2f}",
                    f"{other.latency.p50_ms / level.latency.p50_ms:.2f}",
                    f"{other.latency.p99_ms / level.latency.p99_ms:.2f}",
                )
            )
        )
    head = ("level", "answers/s A", "answers/s B", "B/A", "p50 A", "p50 B", "p50 B/A", "p99 B/A")
    return Table("B against A: closed loop", head, tuple(rows))


def ratio_table(ratios: list[Ratio]) -> Table:
    """An interleaved comparison: medians, and the ratio with its spread over the rounds."""
    rows = [
        Row(
            (
                ratio.metric,
                f"{np.median(ratio.a):,.2f}",
                f"{np.median(ratio.b):,.2f}",
                f"{ratio.median:.3f}",
                f"{ratio.low:.3f} … {ratio.high:.3f}",
                "every round agrees" if ratio.certain else "within the noise",
            )
        )
        for ratio in ratios
    ]
    head = ("metric", "A, median", "B, median", "B/A, median", "of the rounds", "")
    return Table(f"B against A, {len(ratios[0].a)} interleaved rounds", head, tuple(rows))


def figure_table(title: str, figures: list[Figure]) -> Table:
    """Each figure beside its bound."""
    rows = []
    for figure in figures:
        spread = f"{min(figure.values):,.3g} … {max(figure.values):,.3g}" if len(figure.values) > 1 else ""
        verdict = {None: "", True: "met", False: "MISSED"}[figure.met]
        rows.append(Row((figure.name, f"{figure.median:,.4g}", spread, figure.bound_in_words, verdict), figure.met))
    return Table(title, ("figure", "median", "of the rounds", "bound", ""), tuple(rows))


def overhead_table(result: Overhead) -> Table:
    title = (
        f"Overhead of serving, C = {result.candidates}, {len(result.figures[0].values)} interleaved rounds; peak at "
        + ", ".join(f"{clients} clients ({layout})" for layout, clients in result.peak_clients.items())
    )
    return figure_table(title, result.figures)


def breakdown_table(breakdowns: dict[str, Breakdown]) -> Table:
    parts = ("p50", "round_trip", "kernels", "hand_over", "queue", "copies", "rest")
    rows = [Row((layout, *(f"{getattr(found, f'{part}_us'):,.0f}" for part in parts))) for layout, found in breakdowns.items()]
    title = "Where the time of one client's request goes: p50, and means, in us; medians of the rounds, which add up nearly"
    return Table(title, ("layout", *(part.replace("_", " ") for part in parts)), tuple(rows))


def memory_table(memory: dict[str, list[ProcessMemory]]) -> Table:
    rows = [
        Row((f"{layout}: {process.name}", f"{process.pss_mib:,.0f}", f"{process.rss_mib:,.0f}"))
        for layout, processes in memory.items()
        for process in processes
    ]
    return Table("Memory by process, at the peak of the sum", ("process", "PSS MiB", "RSS MiB"), tuple(rows))


def growth_table(axes: list[Axis]) -> Table:
    rows = []
    for axis in axes:
        points = zip(axis.sizes, axis.processor_p50_ms, axis.processor_p90_ms, axis.latency_p50_ms, strict=True)
        rows += [Row((f"{axis.name}: {size:,}", *(f"{time_ms:.3f}" for time_ms in times_ms))) for size, *times_ms in points]
    head = ("size", "processor time, p50 ms", "p90 ms", "latency, p50 ms")
    return Table("One request in process, as work grows", head, tuple(rows))
