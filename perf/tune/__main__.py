"""python -m perf.tune: see the package's docstring."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console

from perf import slo
from perf.bench import SEED
from perf.command import run
from perf.report.results import Machine, read_commit, to_json_line
from perf.tune import report
from perf.tune.lab import Lab, measure_smaller_efforts
from perf.tune.search import Outcome, describe_changes, draw_candidates, find_medians, make_space, search
from serving.contract.errors import ConfigError

GOALS = ("peak_rate", "clients_1_p50_ms", "p99_ms")
MEASURED = (*GOALS, "p50_ms", "p95_ms", "p99_over_p50", "error_share", "memory_mib")  # keys that slo.toml may name
console = Console(stderr=True, width=120)


def main(
    repo: Annotated[Path, typer.Option(help="the repository to tune; it is only read")] = Path("model_repository"),
    out: Annotated[Path, typer.Option(help="the export config to write; the evidence is beside it as .json")] = Path(
        "tuned.toml"
    ),
    goal: Annotated[str, typer.Option(help=f"metric to improve: {', '.join(GOALS)}")] = GOALS[0],
    minutes: Annotated[float, typer.Option(help="after this time, no further comparison starts", min=1)] = 30.0,
    count: Annotated[int, typer.Option("--candidates", help="number of settings to try", min=1)] = 12,
    clients: Annotated[int, typer.Option(help="concurrent clients while throughput is measured", min=1)] = 32,
    window_s: Annotated[float, typer.Option(help="seconds of a window; perf_analyzer takes three per level", min=0.1)] = 1.0,
    slo_file: Annotated[Path, typer.Option("--slo", help="bounds to keep")] = slo.SLO_FILE,
) -> None:
    """Search batch delay and sizes, instances, threads and the index's effort under an SLO; write the winner's config."""
    if goal not in GOALS:
        raise ConfigError(f"There is no goal {goal!r}; these are: {', '.join(GOALS)}.")
    if out.suffix != ".toml" or not out.parent.is_dir():
        raise ConfigError(
            f"{out} is not the name of a .toml file in a folder that exists: the winner is written there. Correct --out."
        )
    slo_bounds = slo.read_slo(slo_file)
    if others := ", ".join(sorted(slo_bounds.keys() - set(MEASURED))):
        console.print(f"Not measured during the search, so judge the winner by `make perf`: {others}", markup=False)
    rng, end_s = np.random.default_rng(SEED), time.monotonic() + 60 * minutes
    evidence, efforts = out.with_suffix(".json"), measure_smaller_efforts(repo)
    lab = Lab(repo, clients, window_s, rng)
    bounds = {key: bound.for_layout(lab.layout) for key, bound in slo_bounds.items() if key in MEASURED}
    space = make_space(lab.settings, lab.layout, tuple(efforts), len(os.sched_getaffinity(0)))
    candidates = draw_candidates(space, count, rng)
    lab.say = lambda what: console.print(f"[{(end_s - time.monotonic()) / 60:4.1f} min left] {what}", markup=False)
    with lab:
        facts = {
            "perf": "tune",
            "commit": read_commit(),
            "machine": Machine.here().model_dump(),
            "layout": lab.layout,
            "offered_rate": round(lab.offered_rate, 1),
            "clients": clients,
            "slo": {key: str(bound) for key, bound in bounds.items()},
            "recall_by_effort": efforts,
            "space": {key: list(values) for key, values in space.items()},
        }

        def save(outcome: Outcome) -> None:
            report.save_evidence(evidence, report.make_evidence(outcome, bounds, facts))

        def measure(heat, turns: int):
            lab.say(
                f"{turns} {'turn' if turns == 1 else 'turns'} of: " + " | ".join(describe_changes(changes) for changes in heat)
            )
            return lab.measure(heat, turns)

        outcome = search(candidates, measure, bounds, goal, lambda: time.monotonic() > end_s, save)
    finish(outcome, lab, bounds, out, evidence)


def finish(outcome: Outcome, lab: Lab, bounds: dict[str, slo.Bound], out: Path, evidence: Path) -> None:
    """Print table, config and verdict, and the JSON line, always last."""
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(report.make_trial_table(outcome, bounds).to_rich())
    if not outcome.complete:
        console.print("The time ran out before the search ended; this is the best so far.")
    changes = outcome.winner.changes if outcome.winner else {}
    report.write_config(out, lab.settings, changes, evidence)
    if outcome.winner is None:
        console.print("Nothing is significantly better than the current settings: they are kept.")
    console.print(f"config: {out}   evidence: {evidence}", markup=False)
    print(to_json_line(summarise(outcome) | {"config": str(out)}))


def summarise(outcome: Outcome) -> dict[str, object]:
    facts: dict[str, object] = {"perf": "tune", "goal": outcome.goal, "complete": outcome.complete}
    if (winner := outcome.winner) is None:
        return facts | {"winner": None}
    gain = winner.compute_gain(outcome.goal)
    return facts | {
        "winner": winner.changes,
        "gain_median_low_high": [round(x, 4) for x in (gain.median, gain.low, gain.high)],
        **{key: round(value, 4) for key, value in find_medians(winner.turns).items()},
    }


if __name__ == "__main__":
    run(main, "python -m perf.tune")
