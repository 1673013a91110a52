"""From a shop's log to a repository: `python -m export build | check | evaluate | relayout | pin | …`."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from repository.rounds import record_round
from serving.contract.errors import ConfigError, RecommenderError, run_program
from serving.live.store import find_live_folder

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning idle threads of torch slow a shared machine down

app = typer.Typer(help=__doc__, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
console = Console(soft_wrap=True)

Data = Annotated[str, typer.Option(help="folder with a dataset.toml, bundled name, or synthetic:NAME")]
Repo = Annotated[Path, typer.Option(help="the model repository")]
Config = Annotated[Path | None, typer.Option(help="settings file (docs/settings.md lists every key)")]
Layout = Annotated[str, typer.Option(help="ensemble: a model per stage; fused: one model that runs the four stages")]

Keep = Annotated[
    int,
    typer.Option(
        help="how many of the newest generations to keep; the previous one and those that servers use stay too", min=1
    ),
]

Triton = Annotated[str, typer.Option(help="Triton of the merlin profile: 24.03 (the last with HPS) or modern")]


@app.command()
def build(
    data: Data = "online-retail",
    profile: str = "cpu",
    layout: Layout = "ensemble",
    triton: Triton = "",
    repo: Repo = Path("model_repository"),
    config: Config = None,
    keep: Keep = 1,
    verbose: Annotated[bool, typer.Option("--verbose", help="also print training progress")] = False,
) -> None:
    """Train on a data set and publish a new generation into a repository."""
    from export.profiles import load_profile
    from export.settings import read_settings, with_triton
    from training.dataset import load_dataset

    refuse_unknown(layout)
    if layout not in (layouts := load_profile(profile).layouts):
        raise ConfigError(f"The {profile} profile has no {layout} layout. Available: {', '.join(layouts)}. Leave LAYOUT out.")
    settings, dataset = with_triton(read_settings(config), triton), load_dataset(data)
    from export.build import build_repository  # imported late, because training imports take seconds
    from export.continuous.continued import continue_log
    from export.steps.learning import measure_erasures
    from repository.publish import make_read_only
    from repository.registry import record_publication

    live = find_live_folder(repo, settings.live.folder)
    erasures = measure_erasures(live)
    if settings.live.continue_log:
        dataset = continue_log(dataset, live)
    generation = build_repository(dataset, repo, settings, console, layout, profile, verbose, keep=keep)
    if not load_profile(profile).stays_writable:
        make_read_only(repo, generation)
    record_publication(repo, generation, f"exported from {data}")
    if settings.live.continue_log and measure_erasures(live) != erasures:
        console.print(
            f"[yellow]warning[/]: a user was erased during this export, so generation {generation} may have learned from that "
            "user's events. Export again."
        )


@app.command()
def follow(
    data: Data = "online-retail",
    repo: Repo = Path("model_repository"),
    config: Config = None,
    events: Annotated[int, typer.Option(help="train once this many are newer than the serving generation", min=1)] = 1_000,
    minutes: Annotated[float, typer.Option(help="pause between two rounds", min=0.1)] = 60.0,
    share: Annotated[float, typer.Option(help="share of users in an experiment; 1: no experiment", min=0.001, max=1)] = 1.0,
    days: Annotated[float, typer.Option(help="with --share: longest time until it is decided", min=0.1, max=14)] = 7.0,
    keep: Keep = 1,
    once: Annotated[bool, typer.Option("--once", help="run one round and end, for a timer")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="also print training progress")] = False,
) -> None:
    """Train a generation whenever enough events are new. Publish it if it predicts the newest ones as well as the serving one.

    Without --config it is trained with the settings of the serving generation.
    """
    from export.settings import read_settings
    from training.dataset import load_dataset

    settings = read_settings(config) if config else None
    from export.continuous.follow import Terms, follow_once  # imported late, because training imports take seconds

    terms = Terms(share, days, keep)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # a round that is stopped was not killed
    while True:
        try:
            progress = console if verbose else Console(quiet=True)
            finished = follow_once(load_dataset(data), repo, settings, events, progress, terms)
            console.print(escape(finished.report))
            record_round(repo, finished.outcome, finished.report)
        except Exception as error:  # such as a full disk or a lack of memory, which may be over by the next round
            is_expected = isinstance(error, (RecommenderError, OSError))
            reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            record_failed_round(repo, reason)
            if once:
                raise
            if not is_expected:
                traceback.print_exc()
            console.print(f"[red]error[/]: {escape(reason)}")
        if once:
            return
        time.sleep(60 * minutes)


def record_failed_round(repo: Path, reason: str) -> None:
    """Record a failed round for metrics, or print why that is not possible. Without a repository there is no place for it."""
    try:
        if repo.is_dir():
            record_round(repo, "failed", reason)
    except OSError as error:
        console.print(f"[red]error[/]: the failed round is not recorded: {escape(str(error))}")


@app.command()
def relayout(
    source: Annotated[Path, typer.Argument(help="repository to read")],
    repo: Annotated[Path, typer.Argument(help="another repository, into which the pinned generation is published")],
    layout: Layout = "fused",
) -> None:
    """Publish a repository's models again, without training: in another layout, with the code as it is now."""
    from export.relayout import relayout as lay_out_again
    from repository.registry import record_publication

    refuse_unknown(layout)
    generation = lay_out_again(source, repo, layout)
    record_publication(repo, generation, f"laid out again from {source}")
    console.print(f"generation {generation} published in {repo}, {layout} layout")


