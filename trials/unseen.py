"""Evaluate a generation off-policy: estimate from logged answers what its lists, which users did not see, would have earned.

A judged list is what that generation answers to a logged request. The estimators are IPS, SNIPS and DR of trials/off_policy.py.
A shown item has the weight 1 / propensity (`propensities` of live/exposures.py) if the judged list has the same item at the
same place, otherwise 0. Places whose propensity is not known have the weight 0. Where a judged list is shorter than others, or
empty because the shadow failed, it earns nothing, whatever was shown. Answers with a gateway's own popular items are left out,
because no generation chose them.

A propensity is conditional on the items before it. So the mean weight of a place estimates its support: the share of answers
that could have shown the judged item there. The log says nothing about the other answers, so there is no estimate unless the
support is almost 1. A support that is significantly above 1 shows that the judged lists depend on the logged draws.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel, Field

from live.exposures import FAILED, FALLBACK, SCHEMA, read_latest
from serving.contract.tensors import PAD_ID
from serving.live.events import EventBatch
from serving.live.experiment import SHADOW_ARM
from trials.feedback import has_mark, join_feedback, number_users, pad_rows
from trials.off_policy import (
    LEAST_EFFECTIVE_SAMPLES,
    Estimate,
    SlateKind,
    TrialError,
    compute_importance_weights,
    estimate_slate,
    estimate_slate_dr,
    estimate_slate_snips,
    weigh_positions,
)
from trials.shown import read_parts
from trials.split import find_kept

Lists = Mapping[str, list[int]]  # request id -> item ids, best first
Reward = Literal["clicks", "conversions", "value"]
MOST_JUDGED = 200_000  # the latest answers of a shadow that are judged; they take some 500 MB
LEAST_SUPPORT = 0.95
PRIOR_SHOWN = 100.0  # answers' worth of the place's mean reward that enter the estimate of an item's reward


class RecordedAnswer(BaseModel):
    """One line of a file of recorded answers (`read_lists`)."""

    request_id: str
    item_ids: list[Annotated[int, Field(ge=-(2**63), lt=2**63)]]


@dataclass(frozen=True)
class PairedAnswers:
    """Shown answers to requests whose judged list is known.

    rewards: float64 [answers, places], of the shown items; weights: float64 [answers, places], of the judged ones
    expected: float64 [answers, places], what the judged items should earn (`expect_rewards`)
    judged: bool [answers, places], where the judged list has an item
    users: int64 [answers], 0 … n - 1; each answer without a user id has its own user
    unknown: share of the shown places whose propensity is not known
    fallbacks: answers that are left out, because they are a gateway's own popular items
    """

    rewards: np.ndarray
    weights: np.ndarray
    expected: np.ndarray
    judged: np.ndarray
    users: np.ndarray
    unknown: float
    fallbacks: int

    @property
    def places(self) -> int:
        """Number of judged places."""
        return self.judged.shape[1]

    def estimate_shown(self) -> Estimate:
        """Return what the shown lists earned per answer at the judged places. Raises TrialError for too few users."""
        return estimate_slate(self.rewards, np.ones_like(self.weights), "independent", self.users)

    def estimate(self, kind: SlateKind) -> tuple[dict[str, Estimate], Estimate]:
        """Return what the judged lists would have earned per answer, by estimator ("IPS", "SNIPS", "DR"), and their support.

        Raises TrialError if the support is too low or significantly above 1, or if too few samples are effective.
        """
        support = self._estimate_support(kind)
        if support.value < LEAST_SUPPORT and support.high < 1:
            unknown = f"The propensity of {self.unknown:.0%} of the places is not known. " if self.unknown else ""
            raise TrialError(
                f"The log could have shown {support.value:.0%} of the judged items at their places, and says nothing about the "
                f"others; expected {LEAST_SUPPORT:.0%} or more. {unknown}Judge fewer places (--places), or let some users see "
                "the judged lists (python -m server experiment start)."
            )
        if support.value > 1 / LEAST_SUPPORT and support.low > 1:
            raise TrialError(
                f"The judged lists have the drawn items {support.value:.3g} times as often as chance explains, so they were "
                "made with knowledge of what was drawn. Expected lists that do not depend on the shown ones. Record another "
                "generation's answers."
            )
        # An empty place of a judged list earns nothing for certain, so the log counts there in full.
        weights = np.where(self.judged, weigh_positions(self.weights, kind), 1.0)
        earned = self.rewards * self.judged
        return {
            "IPS": estimate_slate(earned, weights, "independent", self.users),
            "SNIPS": estimate_slate_snips(earned, weights, "independent", self.users, self.judged),
            # The shown item is the judged one wherever such a weight is not 0, so the model expects the same of both.
            "DR": estimate_slate_dr(earned, weights, self.expected, self.expected, "independent", self.users),
        }, support

    def _estimate_support(self, kind: SlateKind) -> Estimate:
        """Return the mean weight of the places at which a judged list has an item."""
        counts = self.judged.sum(axis=1, keepdims=True).astype(np.float64)
        sums = (weigh_positions(self.weights, kind) * self.judged).sum(axis=1, keepdims=True)
        return estimate_slate_snips(sums / np.maximum(counts, 1.0), counts, "independent", self.users)


def read_shadow_lists(folder: Path, generation: int) -> tuple[dict[str, list[int]], int, int]:
    """Return a generation's latest lists as a shadow by request id, the time of the first, and how many are empty by failure.

    folder: of the live store. At most MOST_JUDGED lists. The time is in unix milliseconds. Raises TrialError if no answer as a
    shadow is logged.
    """
    answer_filter = (pc.field("arm") == SHADOW_ARM) & (pc.field("generation") == generation)
    shadows = read_latest(folder, answer_filter, MOST_JUDGED, 0)
    if not len(shadows):
        raise TrialError(
            f"No answer of generation {generation} as a shadow is logged. Start an experiment with --mode shadow, or name a "
            "file of its answers with --answers."
        )
    lists = dict(zip(shadows["request_id"].to_pylist(), shadows["item_ids"].to_pylist(), strict=True))
    return lists, shadows["time_ms"][0].as_py(), int(has_mark(shadows, FAILED).sum())


def read_judged_answers(folder: Path, judged: Lists, from_ms: int) -> pa.Table:
    """Return the shown answers to the requests of the judged lists.

    folder: of the live store; from_ms: unix milliseconds, leave out files that were written before
    """
    request_ids = pa.array(judged, pa.string())
    parts = read_parts(folder, pc.field("arm") != SHADOW_ARM, from_ms)
    matching = [part.filter(pc.is_in(part["request_id"], request_ids)) for part in parts]
    return pa.concat_tables([SCHEMA.empty_table(), *matching])


def read_lists(path: Path) -> dict[str, list[int]]:
    """Read recorded answers (JSON Lines with request_id and item_ids). Return item ids, best first, by request id.

    Raises TrialError for a malformed line, and for a file without lines.
    """
    lists = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            answer = RecordedAnswer.model_validate_json(line, strict=True)
            lists[answer.request_id] = answer.item_ids
        except ValueError as error:
            raise TrialError(
                f'{path}: line {number} is {line[:80]!r}; expected an answer like {{"request_id": "…", "item_ids": [3, 1, 2]}}.'
            ) from error
    if not lists:
        raise TrialError(f"{path} has no line; expected one for each answer to judge. Choose another file.")
    return lists


def pair_answers(
    exposures: pa.Table,
    log: Iterable[tuple[np.ndarray, EventBatch]],
    judged: Lists,
    reward: Reward = "clicks",
    places: int | None = None,
) -> PairedAnswers:
    """Pair shown answers with the judged lists of their requests.

    exposures, log: as in trials/feedback.py; reward: what counts as an item's reward
    places: how many places to judge, from the top; None for all. Places behind the longest judged list are never judged

    Raises TrialError if no shown answer has a judged list, if those that have one are of too few users, or if all judged lists
    are empty.
    """
    exposures = exposures.filter(find_kept(exposures))
    pairs = zip(exposures["request_id"].to_pylist(), exposures["arm"].to_pylist(), strict=True)
    shown = exposures.filter(pa.array([request_id in judged and arm != SHADOW_ARM for request_id, arm in pairs], pa.bool_()))
    is_fallback = has_mark(shown, FALLBACK)
    shown, fallbacks = shown.filter(pa.array(~is_fallback)), int(is_fallback.sum())
    if not len(shown):
        left_out = f" but the gateway's popular items, which no generation chose ({fallbacks:,})" if fallbacks else ""
        raise TrialError(
            f"No shown answer{left_out} has a request id of the judged lists. Give them the request ids of the exposure log."
        )
    users = number_users(shown["user_id"])
    if users.max() + 1 < LEAST_EFFECTIVE_SAMPLES:
        raise TrialError(
            f"The {len(shown):,} shown answers to judge by are of {users.max() + 1} users; expected "
            f"{LEAST_EFFECTIVE_SAMPLES:.0f} or more, because the answers of one user depend on each other. "
            "Let the experiment run longer."
        )
    feedback = join_feedback(shown, log)
    lists = [judged[request_id] for request_id in shown["request_id"].to_pylist()]
    width = max(feedback.item_ids.shape[1], *map(len, lists))
    judged_ids = pad_rows(pa.chunked_array([pa.array(lists, pa.list_(pa.int64()))]), width, PAD_ID, np.int64)
    shown_ids = pad_rows(shown["item_ids"], width, PAD_ID, np.int64)
    propensities = pad_rows(shown["propensities"], width, np.nan, np.float64)
    propensities[np.arange(width) >= pc.list_value_length(shown["item_ids"]).to_numpy()[:, None]] = 1.0
    is_known = propensities > 0
    weights = compute_importance_weights(
        (is_known & (judged_ids == shown_ids)).astype(np.float64), np.where(is_known, propensities, 1.0)
    )
    earned = {"clicks": feedback.clicks, "conversions": feedback.conversions, "value": feedback.values}
    item_rewards = np.asarray(earned[reward], np.float64)
    rewards = np.pad(item_rewards, ((0, 0), (0, width - item_rewards.shape[1])))
    expected = expect_rewards(shown_ids, judged_ids, rewards, users)
    is_judged = judged_ids != PAD_ID
    longest = int((np.arange(1, width + 1) * is_judged.any(axis=0)).max(initial=0))
    if not longest:
        raise TrialError(f"All judged lists of the {len(shown):,} shown answers are empty; expected lists with items.")
    places = min(places or longest, longest)
    is_shown = shown_ids[:, :places] != PAD_ID
    unknown = float((is_shown & ~is_known[:, :places]).sum() / max(is_shown.sum(), 1))
    rewards, weights, expected = (values[:, :places] for values in (rewards, weights, expected))
    return PairedAnswers(rewards, weights, expected, is_judged[:, :places], users, unknown, fallbacks)


def expect_rewards(shown_ids: np.ndarray, judged_ids: np.ndarray, rewards: np.ndarray, users: np.ndarray) -> np.ndarray:
    """Return what each judged item is expected to earn at its place, float64 [answers, places]; 0 where there is none.

    Users are split into two halves. An expectation is the mean of what the item earned at this place from users of the other
    half, shrunk to the mean of the place. Cross-fitting: a model that had seen an answer would make the interval of the doubly
    robust estimate too narrow.

    shown_ids, judged_ids: int64 [answers, places]; rewards: float64 [answers, places], of the shown items
    users: int64 [answers], 0 … n - 1, of two or more
    """
    width = shown_ids.shape[1]
    items = np.unique(np.stack([shown_ids, judged_ids]), return_inverse=True)[1].reshape(2, -1, width)
    pairs, codes = np.unique(items * width + np.arange(width), return_inverse=True)
    shown, judged = codes.reshape(items.shape)
    expected = np.empty(judged.shape)
    for half in (0, 1):
        in_half = users % 2 == half
        counts = np.bincount(shown[~in_half].ravel(), minlength=len(pairs))
        sums = np.bincount(shown[~in_half].ravel(), rewards[~in_half].ravel(), minlength=len(pairs))
        prior_sums = PRIOR_SHOWN * rewards[~in_half].mean(axis=0)
        expected[in_half] = (sums[judged[in_half]] + prior_sums) / (counts[judged[in_half]] + PRIOR_SHOWN)
    return np.where(judged_ids == PAD_ID, 0.0, expected)
