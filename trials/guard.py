"""End a running experiment, with a reason: roll back a harmful challenger, promote a better one, or stop the experiment.

The guard compares the answers of both arms since the experiment was last changed. The intervals of rates hold at every look
(sequential.py). If the challenger is harmless, each such comparison ends at most 5 % of experiments by chance, and the check of
the split ends at most 0.1 %.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from live.exposures import FOLDER, read_exposures, read_removed_ms
from repository.experiments import end_experiment, find_experiment_folder, find_running
from serving.contract.errors import ConfigError
from serving.live.events import EventBatch
from serving.live.experiment import ARM_OF_MODE, CHAMPION_ARM, INTERLEAVED_ARM, SHADOW_ARM, Experiment, State
from trials.feedback import Feedback, join_feedback, read_events
from trials.progress import compare_clicks, credit_answers, find_wrong_split
from trials.sequential import ALPHA, LEAST_OBSERVATIONS, Arm, Comparison, bound_mean, compare_arms, has_wrong_split

FALLBACK = "gateway_fallback"  # in `degraded`: popular items of the gateway
FAILED = "challenger"  # in `degraded`: the challenger failed, and the champion answered
FEWEST_FAILURES, MOST_FAILED = 20, 0.5  # from so many answers on, a larger share of failures is harm
MORE_DEGRADED = 0.02  # share of the answers that may be degraded in addition to the champion's
FEWER_CLICKS = 0.1  # share of the champion's click rate, or of the answers that its items win, that may be lost
SLOWER = 1.5  # times a quantile of the champion: slower answers are slow, if also by so many ms:
SLOWER_P99_MS, SLOWER_P50_MS = 20.0, 3.0
ENOUGH_FOR_P99 = 1_000  # answers of the champion; with fewer, the p99 is uncertain and the slowest one replaces it
HARM_SOON = 500  # independent answers at which harm is found soonest; after 10,000, intervals are a tenth wider for it
REMOVED = "answers that it is judged by were removed: raise exposure_bytes or exposure_days"
LEAST_COVERAGE = 0.3  # share of the distinct items in as many answers of the champion; fewer are harm


def guard_once(repo: Path) -> Experiment | None:
    """Judge the running experiment, and end it if need be. Return it if this has ended it, otherwise None.

    A harmful challenger is rolled back. A better one is promoted if the experiment allows that. The experiment is stopped if
    another generation answers in place of the champion, or if answers that the judgement needs were removed.
    """
    experiment, folder = find_running(repo), find_experiment_folder(repo)
    if experiment is None:
        return None
    if read_removed_ms(folder / FOLDER) > experiment.changed_ms:  # the intervals need every answer since then
        return end_judged(repo, experiment, "stopped", REMOVED)
    exposures = read_exposures(folder, experiment.changed_ms)
    state, reason = judge(experiment, exposures, read_events(folder, experiment.changed_ms))
    if state == "running":
        return None
    return end_judged(repo, experiment, state, reason)


def end_judged(repo: Path, experiment: Experiment, state: State, reason: str) -> Experiment | None:
    """End the experiment, and return it; None if a person or another server's guard ended or changed it meanwhile."""
    try:
        return end_experiment(repo, reason, state, judged=experiment)
    except ConfigError:
        return None


def judge(experiment: Experiment, exposures: pa.Table, log: Iterable[tuple[np.ndarray, EventBatch]]) -> tuple[State, str]:
    """Return the state that an experiment should have, and why.

    exposures, log: as `join_feedback` takes them; both must go back to the experiment's last change
    """
    since = pc.greater_equal(exposures["time_ms"], experiment.changed_ms)
    exposures = exposures.filter(pc.and_(pc.equal(exposures["experiment"], experiment.name), since))
    champion, challenger = (
        exposures.filter(pc.equal(exposures["arm"], arm)) for arm in (CHAMPION_ARM, find_tried_arm(experiment))
    )
    if strangers := find_strangers(experiment, exposures):
        return "stopped", strangers
    harm = find_failures(challenger)
    if min(len(champion), len(challenger)) >= LEAST_OBSERVATIONS:
        harm = harm or find_slowness(champion, challenger, experiment) or find_narrowness(champion, challenger)
    if harm := harm or find_wrong_split(experiment, exposures):
        return "rolled back", harm
    if len(challenger) < LEAST_OBSERVATIONS:
        return "running", ""
    feedback = join_feedback(exposures, log)
    if loss := find_loss(feedback, experiment):
        return "rolled back", loss
    if experiment.promotes and (gain := find_gain(feedback, experiment)):
        return "promoted", gain
    return "running", ""


def find_strangers(experiment: Experiment, exposures: pa.Table) -> str:
    """Return a sentence about another generation that answers in place of the champion, "" if there is none.

    The arms then no longer compare champion and challenger. This happens when a server is restarted after a publication: it
    serves the generation that is pinned by then. Answers with a gateway's own popular items are ignored.
    """
    answers = exposures.filter(~has_mark(exposures, FALLBACK)).group_by(["arm", "generation"]).aggregate([])
    met = zip(answers["arm"].to_pylist(), answers["generation"].to_pylist(), strict=True)
    own = (experiment.champion, experiment.challenger)
    strangers = [number for arm, number in sorted(met) if number not in (own[:1] if arm == CHAMPION_ARM else own)]
    return f"generation {strangers[0]} answers in place of the champion, {experiment.champion}" if strangers else ""


