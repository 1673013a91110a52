"""Write report.html (self-contained) and its PNGs, from run.json and the raw requests beside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import jinja2
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from perf.report import plots, tables
from perf.report.notes import write_notes
from perf.report.results import Run, summarise
from perf.slo import Verdict

TEMPLATE = Path(__file__).with_name("page.html.j2")
REPORT_FILE = "report.html"


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
    return [{"value": form.format(document[key]), "what": label} for key, form, label in figures if key in document]


def _save_picture(name: str, figure: Figure, folder: Path) -> dict[str, str]:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    (folder / f"{name}.png").write_bytes(buffer.getvalue())
    return {"name": name.replace("_", " "), "base64": base64.b64encode(buffer.getvalue()).decode()}


def _render(**values: object) -> str:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(TEMPLATE.read_text()).render(**values)
