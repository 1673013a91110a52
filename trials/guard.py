"""End a running experiment, with a reason: roll back a harmful challenger, promote a better one, or stop the experiment.

What is harm, and since when answers are compared, is in harm.py. A challenger that knows newer events than the champion need
not be better: after the experiment's days, not worse is enough.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from live.exposures import FALLBACK, FOLDER, read_removed_ms
from repository.experiments import end_experiment, find_experiment_folder, find_running
from serving.contract.errors import ConfigError
from serving.live.events import EventBatch
from serving.live.experiment import ARM_OF_MODE, CHAMPION_ARM, SHADOW_ARM, Experiment, State
from trials.feedback import Feedback, has_mark, join_feedback
from trials.harm import compute_harmful_loss, describe_loss, find_loss, find_visible_harm, list_spans
from trials.judged import JudgedAnswers, JudgedEvents
from trials.progress import compare_reactions, find_wrong_split
from trials.sequential import LEAST_OBSERVATIONS
from trials.split import find_kept

REMOVED = "answers that it is judged by were removed: raise exposure_bytes or exposure_days"
SET_BACK = "the clock was set back to before its start, so no answer counts: start it again under another name"
MOST_AHEAD_MS = 60_000  # clocks of two machines may differ by so much
PATIENCE_S = 600.0  # how long the clock must say that an experiment is to end: it may be wrong for a moment


class Guard:
    """Judges the running experiment of a repository. patience_s: see PATIENCE_S; 0 for a guard that looks once"""

    def __init__(self, repo: Path, patience_s: float = PATIENCE_S) -> None:
        self._repo, self._folder, self._patience_s = repo, find_experiment_folder(repo), patience_s
        self._due_s = float("inf")  # since when the clock says without a break that the experiment is to end
        self._answers, self._events = JudgedAnswers(self._folder), JudgedEvents(self._folder)

    def look(self) -> Experiment | None:
        """Judge the running experiment, and end it if need be. Return it if this has ended it, otherwise None.

        A harmful challenger is rolled back. A better one is promoted if the experiment allows that, and after the experiment's
        days one that is not worse. The experiment is stopped if another generation answers in place of the champion, if answers
        that the judgement needs were removed, if the clock was set back to before its latest change, or if its days pass
        without a decision.
        """
        experiment = find_running(self._repo)
        if experiment is None:
            return None
        if read_removed_ms(self._folder / FOLDER) > experiment.changed_ms:  # the intervals need every answer since then
            return end_judged(self._repo, experiment, "stopped", REMOVED)
        now_ms = time.time_ns() // 1_000_000
        is_set_back = experiment.changed_ms > now_ms + MOST_AHEAD_MS
        self._due_s = min(self._due_s, time.monotonic()) if is_set_back or experiment.is_over(now_ms) else float("inf")
        is_due = time.monotonic() >= self._due_s + self._patience_s
        if is_set_back:
            return end_judged(self._repo, experiment, "stopped", SET_BACK) if is_due else None
        answers = self._answers.read(experiment)
        judged = experiment if is_due else replace(experiment, days=0.0)
        state, reason = judge(judged, answers, self._events.read(experiment, answers))
        return None if state == "running" else end_judged(self._repo, experiment, state, reason)


def end_judged(repo: Path, experiment: Experiment, state: State, reason: str) -> Experiment | None:
    """End the experiment, and return it; None if a person or another server's guard ended or changed it meanwhile."""
    try:
        return end_experiment(repo, reason, state, judged=experiment)
    except ConfigError:
        return None


