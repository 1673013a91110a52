"""python -m trials report | compare | off-policy | progress | calibration | guard: what users did with what they saw."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from math import isfinite
from pathlib import Path
from typing import Annotated, get_args

import numpy as np
import pyarrow as pa
import typer
from rich.table import Column, Table

from live.exposures import FOLDER, list_exposure_files
from live.maintenance import MOST_DAYS
from live.printing import make_printable
from repository.experiments import end_experiment, find_experiment_folder
from repository.printing import print_table
from serving.contract.artifacts import find_stage_folder, read_stage
from serving.contract.errors import RecommenderError, run_program
from serving.contract.generations import read_pinned_generation
from serving.contract.logs import print_json_line
from serving.contract.tensors import STAGES
from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM, DAY_MS, read_experiment
from serving.live.store import find_live_folder
from trials.calibration import measure_calibration
from trials.feedback import Feedback, number_users, read_events
from trials.guard import PATIENCE_S, Guard
from trials.off_policy import Estimate, SlateKind, TrialError
from trials.progress import describe_progress, find_start_ms
from trials.report import AnswerSummary, By, Summary, summarise
from trials.sequential import Arm, Comparison, compare_arms
from trials.shown import read_shown, read_users
from trials.split import Split, find_kept, measure_split
from trials.unseen import MOST_JUDGED, Reward, pair_answers, read_judged_answers, read_lists, read_shadow_lists

LOGGER = "trials.guard"
MOST_FAILED_LOOKS = 30
LEAST_PAUSE, LONGEST_PAUSE_S = 20, 60.0  # times as long as a look took, but no longer than this
METRICS = ("ctr", "conversion", "value", "degraded")

app = typer.Typer(help="Reports on generations from what users did.", no_args_is_help=True, add_completion=False)

Repo = Annotated[Path, typer.Option(help="model repository")]
AsJson = Annotated[bool, typer.Option("--json", help="one line of JSON, for machines")]


@app.command()
def report(
    experiment: Annotated[str, typer.Argument(help="only its answers; without, all that are logged")] = "",
    by: Annotated[By, typer.Option(help="what to group by; position, category and source count shown items")] = "generation",
    generation: Annotated[int | None, typer.Option(help="only its answers, without interleaved ones", min=1)] = None,
    days: Annotated[float | None, typer.Option(help="only answers of the last so many days", min=0, max=MOST_DAYS)] = None,
    repo: Repo = Path("model_repository"),
    as_json: AsJson = False,
) -> None:
    """Show click rate, conversions and their value per answer, or per shown item. Answers of shadows are left out.

    Of an experiment, only the answers since the last change of its share are counted. Of an A/B test, a line says whether its
    arms have the share of the users that they should.
    """
    since_ms = 0 if days is None else time.time_ns() // 1_000_000 - int(days * DAY_MS)
    folder = find_log(repo)
    parts = read_shown(folder, experiment, since_ms, generation)
    summaries = summarise((feedback.take(find_kept(answers)) for answers, feedback in parts), by, repo)
    if experiment and (split := find_split(folder, experiment)):
        typer.echo(f"{experiment}: {split.text}.", err=as_json)
    if as_json:
        typer.echo(json.dumps({group: asdict(summary) for group, summary in summaries.items()}))
        return
    counted, rest = ("answer", ("degraded", "different items")) if by in ("generation", "arm") else ("item", ())
    group_column = Column(by, no_wrap=by not in ("arm", "category"))  # names of these may be long
    table = Table(group_column, f"{counted}s", "clicked", "converted", f"value an {counted}", *rest)
    for group, summary in summaries.items():
        table.add_row(make_printable(group), *format_cells(summary))
    print_table(table)


def find_split(folder: Path, experiment: str) -> Split | None:
    """Return the split of an A/B test: since its last change, or as a whole once it is over. None for other experiments."""
    latest = read_experiment(folder)
    if latest is None or latest.name != experiment:
        return measure_split(read_users(folder, experiment, 0))
    if latest.mode != "ab":
        return None
    return measure_split(read_users(folder, experiment, find_start_ms(latest)), latest.share if latest.runs else None)


def format_cells(summary: Summary) -> list[str]:
    shares = ((summary.clicked, summary.click_rate), (summary.converted, summary.conversion_rate))
    cells = [f"{summary.count:,}", *(f"{count:,} ({rate:.2%})" for count, rate in shares), f"{summary.value:.4g}"]
    if isinstance(summary, AnswerSummary):
        cells += [f"{summary.degraded:.2%}", f"{summary.coverage:,}"]
    return cells


@app.command()
def compare(
    experiment: Annotated[str, typer.Argument(help="name of the experiment")],
    repo: Repo = Path("model_repository"),
    as_json: AsJson = False,
) -> None:
    """Compare the two arms of an experiment. The intervals hold at every look, so look whenever you like.

    Only the answers since its start or the last change of its share are compared, as by the guard.
    """
    if not experiment:  # would be the answers of no experiment
        raise TrialError("The experiment's name is empty; expected the name of one, which `python -m trials progress` prints.")
    champion, challenger, split = sum_arms(read_shown(find_log(repo), experiment))
    counts = [arm["ctr"].count for arm in (champion, challenger)]
    if not min(counts):
        raise TrialError(
            f"Experiment {experiment!r} has {counts[0]} answers of the champion and {counts[1]} of the challenger; expected "
            "some of both. Wait for more; only A/B tests have these arms, python -m trials progress shows any experiment."
        )
    comparisons = {metric: compare_arms(champion[metric], challenger[metric]) for metric in METRICS}
    users, wrong_split = (split.champions, split.challengers), split.is_wrong
    if as_json:
        descriptions = {metric: describe_comparison(comparison) for metric, comparison in comparisons.items()}
        typer.echo(json.dumps({"answers": counts, "users": users, "wrong_split": wrong_split, "metrics": descriptions}))
        return
    table = Table("metric", "challenger - champion", "interval", "verdict")
    for metric, comparison in comparisons.items():
        cells = [f"{comparison.difference:+.4g}", f"{comparison.low:+.4g} … {comparison.high:+.4g}"]
        table.add_row(metric, *(cells if isfinite(comparison.low) else ("not known yet", "")), comparison.verdict)
    print_table(table)
    if wrong_split:
        typer.echo(f"{experiment}: {split.text}.")


def describe_comparison(comparison: Comparison) -> dict[str, float | str | None]:
    """Return a comparison for JSON, with None for what is not known yet."""
    numbers = {name: value if isfinite(value) else None for name, value in asdict(comparison).items()}
    return numbers | {"verdict": comparison.verdict}


def sum_arms(parts: Iterator[tuple[pa.Table, Feedback]]) -> tuple[dict[str, Arm], dict[str, Arm], Split]:
    """Return the sums of champion and challenger by metric, and their users, with the share NaN if no challenger answered.

    Of each answer, only its arm, its user and its rewards stay in memory.
    """
    share, arms, user_ids, kept_parts = float("nan"), [], [], []
    rewards: dict[str, list[np.ndarray]] = {metric: [] for metric in METRICS}
    for answers, feedback in parts:
        if (challengers := feedback.arms == CHALLENGER_ARM).any():
            share = float(feedback.assignments[challengers][0])
        arms.append(np.select([feedback.arms == CHAMPION_ARM, challengers], [0, 1], -1).astype(np.int8))
        user_ids.append(answers["user_id"].combine_chunks())
        kept_parts.append(find_kept(answers))
        for metric in METRICS:
            rewards[metric].append(feedback.compute_rewards(metric))
    arm_numbers, users, is_kept = np.concatenate(arms), number_users(pa.chunked_array(user_ids)), np.concatenate(kept_parts)
    joined = {metric: np.concatenate(values) for metric, values in rewards.items()}
    champion, challenger = (
        {metric: Arm.of(values[chosen], users[chosen]) for metric, values in joined.items()}
        for chosen in ((arm_numbers == arm) & is_kept for arm in (0, 1))
    )
    erased = (np.count_nonzero((arm_numbers == 0) & ~is_kept), np.count_nonzero((arm_numbers == 1) & ~is_kept))
    return champion, challenger, Split(champion["ctr"].users, challenger["ctr"].users, share, erased)


@app.command()
def off_policy(
    generation: Annotated[int | None, typer.Option(help="generation to judge: by what it answered as a shadow")] = None,
    answers: Annotated[
        Path | None, typer.Option(help="file of answers to judge instead (docs/trials.md)", exists=True, dir_okay=False)
    ] = None,
    reward: Annotated[Reward, typer.Option(help="what an answer earns: the sum over its items")] = "clicks",
    places: Annotated[int | None, typer.Option(help="judge only this many places, from the top", min=1)] = None,
    repo: Repo = Path("model_repository"),
    as_json: AsJson = False,
) -> None:
    """Estimate what answers that nobody saw would have earned, as far as the log can tell (docs/trials.md)."""
    folder = find_log(repo)
    if answers is not None and generation is None:
        judged, from_ms, failed = read_lists(answers), 0, 0
    elif generation is not None and answers is None:
        judged, from_ms, failed = read_shadow_lists(folder, generation)
    else:
        raise TrialError("What to judge is not clear; expected --generation or --answers, one of them.")
    exposures = read_judged_answers(folder, judged, from_ms)
    paired = pair_answers(exposures, read_events(folder, from_ms), judged, reward, places)
    shown_estimate = paired.estimate_shown()
    estimates: dict[str, tuple[Estimate, Estimate]] = {}
    refusals: dict[str, str] = {}
    for kind in get_args(SlateKind):
        try:
            kind_estimates, supported = paired.estimate(kind)
            estimates |= {f"{kind} {estimator}": (estimate, supported) for estimator, estimate in kind_estimates.items()}
        except TrialError as error:
            refusals[kind] = str(error)
    if not estimates:
        raise TrialError("\n".join(f"{kind}: {refusal}" for kind, refusal in refusals.items()))
    if as_json:
        records = {name: asdict(estimate) | {"support": support.value} for name, (estimate, support) in estimates.items()}
        counts = {"judged": len(judged), "places": paired.places, "failed": failed, "fallbacks": paired.fallbacks}
        typer.echo(json.dumps({"shown": asdict(shown_estimate), "estimates": records, "refused": refusals} | counts))
        return
    table = Table(f"{reward} an answer, top {paired.places}", "value", "interval", "effective users", "support")
    for name, (estimate, support) in {"as shown": (shown_estimate, None), **estimates}.items():
        interval = f"{estimate.low:.4g} … {estimate.high:.4g}"
        share = f"{support.value:.1%}" if support else ""
        table.add_row(name, f"{estimate.value:.4g}", interval, f"{estimate.effective_samples:,.0f}", share)
    print_table(table)
    for kind, refusal in refusals.items():
        typer.echo(f"{kind}: {refusal}")
    if failed:
        typer.echo(f"{failed:,} of the {len(judged):,} judged lists are empty, because the shadow failed, and earn nothing.")
    if paired.fallbacks:
        typer.echo(f"{paired.fallbacks:,} shown answers are left out: the gateway's popular items, which no generation chose.")
    if from_ms and len(judged) == MOST_JUDGED:
        since = f"{datetime.fromtimestamp(from_ms / 1_000, UTC):%Y-%m-%d %H:%M:%S} UTC"
        typer.echo(f"Only the shadow's latest {MOST_JUDGED:,} answers are judged, since {since}.")


@app.command()
def progress(repo: Repo = Path("model_repository")) -> None:
    """Print how the latest experiment goes, as the JSON of the gateway's /v1/experiment (docs/trials.md)."""
    typer.echo(json.dumps(describe_progress(find_experiment_folder(repo))))


