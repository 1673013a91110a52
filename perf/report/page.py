"""Write report.html (self-contained) and its PNGs, from run.json and the raw requests beside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jinja2
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from perf.report import plots, tables
from perf.report.results import Run, summarise
from perf.slo import Verdict

TEMPLATE = Path(__file__).with_name("page.html.j2")
REPORT_FILE = "report.html"
NOISY_LOAD = 0.5  # per core: above it the machine was busy with something else when the run began


def write_report(run: Run, folder: Path, verdicts: list[Verdict]) -> Path:
    """Write the page and its pictures as PNG. Return the page."""
    pictures = []
    with plt.rc_context(plots.STYLE):
        for name, draw in plots.PICTURES.items():
            if figure := draw(run, folder):
                pictures.append(_save_picture(name, figure, folder))
    first = [tables.make_verdict_table(verdicts)] if verdicts else []
    rest = [
        tables.make_open_table(run),
        tables.make_closed_table(run),
        tables.make_stage_table(run),
        tables.make_hit_rate_table(run),
    ]
    page = _render(
        title=run.label or "recommend, measured",
        facts=describe_run(run),
        tiles=make_tiles(run),
        notes=write_notes(run),
        tables_first=first,
        pictures=pictures,
        tables=[table for table in rest if table.rows],
    )
    path = folder / REPORT_FILE
    path.write_text(page)
    return path


def describe_run(run: Run) -> str:
    machine = run.machine
    return (
        f"{run.started} · {run.repo}, generation {run.generation} · commit {run.commit or 'unknown'} · "
        f"config {run.config_hash} · {machine.cpu}, {machine.cores} cores"
    )


def make_tiles(run: Run) -> list[dict[str, str]]:
    document = summarise(run)
    figures = (
        ("peak_rate", "{:,.0f}/s", "peak, closed loop"),
        ("p50_ms", "{:.1f} ms", "p50 at half of the peak"),
        ("p99_ms", "{:.1f} ms", "p99 at half of the peak"),
        ("overhead_p50_ms", "{:.2f} ms", "served minus in-process, p50"),
        ("throughput_share", "{:.0%}", "of in-process throughput"),
        ("memory_mib", "{:,.0f} MiB", "all server processes"),
    )
    return [{"value": form.format(document[key]), "what": what} for key, form, what in figures if key in document]


def write_notes(run: Run) -> list[str]:
    """Return sentences that a reader needs to trust the figures, or not."""
    notes = []
    if run.machine.load_before > NOISY_LOAD * run.machine.cores:
        notes.append(
            f"The machine was busy when this run began (load average {run.machine.load_before:.1f} on {run.machine.cores} "
            "cores): trust ratios, not times."
        )
    if run.floor_p50_ms is not None:
        notes.append(
            f"A gRPC call that does nothing took {run.floor_p50_ms:.2f} ms (p50, one client): no answer can be faster."
        )
    if run.differing_answers:
        notes.append(
            f"The server does not answer as in process ({run.differing_answers}): the ratios between them do not "
            "count. A cache of answers may explain it; otherwise export again."
        )
    elif run.compared_under_load:
        notes.append(f"{run.compared_under_load:,} answers under load were compared: each is the one computed in process.")
    elif not run.comparable:
        notes.append("No answer was compared with one computed in process, because rows are updated while they are served.")
    if run.priority_levels < 2 and any("bulk" in load.by_class for load in run.open):
        notes.append("No model has priorities (`priority_levels`): interactive and bulk requests were served alike.")
    return notes


def _save_picture(name: str, figure: Figure, folder: Path) -> dict[str, str]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    (folder / f"{name}.png").write_bytes(buffer.getvalue())
    return {"name": name.replace("_", " "), "base64": base64.b64encode(buffer.getvalue()).decode()}


def _render(**values: object) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text()).render(**values)
