"""Draw the pictures of a report. Each function returns the Figure of a Run, or None if the run did not measure it."""

from __future__ import annotations

import matplotlib

matplotlib.use("Agg")
from collections.abc import Callable
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

from perf.observe import PHASES
from perf.report.results import HALF, MODELS, Closed, Open, Run
from serving.contract.errors import ConfigError
from serving.contract.tensors import ENSEMBLE

# Okabe and Ito's colours, which colour-blind readers can distinguish
BLUE, ORANGE, GREEN, RED, PURPLE, SKY, GREY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#8C8C8C"
MODEL_COLOUR = dict(zip(MODELS, (SKY, BLUE, GREEN, PURPLE, ORANGE), strict=True))
TRANSPORT_COLOUR = {"grpc": BLUE, "http": ORANGE}
PERCENTILE_COLOUR = {"p50_ms": BLUE, "p95_ms": ORANGE, "p99_ms": RED}
WIDTH_IN = 9.0
STYLE: dict[RcKeyType, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E6E6E6",
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 11,
    "legend.frameon": False,
    "figure.dpi": 120,
    "figure.constrained_layout.use": True,
    "figure.constrained_layout.w_pad": 0.08,
    "figure.constrained_layout.h_pad": 0.08,
}


def draw_latency_throughput(run: Run, folder: Path) -> Figure | None:
    """Draw latency against the achieved rate of perf_analyzer's levels, and against the offered rate of open loops."""
    curves = _select_curves(run)
    if not curves:
        return None
    loads = sorted(
        (load for load in run.open if load.name.startswith("poisson") and load.latency), key=lambda x: x.offered_rate
    )
    figure, panels = plt.subplots(1, 2 if loads else 1, figsize=(WIDTH_IN, 3.8), sharey=True, squeeze=False)
    closed, *opened = panels[0]
    for transport, curve in curves.items():
        rates, colour = [level.achieved_rate for level in curve], TRANSPORT_COLOUR[transport]
        closed.plot(rates, [level.latency.p50_ms for level in curve], "o-", color=colour, label=f"{transport}, p50")
        closed.plot(rates, [level.latency.p99_ms for level in curve], "o:", color=colour, ms=3, label=f"{transport}, p99")
    main = next(iter(curves.values()))
    for level in main:
        point = (level.achieved_rate, level.latency.p50_ms)
        closed.annotate(f"{level.value:g}", point, textcoords="offset points", xytext=(5, -11), fontsize=8, color=GREY)
    numbers = (
        "Closed loop (numbers: clients)" if main[0].mode == "concurrency" else "perf_analyzer (numbers: requests/s offered)"
    )
    closed.set(title=numbers, xlabel="answers/s", ylabel="latency, ms", yscale="log")
    closed.legend(fontsize=8)
    for axes in opened:
        rates = [load.offered_rate for load in loads]
        for percentile, colour in PERCENTILE_COLOUR.items():
            values = [getattr(load.latency, percentile) for load in loads]
            axes.plot(rates, values, "o-", color=colour, label=percentile.removesuffix("_ms"))
        axes.set(title="Open loop, Poisson, from the due instant", xlabel="requests/s offered")
        axes.legend(fontsize=8)
    for axes in panels[0]:
        axes.margins(0.06)
        axes.set_xlim(left=0)
        _label_log_axis(axes)
    return figure


def draw_stage_breakdown(run: Run, folder: Path) -> Figure | None:
    """Draw the mean time of a request by stage and phase, a bar per number of clients.

    Time outside of the stages is that of ensemble, gRPC and client.
    """
    curve = next(iter(_select_curves(run).values()), [])
    if not curve:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 0.42 * len(curve) + 1.6))
    rows = np.arange(len(curve))
    left = np.zeros(len(curve))
    for model in _list_models(curve):
        for kind, phases, alpha in (("queue", ("queue",), 0.35), ("work", PHASES[1:], 1.0)):
            width = np.array([_sum_stage_ms(level, model, phases) for level in curve])
            axes.barh(rows, width, left=left, color=MODEL_COLOUR[model], alpha=alpha, label=f"{model}: {kind}", height=0.62)
            left += width
    total = np.array([level.latency.mean_ms for level in curve])
    axes.barh(rows, np.maximum(total - left, 0), left=left, color="#D9D9D9", label="gRPC, ensemble, client", height=0.62)
    # the stages may add up to more than the total, because the server counts beyond the measurement windows
    for row, value, end in zip(rows, total, np.maximum(total, left), strict=True):
        axes.annotate(f"{value:.1f} ms", (end, row), textcoords="offset points", xytext=(4, -3), fontsize=8)
    axes.set(title="Where a request spends its time (mean)", xlabel="ms", yticks=rows)
    axes.set_yticklabels([_label_level(level) for level in curve])
    axes.grid(axis="y", visible=False)
    axes.margins(x=0.1)
    axes.invert_yaxis()
    figure.legend(fontsize=8, ncols=5, loc="outside lower center")
    return figure


