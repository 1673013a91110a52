"""python -m trials report | compare | guard: what users did with what they were shown, from exposure log and live log."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from live.exposures import read_exposures
from serving.contract.artifacts import read_stage, stage_folder
from serving.contract.errors import RecommenderError
from serving.contract.generations import pinned_generation
from serving.contract.tensors import STAGES
from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM
from serving.live.store import live_folder
from trials.feedback import Feedback, join_feedback, summarise
from trials.guard import guard_once, read_events
from trials.off_policy import TrialError
from trials.sequential import compare_arms, has_wrong_split

METRICS = ("ctr", "conversion", "revenue", "degraded")

app = typer.Typer(help="Reports on generations from what users did.", no_args_is_help=True, add_completion=False)

Repo = Annotated[Path, typer.Option(help="model repository")]
AsJson = Annotated[bool, typer.Option("--json", help="one line of JSON, for machines")]


@app.command()
def report(repo: Repo = Path("model_repository"), as_json: AsJson = False) -> None:
    """Show click rate, conversion rate and revenue per answer, by generation."""
    feedback = read_feedback(repo)
    summaries = {
        int(generation): asdict(summarise(feedback.take(feedback.generations == generation)))
        for generation in np.unique(feedback.generations)
    }
    if as_json:
        typer.echo(json.dumps(summaries))
        return
    table = Table("generation", "answers", "clicked", "converted", "revenue an answer", "degraded", "items shown")
    for generation, summary in summaries.items():
        shares = (f"{summary[name]:.2%}" for name in ("click_rate", "conversion_rate"))
        rest = (f"{summary['revenue']:.4g}", f"{summary['degraded']:.2%}", f"{summary['coverage']:,}")
        table.add_row(str(generation), f"{summary['answers']:,}", *shares, *rest)
    Console().print(table)


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(help="name of the experiment")],
    share: Annotated[float, typer.Option(help="share of users that the challenger should have", min=0, max=1)] = 0.5,
    repo: Repo = Path("model_repository"),
    as_json: AsJson = False,
) -> None:
    """Compare the two arms of an experiment. The intervals hold at every look, so look whenever you like."""
    feedback = read_feedback(repo)
    feedback = feedback.take(feedback.experiments == experiment)
    counts = tuple(int((feedback.arms == arm).sum()) for arm in (CHAMPION_ARM, CHALLENGER_ARM))
    if not min(counts):
        raise TrialError(
            f"Experiment {experiment!r} has {counts[0]} and {counts[1]} answers of its two arms; expected some of both."
        )
    comparisons = {
        metric: compare_arms(feedback.arm_sums(metric, CHAMPION_ARM), feedback.arm_sums(metric, CHALLENGER_ARM))
        for metric in METRICS
    }
    wrong_split = has_wrong_split((counts[0], counts[1]), (1 - share, share))
    if as_json:
        found = {metric: asdict(comparison) | {"verdict": comparison.verdict} for metric, comparison in comparisons.items()}
        typer.echo(json.dumps({"answers": counts, "wrong_split": wrong_split, "metrics": found}))
        return
    table = Table("metric", "challenger - champion", "interval", "verdict")
    for metric, comparison in comparisons.items():
        table.add_row(
            metric, f"{comparison.difference:+.4g}", f"{comparison.low:+.4g} … {comparison.high:+.4g}", comparison.verdict
        )
    Console().print(table)
    if wrong_split:
        typer.echo(f"The arms have {counts[0]:,} and {counts[1]:,} answers, which a share of {share:g} does not explain.")


@app.command()
def guard(
    repo: Repo = Path("model_repository"),
    every: Annotated[float, typer.Option(help="seconds between two looks", min=1)] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="look once")] = False,
) -> None:
    """Watch the running experiment, and roll it back when its challenger does harm (docs/trials.md)."""
    while True:
        if reason := guard_once(repo):
            typer.echo(f"rolled back, because {reason}")
        if once:
            return
        time.sleep(every)


def read_feedback(repo: Path) -> Feedback:
    """Return the joined logs of a repository's shop. Raises TrialError when no answer was logged."""
    info = read_stage(stage_folder(repo, STAGES[0], pinned_generation(repo)))
    folder = live_folder(repo, info.live_folder)
    exposures = read_exposures(folder)
    if not len(exposures):
        raise TrialError(
            f"No answer is logged in {folder}. Set exposure_share in the gateway's settings (docs/gateway.md) and serve some."
        )
    return join_feedback(exposures, read_events(folder))


def main() -> None:
    try:
        app()
    except RecommenderError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
