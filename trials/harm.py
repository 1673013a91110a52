"""Say what harm a challenger does, over the whole experiment and over its latest answers.

A challenger that was good for a day may break in a minute, and the good answers before would hide that. So the same
comparisons are made from several starts: the first answer, and every SPAN-th one of the challenger. Of these, the first and the
latest two are looked at. All starts share the chance of a false alarm: the intervals of rates hold at every look
(sequential.py), and the later a start, the wider they are. If the challenger is harmless, the comparisons of rates together end
an experiment with a chance of at most ALPHA, and so does each comparison of latency. When users are left out (judged.py), the
comparisons begin anew, and so does that chance. Failures and coverage have no intervals: only gross ones are harm.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from live.exposures import FAILED, FALLBACK
from serving.live.experiment import CHAMPION_ARM, INTERLEAVED_ARM, Mode
from trials.feedback import Feedback, has_mark, number_users
from trials.interleaving import BOTH, CHALLENGER, CHAMPION
from trials.progress import Reaction, compare_reactions, credit_answers
from trials.sequential import ALPHA, LEAST_OBSERVATIONS, LEAST_USERS, Arm, Comparison, compare_arms, has_wrong_split

FEWEST_FAILURES, MOST_FAILED = 20, 0.5  # from so many answers on, a larger share of failures is harm
MORE_DEGRADED = 0.02  # share of the answers that may be degraded in addition to the champion's
FEWER_REACTIONS = 0.1  # the largest harmless loss of clicked, converted or won answers, as a share of the champion's
REACTIONS: dict[Reaction, str] = {"ctr": "clicked", "conversion": "converted"}
SLOWER = 1.5  # an answer is slow if it takes so many times the champion's quantile, and longer by so many ms:
SLOWER_P99_MS, SLOWER_P50_MS = 20.0, 3.0
ENOUGH_FOR_P99 = 1_000  # answers of the champion; with fewer, the p99 is uncertain and the slowest one replaces it
HARM_SOON = 500  # independent answers at which intervals are tightest; the price: after 10,000 they are a tenth wider
LEAST_COVERAGE = 0.3  # share of the distinct items that the champion shows to as many users; fewer are harm
SPAN = 500  # answers of the challenger between two starts
WHOLE_SHARE = 0.8  # of ALPHA, spent on the comparison from the first answer; all others share the rest


@dataclass(frozen=True)
class Span:
    """The answers of both arms since a start.

    since_ms: unix milliseconds, 0 for all; alpha: chance of a false alarm that its comparisons may spend
    count: number of the challenger's answers
    """

    since_ms: int
    alpha: float
    count: int

    @property
    def is_whole(self) -> bool:
        return self.since_ms == 0

    def take_answers(self, exposures: pa.Table) -> pa.Table:
        """Return the answers of the span."""
        return exposures if self.is_whole else exposures.filter(pc.greater_equal(exposures["time_ms"], self.since_ms))

    def describe(self, harm: str) -> str:
        """Return a sentence about harm. If the span is not the whole experiment, it says in how many answers harm was seen."""
        return harm if self.is_whole else f"{harm} (seen in its latest {self.count:,} answers)"


def list_spans(times_ms: np.ndarray) -> list[Span]:
    """Return the spans to compare: the whole experiment, and those from the latest two starts.

    times_ms: int64 [answers], of the challenger, in any order
    """
    count, last = len(times_ms), max(len(times_ms) - 1, 0) // SPAN  # the number of starts after the first
    starts = [start for start in (last - 1, last) if start > 0]
    times_ms = np.partition(times_ms, [start * SPAN for start in starts]) if starts else times_ms
    later = (1 - WHOLE_SHARE) * ALPHA
    return [Span(0, WHOLE_SHARE * ALPHA, count)] + [
        Span(int(times_ms[start * SPAN]), later / (start * (start + 1)), count - start * SPAN) for start in starts
    ]


def find_visible_harm(exposures: pa.Table, tried_arm: str, mode: Mode, span: Span) -> str:
    """Return a sentence on harm that answers show without events: failures, slowness, few distinct items; "" for none.

    exposures: all answers of the experiment since its last change; tried_arm: the arm whose answers the challenger makes
    """
    exposures = span.take_answers(exposures)
    champion, challenger = (exposures.filter(pc.equal(exposures["arm"], arm)) for arm in (CHAMPION_ARM, tried_arm))
    harm = find_failures(champion, challenger, FEWEST_FAILURES if span.is_whole else LEAST_OBSERVATIONS)
    if min(len(champion), len(challenger)) >= LEAST_OBSERVATIONS:
        harm = harm or find_slowness(champion, challenger, mode, span.alpha)
    return harm or (find_drafted_narrowness(challenger) if mode == "interleave" else find_narrowness(champion, challenger))


def find_failures(champion: pa.Table, challenger: pa.Table, fewest: int) -> str:
    """Return a sentence on the share of answers in which the challenger failed; "" if it is no harm.

    The champion's share of popular items is subtracted, because both fail while the server is down.
    fewest: number of answers below which no share is harm
    """
    failures, fallbacks = has_mark(challenger, FAILED), has_mark(champion, FALLBACK)
    if len(failures) >= fewest and failures.mean() - (fallbacks.mean() if len(fallbacks) else 0.0) > MOST_FAILED:
        return f"it failed in {failures.sum()} of {len(failures)} answers"
    return ""


def find_slowness(champion: pa.Table, challenger: pa.Table, mode: Mode, alpha: float) -> str:
    """Return a sentence with the p99, or the p50, of both arms; "" unless the challenger is significantly slower.

    It is slower if significantly more than 1 % (for the p50: half) of its answers take far longer than the champion's quantile.
    One user may make many slow requests. So answers count as the number of independent ones that would tell as much (Rao and
    Scott 1992), and the champion's quantile is the larger of two: with equal weight of answers, and with equal weight of users.
    Only A/B tests compare the p50: in other modes the challenger answers at the same time as the champion, which slows both.
    """
    champion, challenger = (arm.filter(pc.is_valid(arm["latency_ms"])) for arm in (champion, challenger))
    if min(len(champion), len(challenger)) < LEAST_OBSERVATIONS:
        return ""
    champions_ms, own_ms = (arm["latency_ms"].to_numpy() for arm in (champion, challenger))
    champions, users = (number_users(arm["user_id"]) for arm in (champion, challenger))
    p99_ms = (
        compute_quantile(champions_ms, champions, 0.99) if len(champions_ms) >= ENOUGH_FOR_P99 else float(champions_ms.max())
    )
    bounds = [(99, p99_ms, SLOWER_P99_MS)]
    if mode == "ab":
        bounds.append((50, compute_quantile(champions_ms, champions, 0.5), SLOWER_P50_MS))
    for percent, compared_ms, slower_ms in bounds:
        slow = Arm.of(own_ms > max(SLOWER * compared_ms, compared_ms + slower_ms), users)
        if is_significantly_more(slow, 1 - percent / 100, alpha):
            usual_ms, found_ms = (np.percentile(times, percent) for times in (champions_ms, own_ms))
            return f"its p{percent} is {found_ms:.0f} ms, the champion's {usual_ms:.0f} ms"
    return ""


def compute_quantile(values: np.ndarray, users: np.ndarray, share: float) -> float:
    """Return the larger of two quantiles of values [answers]: with equal weight of answers, and with equal weight of users."""
    order = np.argsort(values)
    weights = np.cumsum((1 / np.bincount(users))[users][order])
    of_users = values[order][np.searchsorted(weights, share * weights[-1])]
    return float(max(np.quantile(values, share), of_users))


def is_significantly_more(marked: Arm, share: float, alpha: float) -> bool:
    """Return whether significantly more than a share of the answers are marked.

    marked: 1 for a marked answer, 0 for another; alpha: chance of a false alarm at any look of an experiment
    """
    counts = marked.mean * marked.independent_answers, (1 - marked.mean) * marked.independent_answers
    return marked.mean > share and has_wrong_split(counts, (share, 1 - share), alpha)


def find_narrowness(champion: pa.Table, challenger: pa.Table) -> str:
    """Return a sentence on how many distinct items each arm shows to equally many users; "" if the challenger shows enough.

    Only the first list of each user counts: a user who comes a hundred times would make any arm look narrow.
    """
    if min(len(champion), len(challenger)) < LEAST_OBSERVATIONS:
        return ""
    lists = [arm["item_ids"].take(find_first_answers(arm["user_id"])) for arm in (champion, challenger)]
    count = min(map(len, lists))
    champions, challengers = (pc.list_flatten(arm.slice(0, count)) for arm in lists)
    return describe_narrowness(champions, challengers, count)


def find_drafted_narrowness(interleaved: pa.Table) -> str:
    """Return a sentence on how many distinct items of each generation interleaved lists show; "" if they are enough."""
    interleaved = interleaved.filter(pc.is_valid(interleaved["teams"]))  # null where it failed
    if len(interleaved) < LEAST_OBSERVATIONS:
        return ""
    interleaved = interleaved.take(find_first_answers(interleaved["user_id"]))
    items, teams = (pc.list_flatten(interleaved[name]) for name in ("item_ids", "teams"))
    champions, challengers = (
        items.filter(pc.is_in(teams, pa.array([team, BOTH], pa.int8()))) for team in (CHAMPION, CHALLENGER)
    )
    return describe_narrowness(champions, challengers, len(interleaved))


def find_first_answers(user_ids: pa.ChunkedArray) -> np.ndarray:
    """Return the row of each user's first answer, int64 [users], ascending. Every anonymous answer (null) has its own user."""
    numbers = number_users(user_ids)
    return np.sort(np.unique(numbers, return_index=True)[1])


