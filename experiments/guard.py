"""Let the guard judge A/A experiments and challengers that break late, and measure how long it looks at a large experiment.

    python -m experiments.guard [--runs 200]

In an A/A experiment both arms are the same generation, so whatever the guard decides is a false alarm: latency, failures,
coverage, degraded answers, the split, fewer clicks or conversions, or a promotion. Users come again and stay in their arm; they
differ in how often they click. Answers and clicks are drawn, and judged by the guard's own code at LOOKS moments.

A challenger that breaks late gave as good answers as the champion before. Failures, slowness and degraded answers then begin at
once; each is drawn by itself.
"""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import typer

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from live.archive import write_table
from live.exposures import FLUSH_ROWS, FOLDER, SCHEMA
from perf.command import run
from serving.live.events import HEADER, EventBatch, Flags
from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM, Experiment
from trials.guard import judge
from trials.judged import JudgedAnswers

ANSWERS, USERS, ITEMS, LISTED = 10_000, 1_000, 500, 20
LOOKS = 30
CLICKED, DEGRADED = 0.1, 0.01  # shares of answers
CONVERTED = 0.2  # share of clicks that are positive
SMALL_SHARE, RARELY_CLICKED = 0.1, (0.01, 0.02)  # of experiments in which the challenger has few clicks or none
MANY = 2_000_000
BREAKS_AT, BROKEN_FOR, LOOK = 20_000, 4_000, 50  # answers of both arms: before a challenger breaks, after it, between two looks
MOST_ALARMS, MOST_MIB = 0.05, 700

EXPERIMENT = Experiment("same", 1, 2, 0.5, promotes=True)


def draw_answers(count: int, users: int, rng: np.random.Generator, share: float = EXPERIMENT.share) -> pa.Table:
    """Return answers of an A/A experiment, in the order of time, as the exposure log has them. share: of the challenger"""
    user_ids = rng.integers(users, size=count)
    challenged = (rng.random(users) < share)[user_ids]
    first = rng.integers(ITEMS, size=count)
    columns = {
        "request_id": [f"{number:032x}" for number in range(count)],
        "time_ms": np.arange(count),
        "user_id": user_ids,
        "generation": np.where(challenged, EXPERIMENT.challenger, EXPERIMENT.champion),
        "degraded": list_values(np.full(count, "ranker"), (rng.random(count) < DEGRADED).astype(np.int32)),
        "experiment": np.full(count, EXPERIMENT.name),
        "arm": np.where(challenged, CHALLENGER_ARM, CHAMPION_ARM),
        "item_ids": list_values(((first[:, None] + np.arange(LISTED)) % ITEMS).ravel(), np.full(count, LISTED, np.int32)),
        "latency_ms": rng.lognormal(2.0, 0.5, count).astype(np.float32),
        "assignment": np.where(challenged, share, 1 - share),
    }
    rest = {field.name: pa.nulls(count, field.type) for field in SCHEMA if field.name not in columns}
    return pa.table({field.name: (columns | rest)[field.name] for field in SCHEMA}, SCHEMA)


def list_values(values: np.ndarray, lengths: np.ndarray) -> pa.ListArray:
    """Return lists of the given lengths, int32 [N], of values in order."""
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, pa.array(values[: offsets[-1]]))


def draw_clicks(answers: pa.Table, users: int, rng: np.random.Generator, rate: float = CLICKED) -> EventBatch:
    """Return clicks on first items, some of them positive. A user's chance is drawn from a beta distribution of mean `rate`."""
    chances = rng.beta(1.0, 1 / rate - 1, users)
    clicked = np.flatnonzero(rng.random(len(answers)) < chances[answers["user_id"].to_numpy()])
    headers = np.zeros(len(clicked), HEADER)
    headers["item_id"] = answers["item_ids"].combine_chunks().values.to_numpy().reshape(-1, LISTED)[clicked, 0]
    headers["received_ms"], headers["weight"] = clicked, 1.0
    headers["flags"] = np.where(rng.random(len(clicked)) < CONVERTED, Flags.POSITIVE, 0)
    blanks = [b""] * len(clicked)
    return EventBatch(headers, blanks, [f"{number:032x}".encode() for number in clicked], blanks)


def judge_same(rng: np.random.Generator, share: float, rate: float) -> str:
    """Return why the guard ends one A/A experiment, "" where it lets it go on to the end. rate: share of answers clicked"""
    answers = draw_answers(ANSWERS, USERS, rng, share)
    clicks = draw_clicks(answers, USERS, rng, rate)
    for count in np.geomspace(ANSWERS / 100, ANSWERS, LOOKS).astype(int).tolist():
        state, reason = judge_until(replace(EXPERIMENT, share=share), answers, clicks, count)
        if state != "running":
            return f"{state}: {reason}"
    return ""


def judge_until(experiment: Experiment, answers: pa.Table, clicks: EventBatch, count: int) -> tuple[str, str]:
    """Return what the guard decides after the first `count` answers, and why."""
    known = np.arange(np.searchsorted(clicks.headers["received_ms"], count))
    return judge(experiment, answers.slice(0, count), [(known, clicks.take(known))])