def judge(experiment: Experiment, exposures: pa.Table, log: Iterable[tuple[np.ndarray, EventBatch]]) -> tuple[State, str]:
    """Return the state that an experiment should have, and why.

    exposures, log: as `join_feedback` takes them, of the experiment and since its last change; the log may have more events
    """
    if strangers := find_strangers(experiment, exposures):
        return "stopped", strangers
    wrong_split, exposures = find_wrong_split(experiment, exposures), exposures.filter(find_kept(exposures))
    tried_arm = find_tried_arm(experiment)
    own_times_ms = exposures["time_ms"].filter(pc.equal(exposures["arm"], tried_arm)).to_numpy()
    spans = list_spans(own_times_ms)
    for span in spans:
        if harm := find_visible_harm(exposures, tried_arm, experiment.mode, span):
            return "rolled back", span.describe(harm)
    if wrong_split:
        return "rolled back", wrong_split
    if len(own_times_ms) < LEAST_OBSERVATIONS:
        return end_in_time(experiment)
    feedback = join_feedback(exposures, log)
    for span in spans:
        span_feedback = feedback if span.is_whole else feedback.take(exposures["time_ms"].to_numpy() >= span.since_ms)
        if loss := find_loss(span_feedback, tried_arm, experiment.mode, span.alpha):
            return "rolled back", span.describe(loss)
    if experiment.promotes and (gain := find_gain(feedback, experiment)):
        return "promoted", gain
    return end_in_time(experiment, feedback)


def end_in_time(experiment: Experiment, feedback: Feedback | None = None) -> tuple[State, str]:
    """Return the state of an experiment that nothing has decided yet, and why. feedback: None for too few answers to compare

    After its days it ends: the challenger takes over if its click rate is not below the champion's by as much as is harm, and
    its conversions do not seem to be.
    """
    if not experiment.is_over(time.time_ns() // 1_000_000):
        return "running", ""
    undecided = f"no decision within {experiment.days:g} days"
    if feedback is None:
        return "stopped", undecided
    (clicks,) = compare_reactions(experiment.mode, feedback, [len(feedback)])
    harm = compute_harmful_loss(feedback, experiment.mode, "ctr")
    if clicks.low <= -harm:
        return "stopped", undecided
    if fewer := find_fewer_conversions(feedback, experiment):
        return "stopped", f"{undecided}: {fewer}"
    finding = f"its click rate differs by {clicks.difference:+.1%} (at least {clicks.low:+.1%}, and {-harm:+.1%} is harm)"
    return "promoted", f"after {experiment.days:g} days it is not worse, and it knows newer events: {finding}"


def find_strangers(experiment: Experiment, exposures: pa.Table) -> str:
    """Return a sentence about another generation that answers in place of the champion, "" if there is none.

    The arms then no longer compare champion and challenger. This happens when a server is restarted after a publication: it
    serves the generation that is pinned by then. Answers with a gateway's own popular items are ignored.
    """
    answers = exposures.filter(~has_mark(exposures, FALLBACK)).group_by(["arm", "generation"]).aggregate([])
    groups = zip(answers["arm"].to_pylist(), answers["generation"].to_pylist(), strict=True)
    numbers = (experiment.champion, experiment.challenger)
    strangers = [number for arm, number in sorted(groups) if number not in (numbers[:1] if arm == CHAMPION_ARM else numbers)]
    return f"generation {strangers[0]} answers in place of the champion, {experiment.champion}" if strangers else ""


def find_tried_arm(experiment: Experiment) -> str:
    """Return the arm whose answers the challenger makes, alone or with the champion."""
    return SHADOW_ARM if experiment.mode == "shadow" else ARM_OF_MODE[experiment.mode]


def find_gain(feedback: Feedback, experiment: Experiment) -> str:
    """Return by how much users prefer the challenger, "" unless they do so significantly and seem to convert as often."""
    (compared,) = compare_reactions(experiment.mode, feedback, [len(feedback)])
    if compared.verdict != "better" or find_fewer_conversions(feedback, experiment):
        return ""
    gained = "of the answers are clicked" if experiment.mode == "ab" else "of the answers are won by its items than lost"
    return f"{compared.difference:.1%} more {gained} (at least {compared.low:.1%})"


def find_fewer_conversions(feedback: Feedback, experiment: Experiment) -> str:
    """Return by how much fewer conversions the challenger has, "" where that is no harm. Chance may explain them.

    This only holds a promotion back, so it can cause no false one. Conversions are rare: to wait until their interval excludes
    harm would hold most promotions back for ever.
    """
    (compared,) = compare_reactions(experiment.mode, feedback, [len(feedback)], "conversion")
    if compared.difference < -compute_harmful_loss(feedback, experiment.mode, "conversion"):
        return describe_loss(compared, experiment.mode, "conversion")
    return ""
