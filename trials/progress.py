"""Measure an experiment from the logs alone: what users did in each arm, and how the arms' difference developed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from serving.live.events import EventBatch
from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM, INTERLEAVED_ARM, SHADOW_ARM, Experiment, Mode, read_experiment
from trials.feedback import ATTRIBUTION_S, Feedback, join_feedback, read_events
from trials.interleaving import CHALLENGER, CHAMPION
from trials.judged import JudgedAnswers
from trials.report import AnswerSummary, summarise_answers
from trials.sequential import ALPHA, TIGHTEST_AT, Arm, Comparison, Verdict, bound_mean, compare_arms
from trials.split import Split, find_kept, measure_split, take_latest_share

LOOKS = 60
MOST_SHOWN = 200_000  # answers in memory for the gateway's page; some 400 MB beside the server
Reaction = Literal["ctr", "conversion"]
WORDS: dict[Verdict, str] = {
    "better": "the challenger is better beyond doubt",
    "worse": "the challenger is worse beyond doubt",
    "undecided": "no decision yet",
}
FACTS = ("name", "mode", "state", "reason", "share", "champion", "challenger")
COUNTS = ("clicked", "click_rate", "converted", "conversion_rate")
BOUNDS = ("difference", "low", "high")
NOTHING: dict[str, Any] = {
    "experiment": None,
    "arms": [],
    "looks": [],
    "split": "",
    "wrong_split": False,
    "verdict": "undecided",
    "decision": "no experiment was started",
    "users_share": 1.0,
}


@dataclass(frozen=True)
class Progress:
    """An experiment since the last change of its share. arms: summaries of the arms whose answers users saw, by the arm's name.

    looks: (unix milliseconds, comparison of the answers until then, with all clicks known now), oldest first. A look compares
        the arms' click rates; when interleaving, it compares the mean of `credit_clicks` over the answers with 0
    split: the users of each arm in an A/B test; while the test runs, there is no verdict if they contradict the share
    """

    experiment: Experiment
    arms: dict[str, AnswerSummary]
    looks: list[tuple[int, Comparison]]
    split: Split | None = None

    @property
    def _is_void(self) -> bool:
        return self.experiment.runs and self.split is not None and self.split.is_wrong

    @property
    def verdict(self) -> Verdict:
        return self.looks[-1][1].verdict if self.looks and not self._is_void else "undecided"

    @property
    def decision(self) -> str:
        """The decision so far, in words."""
        if not self.experiment.runs:
            return self.experiment.state + (f": {self.experiment.reason}" if self.experiment.reason else "")
        if self.experiment.mode == "shadow":
            return "no decision: users do not see a shadow's answers, so there are no clicks to compare"
        return f"no decision: {self.split.text}" if self.split and self._is_void else WORDS[self.verdict]

    def as_json(self) -> dict[str, Any]:
        """Return the progress as JSON values, with None for numbers of a look that are infinite or not known yet."""
        facts = {name: getattr(self.experiment, name) for name in FACTS}
        return {
            "experiment": facts | {"started": _format_time(self.experiment.started_ms)},
            "arms": [
                {"arm": arm, "answers": summary.count} | {name: getattr(summary, name) for name in COUNTS}
                for arm, summary in self.arms.items()
            ],
            "looks": [
                {"time": _format_time(time_ms)} | {name: _none_unless_finite(getattr(look, name)) for name in BOUNDS}
                for time_ms, look in self.looks
            ],
            "split": self.split.text if self.split else "",
            "wrong_split": self.split is not None and self.split.is_wrong,
            "verdict": self.verdict,
            "decision": self.decision,
        }


def describe_progress(folder: Path) -> dict[str, Any]:
    """Return the progress of the latest experiment as JSON values. Raises ArtifactError.

    folder: of the live store. All its events since the experiment's start are read, which may take seconds; of one that is
        over, only those until its answers get no more feedback, because it stays the latest for months
    Of more than MOST_SHOWN answers, some users are left out (judged.py).
    """
    experiment = read_experiment(folder)
    if experiment is None:
        return NOTHING
    answers, since_ms = JudgedAnswers(folder, MOST_SHOWN), find_start_ms(experiment)
    until_ms = None if experiment.runs else experiment.changed_ms + int(1_000 * ATTRIBUTION_S)
    exposures = answers.read(replace(experiment, changed_ms=since_ms), until_ms or inf)
    log = read_events(folder, since_ms, until_ms)
    return measure_progress(experiment, exposures, log).as_json() | {"users_share": answers.share}


def measure_progress(experiment: Experiment, exposures: pa.Table, log: Iterable[tuple[np.ndarray, EventBatch]]) -> Progress:
    """Return the progress of an experiment under its latest share.

    exposures: answers (live/exposures.py); log: events (`live.archive.read_log`)
    """
    since = pc.greater_equal(exposures["time_ms"], find_start_ms(experiment))
    is_own = pc.and_(pc.equal(exposures["experiment"], experiment.name), since)
    shown = take_latest_share(exposures.filter(pc.and_(is_own, pc.not_equal(exposures["arm"], SHADOW_ARM)))).sort_by("time_ms")
    compared = shown.filter(find_kept(shown))
    feedback = join_feedback(compared, log)
    arms = {
        group.removeprefix(f"{experiment.name}/"): summary for group, summary in summarise_answers([feedback], "arm").items()
    }
    looks = _look_back(experiment, compared["time_ms"].to_numpy(), feedback)
    split = measure_split(shown, experiment.share if experiment.runs else None) if experiment.mode == "ab" else None
    return Progress(experiment, arms, looks, split)


def find_start_ms(experiment: Experiment) -> int:
    """Return since when answers can belong to the period under its latest share, in unix milliseconds.

    The end of an experiment overwrites the time of the last change of its share. So all answers of one that is over are read;
    each states the share under which it was given.
    """
    return experiment.changed_ms if experiment.runs else experiment.started_ms


def find_wrong_split(experiment: Experiment, exposures: pa.Table) -> str:
    """Return how the numbers of users in a running A/B test contradict its share, and what to look for; "" if they do not.

    Interleaving needs no check, because each answer compares both generations. exposures: those of the experiment
    """
    split = measure_split(exposures, experiment.share) if experiment.mode == "ab" and experiment.runs else None
    return split.text if split and split.is_wrong else ""


def _look_back(experiment: Experiment, times_ms: np.ndarray, feedback: Feedback) -> list[tuple[int, Comparison]]:
    """Return `Progress.looks`. times_ms: int64 [answers], ascending"""
    if not len(times_ms) or experiment.mode == "shadow":
        return []
    moments_ms = np.unique(np.linspace(times_ms[0], times_ms[-1], LOOKS).astype(np.int64))
    counts = np.searchsorted(times_ms, moments_ms, "right")
    return list(zip(moments_ms.tolist(), compare_reactions(experiment.mode, feedback, counts.tolist()), strict=True))


def compare_reactions(
    mode: Mode,
    feedback: Feedback,
    counts: list[int],
    metric: Reaction = "ctr",
    alpha: float = ALPHA,
    tightest_at: float = TIGHTEST_AT,
) -> list[Comparison]:
    """Compare the shares of clicked or converted answers or, when interleaving, the answers won and lost by such items.

    counts: how many of the first answers each look sees; alpha, tightest_at: as in trials/sequential.py
    """
    interleaves = mode == "interleave"
    rewards = credit_answers(feedback, metric) if interleaves else feedback.compute_rewards(metric)
    champion, challenger, interleaved = (feedback.arms == arm for arm in (CHAMPION_ARM, CHALLENGER_ARM, INTERLEAVED_ARM))
    comparisons = []
    for count in counts:
        if interleaves:
            seen = _take_arm(feedback, rewards, interleaved, count)
            comparisons.append(Comparison(seen.mean, *bound_mean(seen, alpha, tightest_at), seen.count))
        else:
            arms = _take_arm(feedback, rewards, champion, count), _take_arm(feedback, rewards, challenger, count)
            comparisons.append(compare_arms(*arms, alpha, tightest_at))
    return comparisons


def credit_answers(feedback: Feedback, metric: Reaction) -> np.ndarray:
    """Return `credit_clicks` of each answer, float64 [answers]; 0 for an answer that is not interleaved."""
    reacted = feedback.clicks if metric == "ctr" else feedback.conversions
    wins, losses = ((reacted & (feedback.teams == team)).sum(axis=1) for team in (CHALLENGER, CHAMPION))
    return np.sign(wins - losses).astype(np.float64)


def _take_arm(feedback: Feedback, rewards: np.ndarray, is_in_arm: np.ndarray, count: int) -> Arm:
    """Summarise an arm from the first `count` answers. rewards: float64 [answers]; is_in_arm: bool [answers]"""
    rows = is_in_arm[:count]
    return Arm.of(rewards[:count][rows], feedback.users[:count][rows])


def _none_unless_finite(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def _format_time(time_ms: int) -> str:
    return datetime.fromtimestamp(time_ms / 1_000, UTC).isoformat()