def refuse_unknown(layout: str) -> None:
    from repository.triton.config import LAYOUTS

    if layout not in LAYOUTS:
        raise ConfigError(f"There is no layout {layout!r}. Available: {', '.join(LAYOUTS)}.")


@app.command()
def check(repo: Repo = Path("model_repository")) -> None:
    """Report what will fail in a repository, and how to fix it. Exit code 1 when there is an error."""
    from export.check import check_repository, list_checked_by_format
    from repository.checks.finding import count_errors

    findings = check_repository(repo)
    for finding in findings:
        colour = "red" if finding.level == "error" else "yellow"
        console.print(f"[{colour}]{finding.level}[/] {escape(finding.where)}: {escape(finding.fact)}. {escape(finding.remedy)}")
    errors = count_errors(findings)
    for fact in list_checked_by_format(repo):
        console.print(f"[dim]checked by format only[/]: {fact}")
    warnings = len(findings) - errors
    console.print(f"{repo}: {errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}.")
    if errors:
        raise typer.Exit(1)


@app.command()
def evaluate(
    data: Data = "online-retail",
    work: Annotated[Path, typer.Option(help="where to export to")] = Path(".run/eval"),
    config: Config = None,
) -> None:
    """Measure Recall@20, NDCG@10, coverage and AUC, stage by stage and through a real server, beside four baselines."""
    from export.settings import read_settings
    from training.dataset import load_dataset

    settings, dataset = read_settings(config), load_dataset(data)
    from export.evaluate import evaluate_dataset  # imported late, because training imports take seconds

    evaluate_dataset(dataset, work / dataset.description.name, settings, console)


@app.command()
def hugectr_data(
    out: Annotated[Path, typer.Option(help="where to write")],
    data: Data = "online-retail",
    config: Config = None,
) -> None:
    """Write the ranker's training requests for HugeCTR (export/nvidia/hugectr/container/train_dlrm.py trains on them)."""
    from export.settings import read_settings
    from training.dataset import load_dataset

    settings, dataset = read_settings(config), load_dataset(data)
    from export.steps.hugectr_data import write_hugectr_data  # imported late, because training imports take seconds

    write_hugectr_data(dataset, out, settings, console)


@app.command()
def pin(generation: int, repo: Repo = Path("model_repository")) -> None:
    """Pin a generation: servers that start serve it. A running server moves by `python -m server activate`."""
    from repository import generations
    from repository.registry import record_act

    generations.pin(repo, generation)
    record_act(repo, "pinned", generation)
    console.print(f"{repo}: generation {generation} is pinned.")


@app.command()
def settings_doc() -> None:
    """Write docs/settings.md anew, from the settings classes."""
    from export.settings_doc import DOCUMENT, compose_settings_doc

    DOCUMENT.write_text(compose_settings_doc())
    console.print(f"wrote {DOCUMENT}")


if __name__ == "__main__":
    run_program(app)
