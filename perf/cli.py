"""The commands of `python -m perf`; docs/perf.md describes each."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from perf import ab as ab_mode
from perf import models, slo
from perf import sweep as sweep_mode
from perf.bench import SEED, new_bench, record_memory_and_hits
from perf.command import BROKEN, parse_counts, parse_numbers, progress, refuse_options_before, run
from perf.figures import RESULTS as FIGURES
from perf.figures import ResultsFolder, finish
from perf.live.cli import app as live_app
from perf.load import schedule
from perf.load.analyzer import require_transport
from perf.load.open_loop import PARTS
from perf.report import tables
from perf.report.notes import write_notes
from perf.report.results import RESULTS, Run, find_latest_run, load_run, make_folder, read_machine, summarise, to_json_line
from perf.target import serve
from serving.contract.errors import ConfigError, DataError
from serving.contract.tensors import ENSEMBLE, STAGES

app = typer.Typer(
    help="How fast a repository is served, and where the time goes.", add_completion=False, pretty_exceptions_enable=False
)

app.add_typer(live_app, name="live")

Url = Annotated[str, typer.Option(help="gRPC host:port; without a server there, one is started for the measurement")]
Repo = Annotated[Path, typer.Option(help="the model repository it serves")]
Label = Annotated[str, typer.Option(help="a name for the run")]
WindowS = Annotated[float, typer.Option(help="seconds of a measurement window; perf_analyzer takes three per level", min=0.1)]
SloFile = Annotated[Path, typer.Option("--slo", help="bounds to keep")]
RunFolder = Annotated[Path | None, typer.Option("--run", help=f"folder of a run; default: the latest in {RESULTS}")]


@app.callback(invoke_without_command=True)
def main_run(
    context: typer.Context,
    url: Url = "localhost:8001",
    repo: Repo = Path("model_repository"),
    label: Label = "",
    window_s: WindowS = sweep_mode.WINDOW_S,
    rounds: Annotated[int, typer.Option(help="rounds that compare in-process with served", min=1)] = sweep_mode.ROUNDS,
    slo_file: SloFile = slo.SLO_FILE,
) -> None:
    """Measure everything, in about eight minutes. Exit code 1 when an SLO is broken or answers differ."""
    if context.invoked_subcommand:
        refuse_options_before(context)
        return
    bounds = slo.read_slo(slo_file)
    with serve(url, repo) as site:
        bench = new_bench(site, label)
        sweep_mode.measure_all(bench, window_s=window_s, rounds=rounds)
    finish_run(bench.run, bench.folder, bounds)


@app.command()
def sweep(
    url: Url = "localhost:8001",
    repo: Repo = Path("model_repository"),
    model: Annotated[str, typer.Option(help="recommend, or one stage")] = ENSEMBLE,
    transport: Annotated[str, typer.Option(help="grpc or http")] = "grpc",
    clients: Annotated[str, typer.Option(help="numbers of concurrent clients")] = "1,2,4,8,16,32,64",
    rates: Annotated[str, typer.Option(help="instead of clients: requests/s on average, as Poisson arrivals")] = "",
    label: Label = "",
    window_s: WindowS = 3.0,
) -> None:
    """Run perf_analyzer on one model: a level per number of clients, or per request rate."""
    mode, levels = ("request_rate", parse_numbers(rates)) if rates else ("concurrency", parse_counts(clients))
    require_transport(transport)
    with serve(url, repo) as site:
        bench = new_bench(site, label)
        require_model(model, bench.stages)
        with record_memory_and_hits(bench), progress(len(levels)) as step:
            for level in levels:
                step(f"{model}, {transport}, {level:g}")
                bench.add_closed(model, transport, mode, level, window_s)
    finish_run(bench.run, bench.folder, {})


@app.command()
def load(
    rate: Annotated[float, typer.Option(help="requests/s on average (between bursts, with --arrivals bursts)")],
    url: Url = "localhost:8001",
    repo: Repo = Path("model_repository"),
    duration_s: Annotated[float, typer.Option(help="seconds of load", max=600)] = 20.0,
    arrivals: Annotated[
        str, typer.Option(help="poisson, bursts, volleys, or a data set or file of times whose rhythm to follow")
    ] = "poisson",
    label: Label = "",
) -> None:
    """Send open-loop load: requests leave when they are due, and latency counts from then."""
    scenario = sweep_mode.Scenario(
        name=f"{arrivals} {rate:g}/s",
        due_s=choose_arrivals(arrivals, rate, duration_s),
        duration_s=duration_s,
        in_burst=schedule.is_in_burst if arrivals == "bursts" else None,
    )
    with serve(url, repo) as site:
        bench = new_bench(site, label)
        with record_memory_and_hits(bench), progress(PARTS) as step:
            sweep_mode.add_open(bench, scenario, lambda part: step(f"{scenario.name}, {(part - 1) / PARTS:.0%} sent"))
    finish_run(bench.run, bench.folder, {})


@app.command("report")
def report_command(run: RunFolder = None, slo_file: SloFile = slo.SLO_FILE) -> None:
    """Draw a run again: report.html and PNGs in its folder."""
    folder = run or find_latest_run()
    finish_run(load_run(folder), folder, slo.read_slo(slo_file), gate=False)


@app.command()
def ab(
    a: Annotated[str, typer.Argument(help="repository folder, or a commit")],
    b: Annotated[str, typer.Argument(help="repository folder, or a commit")],
    data: Annotated[str, typer.Option(help="data set that is exported with the code of a commit")] = "online-retail",
    rounds: Annotated[int, typer.Option(min=1)] = 5,
    clients: Annotated[int, typer.Option(help="concurrent clients while throughput is measured")] = 32,
    window_s: WindowS = 1.5,
) -> None:
    """Compare A with B in turns: the ratio of each metric with its spread. Exit code 1 when their answers differ."""
    folder = make_folder()
    with (
        ab_mode.repository(a, data) as repo_a,
        ab_mode.repository(b, data) as repo_b,
        progress(2 * rounds) as step,
    ):
        result = ab_mode.compare(repo_a, repo_b, folder, rounds, clients, window_s, step)
    (folder / "ab.json").write_text(result.model_dump_json(indent=1))
    make_console().print(tables.make_ratio_table(result.ratios).to_rich())
    make_console().print(
        "answers: " + (f"they differ: {result.answers}; the ratios do not count" if result.answers else "equal")
    )
    ratios = {ratio.metric: [round(x, 4) for x in (ratio.median, ratio.low, ratio.high)] for ratio in result.ratios}
    print(to_json_line({"perf": "ab", "a": a, "b": b, "answers_equal": not result.answers, "ratio_median_low_high": ratios}))
    if result.answers:
        raise typer.Exit(BROKEN)


@app.command("models")
def models_command(
    repo: Repo = Path("model_repository"),
    requests: Annotated[int, typer.Option(help="requests to send one at a time, then 16 at a time", min=10)] = models.REQUESTS,
    bounds_file: Annotated[Path, typer.Option("--bounds", help="largest medians to keep, by model")] = models.BOUNDS_FILE,
    results: ResultsFolder = FIGURES,
) -> None:
    """Measure what each model costs in a request, in process on one core. Exit code 1 when a bound is missed."""
    machine, bounds = read_machine(), models.read_bounds(bounds_file)
    data, sizes = models.describe_served(repo)
    figures = models.measure(repo, bounds, requests, models.ROUNDS, np.random.default_rng(SEED))
    conditions = f"{sizes}; processor time in process, {requests:,} recorded requests in {models.ROUNDS} rounds"
    command = f"python -m perf models --repo {repo} --requests {requests}"
    finish(f"models-{data}", f"What each model costs: {data}", command, conditions, figures, results, machine)


@app.command()
def gate(
    source: Annotated[str, typer.Argument(help="folder of a run, a file whose last line is its JSON, or - for stdin")] = "",
    slo_file: SloFile = slo.SLO_FILE,
) -> None:
    """Judge a finished run by the SLO: exit code 0 when kept, 1 when broken."""
    document = read_document(source)
    verdicts = slo.judge(slo.read_slo(slo_file), document)
    make_console().print(tables.make_verdict_table(verdicts).to_rich())
    print(to_json_line(document | summarise_verdicts(verdicts)))
    if not all(verdict.kept for verdict in verdicts):
        raise typer.Exit(BROKEN)


def finish_run(run: Run, folder: Path, bounds: dict[str, slo.Bound], gate: bool = True) -> None:
    """Write the report, print tables and verdict, and the JSON line, always last."""
    from perf.report.page import write_report  # imported late: its plotting library takes seconds

    document = summarise(run)
    verdicts = slo.judge(bounds, document)
    page = write_report(run, folder, verdicts)
    shown_tables = [
        tables.make_closed_table(run),
        tables.make_open_table(run),
        tables.make_stage_table(run),
        tables.make_verdict_table(verdicts),
    ]
    for table in shown_tables:
        if table.rows:
            make_console().print(table.to_rich())
    for note in write_notes(run):
        make_console().print(note)
    make_console().print(f"report: {page}")
    print(to_json_line(document | (summarise_verdicts(verdicts) if verdicts else {}) | {"run": str(folder)}))
    if gate and not all(verdict.kept for verdict in verdicts):
        raise typer.Exit(BROKEN)


def summarise_verdicts(verdicts: list[slo.Verdict]) -> dict[str, object]:
    broken = [verdict.key for verdict in verdicts if not verdict.kept]
    return {"slo": "broken" if broken else "kept", "broken": broken}


def read_document(source: str) -> dict:
    """Return the document of a run. source: its folder, "" = the latest run, "-" = stdin, or a file whose last line it is."""
    if source == "-":
        text = sys.stdin.read()
    elif Path(source).is_file():
        text = Path(source).read_text()
    else:
        return summarise(load_run(Path(source) if source else find_latest_run()))
    last_line = text.strip().rpartition("\n")[2]
    try:
        return dict(json.loads(last_line))
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"The last line of {source} is not the JSON of a run, but {last_line[:80]!r}. Pass what `python -m perf` or "
            "`python -m perf load` printed."
        ) from error


def require_model(model: str, stages: tuple[str, ...]) -> None:
    """Raise ConfigError when `model` cannot be profiled. stages: those that the server can run alone"""
    if model in (ENSEMBLE, *stages):
        return
    if model in STAGES:
        raise ConfigError(
            f"The fused layout has no model {model!r} of its own, only {ENSEMBLE!r}. Make the other one in seconds: "
            "python -m export relayout A B --layout ensemble."
        )
    raise ConfigError(f"There is no model {model!r}; these are: {', '.join((ENSEMBLE, *stages))}.")


def choose_arrivals(arrivals: str, rate: float, duration_s: float) -> Callable[[np.random.Generator], np.ndarray]:
    """Return a function that draws the due instants of a load, float64 [N] seconds from its start."""
    if arrivals == "poisson":
        return lambda rng: schedule.draw_poisson(rate, duration_s, rng)
    if arrivals == "volleys":
        return lambda rng: schedule.make_volleys(rate, duration_s)
    if arrivals == "bursts":
        return lambda rng: schedule.draw_bursts(rate, duration_s, rng)
    try:
        times_s = schedule.read_times(arrivals)
    except DataError as error:
        raise ConfigError(
            f"--arrivals is {arrivals}; expected poisson, bursts, volleys, a file of times or a log. {error}"
        ) from error
    return lambda rng: schedule.draw_recorded(times_s, rate, duration_s, rng)


def make_console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 120, soft_wrap=False)


def main() -> None:
    run(app, "python -m perf")