@app.command()
def calibration(repo: Repo = Path("model_repository")) -> None:
    """Print how the clicks of the latest window compare with what scores promise, as JSON (docs/trials.md).

    The first complete window of a generation becomes its reference.
    """
    measured, reason = measure_calibration(find_experiment_folder(repo), time.time_ns() // 1_000_000)
    typer.echo(json.dumps(asdict(measured) if measured else {"reason": reason}))


@app.command()
def guard(
    repo: Repo = Path("model_repository"),
    every: Annotated[float, typer.Option(help="seconds between two looks", min=1)] = 10.0,
    once: Annotated[bool, typer.Option("--once", help="look once")] = False,
    tag: Annotated[str, typer.Option(hidden=True, help="names the server that this guard ends with")] = "",
) -> None:
    """Watch the running experiment until it ends: roll back a harmful challenger, promote a better one if that was asked for.

    A server's supervisor runs this command by itself while an experiment runs. After 30 failed looks in a row it stops the
    experiment, because nobody protects the users any more. Looks that take long are rarer.
    """
    folder, judging, watched, failed = find_experiment_folder(repo), Guard(repo, 0.0 if once else PATIENCE_S), "", 0
    while (experiment := read_experiment(folder)) and experiment.runs:
        if experiment.name != watched:
            watched = experiment.name
            say(f"guards experiment {watched}: generation {experiment.challenger} beside {experiment.champion}")
        began_s = time.monotonic()
        try:
            ended, failed = judging.look(), 0
        except Exception as error:  # any: a guard that dies is started again, and would never count up to its last look
            failed += 1
            is_expected = isinstance(error, (RecommenderError, OSError))
            reason = str(error) if is_expected else f"{type(error).__name__}: {error}"
            fields = {} if is_expected else {"exception": traceback.format_exc()}
            print_json_line("ERROR", LOGGER, reason, **fields)
            stopped = failed == MOST_FAILED_LOOKS
            ended = end_experiment(repo, f"its guard fails: {reason}", judged=experiment) if stopped else None
        if ended:
            say(f"experiment {watched} is {ended.state}, because {ended.reason}")
        elif once:
            return
        else:
            time.sleep(max(every, min(LEAST_PAUSE * (time.monotonic() - began_s), LONGEST_PAUSE_S)))
    say(f"experiment {experiment.name} is {experiment.state}" if experiment else "no experiment was started")


def say(line: str) -> None:
    print_json_line("INFO", LOGGER, line)


def find_log(repo: Path) -> Path:
    """Return the folder of the live store, with the log of answers. Raises TrialError where none was ever logged."""
    info = read_stage(find_stage_folder(repo, STAGES[0], read_pinned_generation(repo)))
    folder = find_live_folder(repo, info.live_folder)
    if not list_exposure_files(folder / FOLDER):
        raise TrialError(
            f"No answer is logged in {folder}. Set exposure_share in the gateway's settings (docs/gateway.md) and serve some."
        )
    return folder


if __name__ == "__main__":
    run_program(app)