def draw_histogram(run: Run, folder: Path) -> Figure | None:
    """Draw a histogram of latencies, with percentiles: of Poisson arrivals at half of the peak rate, or of the only load."""
    load = run.main_load
    if load is None or load.latency is None:
        return None
    with _open_raw(folder, load) as raw:
        latency_ms = (raw["answered_ns"] - raw["due_ns"])[raw["answered_ns"] >= 0] / 1e6
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 3.2))
    bounds_ms = np.geomspace(latency_ms.min(), latency_ms.max() * 1.001, 50).tolist()
    axes.hist(latency_ms, bins=bounds_ms, color=SKY, edgecolor="white", lw=0.4)
    top = axes.get_ylim()[1]
    for percentile, colour in PERCENTILE_COLOUR.items():
        value = getattr(load.latency, percentile)
        axes.axvline(value, color=colour, lw=1.5)
        axes.annotate(
            f" {percentile.removesuffix('_ms')} {value:.1f}",
            (value, top),
            va="top",
            color=colour,
            fontsize=9,
            fontweight="bold",
        )
        top *= 0.9
    rate = f"{load.offered_rate:.0f} requests/s, {load.latency.count:,} requests"
    axes.set(
        title=f"Latency {'at half of the peak' if load.name == HALF else 'of ' + load.name} ({rate})",
        xlabel="ms from the due instant",
        ylabel="requests",
        xscale="log",
    )
    axes.set_xlim(right=latency_ms.max() * 1.4)  # room for the last label
    _label_log_axis(axes, "x")
    return figure


def draw_bursts(run: Run, folder: Path) -> Figure | None:
    """Draw rate and latency over time in a load with bursts, to show how high latency rises and how fast it recovers."""
    load = next((load for load in reversed(run.open) if "in a burst" in load.by_class), None)
    if load is None:
        return None
    with _open_raw(folder, load) as raw:
        ok = raw["answered_ns"] >= 0
        due_s, burst = raw["due_ns"] / 1e9, raw["in a burst"]
        latency_ms = (raw["answered_ns"] - raw["due_ns"]) / 1e6
    figure, (rate, latency) = plt.subplots(2, 1, figsize=(WIDTH_IN, 4.2), sharex=True, height_ratios=(1, 2))
    rate.hist(due_s, bins=np.arange(0, load.duration_s + 0.1, 0.1), weights=np.full(len(due_s), 10.0), color=GREY)
    rate.set(title="Bursts of ten times the rate", ylabel="due/s")
    for mask, colour, label in ((~burst, BLUE, "due between bursts"), (burst, RED, "due in a burst")):
        latency.plot(due_s[ok & mask], latency_ms[ok & mask], ".", ms=3, color=colour, label=label)
    for at_s in due_s[~ok]:
        latency.axvline(at_s, color=RED, alpha=0.3, lw=0.5)
    latency.set(xlabel="s", ylabel="latency, ms", yscale="log")
    latency.legend(fontsize=8, loc="upper left")
    _label_log_axis(latency)
    return figure