def has_mark(exposures: pa.Table, mark: str) -> np.ndarray:
    """Return which answers have `mark` in `degraded`, bool [answers]."""
    marks = exposures["degraded"].combine_chunks()
    has: np.ndarray = np.zeros(len(exposures), bool)
    has[pc.list_parent_indices(marks).filter(pc.equal(pc.list_flatten(marks), mark)).to_numpy()] = True
    return has


def find_tried_arm(experiment: Experiment) -> str:
    """Return the arm whose answers the challenger makes, alone or with the champion."""
    return SHADOW_ARM if experiment.mode == "shadow" else ARM_OF_MODE[experiment.mode]


def find_failures(challenger: pa.Table) -> str:
    """Return a sentence on how many of its answers the challenger failed, "" if these are too few to matter."""
    failures = has_mark(challenger, FAILED)
    if len(failures) >= FEWEST_FAILURES and failures.mean() > MOST_FAILED:
        return f"it failed in {failures.sum()} of {len(failures)} answers"
    return ""


def find_slowness(champion: pa.Table, challenger: pa.Table, experiment: Experiment) -> str:
    """Return a sentence with both p99 or both p50; "" unless the challenger's is significantly slower.

    It is if significantly more answers than the quantile allows, 1 % or half, take far longer than the champion's quantile.
    Only A/B tests compare the p50: in other modes the challenger answers at the same time as the champion, which slows both.
    """
    champions_ms, own_ms = (arm["latency_ms"].drop_null().to_numpy() for arm in (champion, challenger))
    if min(len(champions_ms), len(own_ms)) < LEAST_OBSERVATIONS:
        return ""
    p99_ms = float(np.percentile(champions_ms, 99) if len(champions_ms) >= ENOUGH_FOR_P99 else champions_ms.max())
    bounds = [(99, p99_ms, SLOWER_P99_MS)]
    if experiment.mode == "ab":
        bounds.append((50, float(np.median(champions_ms)), SLOWER_P50_MS))
    for percent, compared_ms, slower_ms in bounds:
        slow = int((own_ms > max(SLOWER * compared_ms, compared_ms + slower_ms)).sum())
        if is_significantly_more(slow, len(own_ms), 1 - percent / 100):
            usual_ms, found_ms = (np.percentile(times, percent) for times in (champions_ms, own_ms))
            return f"its p{percent} is {found_ms:.0f} ms, the champion's {usual_ms:.0f} ms"
    return ""


def is_significantly_more(count: int, of: int, share: float) -> bool:
    """Return whether more than a share of the answers are `count`, at any look by chance in 5 % of the experiments at most."""
    return count > share * of and has_wrong_split((count, of - count), (share, 1 - share), ALPHA)


def find_narrowness(champion: pa.Table, challenger: pa.Table) -> str:
    """Return how many distinct items each arm shows in equally many answers, "" if the challenger shows enough."""
    count = min(len(champion), len(challenger))
    shown = [pc.count_distinct(pc.list_flatten(arm["item_ids"].slice(0, count))).as_py() for arm in (champion, challenger)]
    if shown[1] < LEAST_COVERAGE * shown[0]:
        return f"{count} of its answers show {shown[1]} items, as many of the champion's {shown[0]}"
    return ""


def find_loss(feedback: Feedback, experiment: Experiment) -> str:
    """Return by how much the challenger is significantly more degraded or less clicked, "" if it is neither."""
    degraded = compare(feedback, "degraded", experiment)
    if degraded.low > MORE_DEGRADED:
        return f"{degraded.difference:.1%} more of its answers are degraded (at least {degraded.low:.1%})"
    if experiment.mode == "shadow":
        return ""
    if experiment.mode == "interleave":
        return find_lost_answers(feedback)
    clicks = compare(feedback, "ctr", experiment)
    if clicks.is_worse_than(FEWER_CLICKS * feedback.sum_arm("ctr", CHAMPION_ARM).mean):
        return f"{-clicks.difference:.1%} fewer of its answers are clicked (at least {-clicks.high:.1%})"
    return ""


def find_lost_answers(feedback: Feedback) -> str:
    """Return how many more interleaved answers the challenger's items lose than win, "" unless significantly too many."""
    interleaved = feedback.take(feedback.arms == INTERLEAVED_ARM)
    credits = credit_answers(interleaved)
    seen = Arm.of(credits, interleaved.users)
    _, high = bound_mean(seen, tightest_at=HARM_SOON)
    if high < -FEWER_CLICKS * float(np.mean(credits < 0)):
        return f"{-seen.mean:.1%} more of the answers are lost by its items than won (at least {-high:.1%})"
    return ""


def find_gain(feedback: Feedback, experiment: Experiment) -> str:
    """Return by how much users prefer the challenger, "" unless they do so significantly."""
    (compared,) = compare_clicks(experiment, feedback, [len(feedback)])
    if compared.verdict != "better":
        return ""
    gained = "of the answers are clicked" if experiment.mode == "ab" else "of the answers are won by its items than lost"
    return f"{compared.difference:.1%} more {gained} (at least {compared.low:.1%})"


def compare(feedback: Feedback, metric: str, experiment: Experiment) -> Comparison:
    """Compare the champion's arm with the challenger's. metric: as `Feedback.compute_rewards` takes it"""
    arms = feedback.sum_arm(metric, CHAMPION_ARM), feedback.sum_arm(metric, find_tried_arm(experiment))
    return compare_arms(*arms, tightest_at=HARM_SOON)
