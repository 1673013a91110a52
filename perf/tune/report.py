"""Write the winner as an export config, the evidence beside it, and a table for people."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import tomli_w

from export.settings import Settings, read_settings
from perf.report.results import replace_text
from perf.report.tables import Row, Table
from perf.slo import Bound
from perf.tune.search import SERVER_THREADS, Changes, Outcome, Trial, apply_changes, describe_changes, find_medians


def write_config(path: Path, settings: Settings, changes: Changes, evidence: Path) -> None:
    """Write `settings` with the changes as a TOML for `--config`, without defaults, and read it back."""
    document = apply_changes(settings.model_dump(mode="json", exclude_defaults=True), changes)
    remarks = [
        f"Found by `make tune`: {describe_changes(changes)}.",
        f"Evidence: {evidence.name}. Export with --config {path.name}.",
    ]
    if threads := changes.get(SERVER_THREADS):
        remarks.append(f"The server is started with --threads {threads}, which no export can set.")
    path.write_text("".join(f"# {remark}\n" for remark in remarks) + "\n" + tomli_w.dumps(document))
    read_settings(path)


def make_evidence(outcome: Outcome, slo: dict[str, Bound], facts: dict[str, Any]) -> dict[str, Any]:
    """Return everything that was measured. facts: of the run as a whole."""
    return facts | {
        "goal": outcome.goal,
        "complete": outcome.complete,
        "winner": outcome.winner.changes if outcome.winner else None,
        "rungs": [[_describe_trial(trial, outcome.goal, slo) for trial in rung] for rung in outcome.rungs],
    }


def _describe_trial(trial: Trial, goal: str, slo: dict[str, Bound]) -> dict[str, Any]:
    gain = trial.compute_gain(goal)
    return {
        "changes": trial.changes,
        "gain": {name: round(getattr(gain, name), 4) for name in ("median", "low", "high")},
        "broken": trial.find_broken(slo),
        "answers": trial.answers or "equal",
        "turns": list(trial.turns),
        "current": list(trial.current_turns),
    }


def save_evidence(path: Path, document: dict[str, Any]) -> None:
    """Replace the file as a whole: it grows during the search."""
    replace_text(path, json.dumps(document, indent=1) + "\n")


def make_trial_table(outcome: Outcome, slo: dict[str, Bound]) -> Table:
    """Return a table of the trials that came furthest, best first."""
    rows = []
    for trial in outcome.best:
        gain, wins = trial.compute_gain(outcome.goal), trial is outcome.winner
        value = find_medians(trial.turns).get(outcome.goal)
        cells = (
            describe_changes(trial.changes),
            "not measured" if value is None else f"{value:,.2f}",
            f"{gain.median:.3f}",
            f"{gain.low:.3f} … {gain.high:.3f}",
            str(len(trial.turns)),
            "answers differ" if trial.answers else ", ".join(trial.find_broken(slo)) or "kept",
        )
        rows.append(Row(cells, kept=True if wins else None))
    head = ("candidate", outcome.goal, "times better", "lowest … highest", "turns", "SLO")
    return Table("Against the current settings, in the same turns", head, tuple(rows))