def count_until_missed(rate: float, rng: np.random.Generator) -> int:
    """Return how many answers of a challenger that nobody clicks the guard lets pass. rate: of the champion's clicks"""
    answers = draw_answers(10 * ANSWERS, 10 * USERS, rng, SMALL_SHARE)
    is_own = pc.equal(answers["arm"], CHALLENGER_ARM).to_numpy()
    clicks = draw_clicks(answers, 10 * USERS, rng, rate)
    clicks = clicks.take(np.flatnonzero(~is_own[clicks.headers["received_ms"]]))
    for count in range(ANSWERS // 10, len(answers) + 1, 10 * LOOK):
        if judge_until(replace(EXPERIMENT, share=SMALL_SHARE), answers, clicks, count)[0] == "rolled back":
            return int(is_own[:count].sum())
    return int(is_own.sum())


def count_until_found(column: str, broken: pa.Array, rng: np.random.Generator) -> int:
    """Return how many answers of a challenger that breaks late the guard lets pass. broken: the column's value from then on"""
    answers = draw_answers(BREAKS_AT + BROKEN_FOR, USERS, rng)
    is_own = pc.equal(answers["arm"], CHALLENGER_ARM)
    is_broken = pc.and_(is_own, pc.greater_equal(answers["time_ms"], BREAKS_AT))
    broken = pa.concat_arrays([broken] * len(answers)).cast(answers.schema.field(column).type)
    changed = pc.if_else(is_broken.combine_chunks(), broken, answers[column].combine_chunks())
    answers = answers.set_column(answers.schema.get_field_index(column), column, changed)
    for count in range(BREAKS_AT, len(answers) + 1, LOOK):
        if judge(EXPERIMENT, answers.slice(0, count), ())[0] == "rolled back":
            return pc.sum(is_broken.slice(0, count)).as_py()
    return pc.sum(is_broken).as_py()


def measure_looks(count: int, rng: np.random.Generator) -> tuple[float, float, float]:
    """Return the seconds of a guard's first look at `count` logged answers and of the next one, and its memory in MiB."""
    answers = draw_answers(count, count // 10, rng)
    clicks = draw_clicks(answers, count // 10, rng)
    with tempfile.TemporaryDirectory() as store:
        Path(store, FOLDER).mkdir()
        for first in range(0, count, FLUSH_ROWS):
            write_table(Path(store, FOLDER, f"exposures-{first:013d}-1-{first}.parquet"), answers.slice(first, FLUSH_ROWS))
        with ProcessPoolExecutor(1, get_context("spawn")) as process:  # so that its memory is the guard's alone
            return process.submit(look_twice, Path(store), clicks).result()


def look_twice(store: Path, clicks: EventBatch) -> tuple[float, float, float]:
    """Do what `measure_looks` says in this process. store: folder of a live store with logged answers"""
    answers, seconds = JudgedAnswers(store), []
    before_mib = read_most_mib()
    for _ in range(2):
        began_s = time.perf_counter()
        judge(EXPERIMENT, answers.read(EXPERIMENT), [(np.arange(len(clicks.headers)), clicks)])
        seconds.append(time.perf_counter() - began_s)
    return seconds[0], seconds[1], read_most_mib() - before_mib


def read_most_mib() -> float:
    """Return the most memory that this process has had, in MiB. `getrusage` would count that of the process it came from."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) / 2**10


def count_alarms(runs: int, rng: np.random.Generator, share: float, rate: float) -> int:
    """Return how many of `runs` A/A experiments the guard ends."""
    reasons = Counter(judge_same(rng, share, rate) for _ in range(runs))
    alarms = runs - reasons.pop("", 0)
    for reason, count in reasons.items():
        typer.echo(f"share {share}, {rate:.0%} clicked: {count} of {runs}: {reason}", err=True)
    return alarms


def measure(runs: int, many: int, rng: np.random.Generator) -> list[Figure]:
    alarms = count_alarms(runs, rng, EXPERIMENT.share, CLICKED)
    rare = {rate: count_alarms(runs, rng, SMALL_SHARE, rate) for rate in RARELY_CLICKED}
    missed = {rate: count_until_missed(rate, rng) for rate in (*RARELY_CLICKED, CLICKED)}
    late = {
        "all its answers fail": ("degraded", pa.array([["challenger"]])),
        "the same items for everybody": ("item_ids", pa.array([list(range(LISTED))])),
        "ten times as slow": ("latency_ms", pa.array([80.0])),
        "all its answers are degraded": ("degraded", pa.array([["ranker"]])),
    }
    counts = {fault: count_until_found(column, broken, rng) for fault, (column, broken) in late.items()}
    first_s, next_s, mib = measure_looks(many, rng)
    return [
        Figure(name=f"{runs} A/A experiments that the guard ended", values=[alarms / runs], at_most=MOST_ALARMS),
        *[
            Figure(
                name=f"{runs} of a share of {SMALL_SHARE} with {rate:.0%} clicked that it ended",
                values=[count / runs],
                at_most=MOST_ALARMS,
            )
            for rate, count in rare.items()
        ],
        *[
            Figure(
                name=f"with that share, no click where the champion has {rate:.0%}: answers until rolled back", values=[count]
            )
            for rate, count in missed.items()
        ],
        *[
            Figure(name=f"from its answer {BREAKS_AT // 2:,} on, {fault}: answers until rolled back", values=[count])
            for fault, count in counts.items()
        ],
        Figure(name=f"a guard's first look at {many:,} answers", values=[first_s], unit="s"),
        Figure(name="its next look", values=[next_s], unit="s"),
        Figure(name=f"its memory for {many:,} answers", values=[mib], unit="MiB", at_most=MOST_MIB),
    ]


def main(
    runs: Annotated[int, typer.Option(help="A/A experiments", min=1)] = 200,
    results: ResultsFolder = RESULTS,
) -> None:
    """Judge A/A experiments by all rules of the guard. Exit code 1 when a bound is missed. Some minutes."""
    machine, figures = read_machine(), measure(runs, MANY, np.random.default_rng(0))
    clicks = f"{CLICKED:.0%} clicked and {CONVERTED:.0%} of these converted"
    conditions = f"{ANSWERS:,} answers to {USERS:,} users, {clicks}, {LOOKS} looks, with promotion; no server"
    command = f"python -m experiments.guard --runs {runs}"
    finish("guard", "The guard of an experiment", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.guard")