def draw_batch_sizes(run: Run, folder: Path) -> Figure | None:
    """Draw the share of calls by batch size: a row for each of the last three levels, and a column for each model."""
    curve = [level for level in next(iter(_select_curves(run).values()), []) if level.value > 1 and level.computing_models][-3:]
    if not curve:
        return None
    models = _list_models(curve)
    figure, grid = plt.subplots(
        len(curve), len(models), figsize=(WIDTH_IN, 1.3 * len(curve) + 0.9), sharex=True, sharey=True, squeeze=False
    )
    for row, level in zip(grid, curve, strict=True):
        for axes, model in zip(row, models, strict=True):
            times = level.computing_models.get(model)
            if times is None:
                continue
            sizes, calls = np.array(list(times.calls_by_batch.items())).T
            axes.bar(sizes, 100 * calls / calls.sum(), color=MODEL_COLOUR[model], width=0.9)
            axes.annotate(f"mean {times.mean_batch:.1f}", (0.97, 0.88), xycoords="axes fraction", ha="right", fontsize=8)
        row[0].set_ylabel(f"{_label_level(level)}\n% of calls")
    for axes, model in zip(grid[0], models, strict=True):
        axes.set_title(model)
    for axes in grid[-1]:
        axes.set_xlabel("batch size")
        axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(integer=True, nbins=5))
    return figure


def draw_memory(run: Run, folder: Path) -> Figure | None:
    """Draw the memory of each process at the peak: with shared pages in full (RSS), and divided among the processes (PSS)."""
    if not run.memory:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH_IN, 0.36 * len(run.memory) + 1.2))
    rows = np.arange(len(run.memory))
    pss = [process.pss_mib for process in run.memory]
    axes.barh(
        rows, [process.rss_mib for process in run.memory], color="#D9D9D9", height=0.62, label="resident, shared pages in full"
    )
    axes.barh(rows, pss, color=BLUE, height=0.62, label="its part: shared pages once")
    for row, value in zip(rows, pss, strict=True):
        axes.annotate(f"{value:.0f}", (value, row), textcoords="offset points", xytext=(4, -3), fontsize=8)
    axes.set(title=f"Memory at the peak: {sum(pss):,.0f} MiB together", xlabel="MiB", yticks=rows)
    axes.set_yticklabels([process.name for process in run.memory])
    axes.grid(axis="y", visible=False)
    axes.invert_yaxis()
    axes.legend(fontsize=8)
    return figure


PICTURES: dict[str, Callable[[Run, Path], Figure | None]] = {  # by the name of the file
    "latency_throughput": draw_latency_throughput,
    "stage_breakdown": draw_stage_breakdown,
    "histogram": draw_histogram,
    "bursts": draw_bursts,
    "batch_sizes": draw_batch_sizes,
    "memory": draw_memory,
}


def _open_raw(folder: Path, load: Open) -> np.lib.npyio.NpzFile:
    try:
        return np.load(folder / load.raw)
    except (OSError, EOFError, ValueError, BadZipFile) as error:  # missing, empty, or cut off
        raise ConfigError(
            f"{folder / load.raw} cannot be read: {error}. Expected the raw requests of {load.name!r} beside "
            "run.json. Copy the whole folder of the run."
        ) from error


def _select_curves(run: Run) -> dict[str, list[Closed]]:
    """Return the levels of `recommend` by transport: those of numbers of clients, or of request rates if there are none."""
    for mode in ("concurrency", "request_rate"):
        if curves := {name: curve for name in TRANSPORT_COLOUR if (curve := run.select_curve(ENSEMBLE, name, mode))}:
            return curves
    return {}


def _list_models(curve: list[Closed]) -> list[str]:
    """Return the models that computed: the stages, or the fused `recommend`."""
    return [model for model in MODELS if any(model in level.computing_models for level in curve)]


def _sum_stage_ms(level: Closed, model: str, phases: tuple[str, ...]) -> float:
    times = level.computing_models.get(model)
    return sum(getattr(times, f"{phase}_us") for phase in phases) / 1e3 if times else 0.0


def _label_level(level: Closed) -> str:
    if level.mode == "request_rate":
        return f"{level.value:g} /s"
    return f"{level.value:g} client{'s' if level.value > 1 else ''}"


def _label_log_axis(axes: Axes, axis_name: str = "y") -> None:
    """Label a log axis with 1, 2, 5, 10 instead of powers."""
    axis = axes.yaxis if axis_name == "y" else axes.xaxis
    axis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())