def describe_narrowness(champions: pa.ChunkedArray, challengers: pa.ChunkedArray, users: int) -> str:
    """Return a sentence with both numbers of distinct items; "" if the challenger shows enough, or too few users saw them."""
    item_counts = [pc.count_distinct(items).as_py() for items in (champions, challengers)]
    if users < LEAST_USERS or item_counts[1] >= LEAST_COVERAGE * item_counts[0]:
        return ""
    return f"it shows {item_counts[1]} items to {users} users, and the champion {item_counts[0]} to as many"


def find_loss(feedback: Feedback, tried_arm: str, mode: Mode, alpha: float) -> str:
    """Return a sentence on how much more degraded, less clicked or less converted the challenger is; "" if not significantly.

    alpha: chance that any of the three is found for a harmless challenger
    """
    metrics = () if mode == "shadow" else tuple(REACTIONS)
    alpha /= 1 + len(metrics)
    arms = feedback.sum_arm("degraded", CHAMPION_ARM), feedback.sum_arm("degraded", tried_arm)
    degraded = compare_arms(*arms, alpha, tightest_at=HARM_SOON)
    if degraded.low > MORE_DEGRADED:
        return f"{degraded.difference:.1%} more of its answers are degraded (at least {degraded.low:.1%})"
    for metric in metrics:
        (compared,) = compare_reactions(mode, feedback, [len(feedback)], metric, alpha, HARM_SOON)
        if compared.is_worse_than(compute_harmful_loss(feedback, mode, metric)):
            return f"{describe_loss(compared, mode, metric)} (at least {-compared.high:.1%})"
    return ""


def compute_harmful_loss(feedback: Feedback, mode: Mode, metric: Reaction) -> float:
    """Return the largest loss of clicks or conversions that is not harm, as `compare_reactions` measures it."""
    if mode != "interleave":
        return FEWER_REACTIONS * feedback.sum_arm(metric, CHAMPION_ARM).mean
    credits = credit_answers(feedback, metric)[feedback.arms == INTERLEAVED_ARM]
    return FEWER_REACTIONS * float(np.mean(credits < 0))


def describe_loss(compared: Comparison, mode: Mode, metric: Reaction) -> str:
    """Return a loss of clicks or conversions in words."""
    if mode != "interleave":
        return f"{-compared.difference:.1%} fewer of its answers are {REACTIONS[metric]}"
    by = "" if metric == "ctr" else ", by conversions"
    return f"{-compared.difference:.1%} more of the answers are lost by its items than won{by}"
