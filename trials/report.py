"""Break feedback down: what users did with answers by generation and arm, and with shown items by their groups."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from live.exposures import SOURCE_NAMES
from serving.contract.artifacts import find_stage_folder
from serving.contract.generations import read_pinned_generation
from serving.stages.features.ids import ItemIndex
from serving.stages.live.content import NO_GROUP, Content
from trials.feedback import Feedback
from trials.off_policy import TrialError

By = Literal["generation", "arm", "position", "category", "source"]
CATEGORY = 0  # in Content: its first group
UNKNOWN = "unknown"  # category of an item without one, or newer than the generation
NO_ARM = "none"  # answers outside of experiments
NO_SOURCE = "none"  # items without a positive term, or logged without their sources


@dataclass(frozen=True)
class Summary:
    """User actions. count: answers or shown items; clicked, converted: how many of them; value: the mean of one."""

    count: int
    clicked: int
    converted: int
    click_rate: float
    conversion_rate: float
    value: float


@dataclass(frozen=True)
class AnswerSummary(Summary):
    """degraded: share of the answers; coverage: distinct items shown."""

    degraded: float
    coverage: int


def summarise(feedback: Feedback, by: By, repo: Path) -> Mapping[str, Summary]:
    """Return what users did, by group; categories are those of the pinned generation. Raises TrialError."""
    if by == "position":
        return summarise_positions(feedback)
    if by == "category":
        return summarise_categories(feedback, repo, read_pinned_generation(repo))
    if by == "source":
        return summarise_sources(feedback)
    return summarise_answers(feedback, by)


def summarise_answers(feedback: Feedback, by: Literal["generation", "arm"]) -> dict[str, AnswerSummary]:
    """Return what users did with the answers of each generation, or of each arm as EXPERIMENT/ARM."""
    if by == "generation":
        groups = feedback.generations
    else:
        pairs = zip(feedback.experiments, feedback.arms, strict=True)
        groups = np.array([f"{name}/{arm}" if name else NO_ARM for name, arm in pairs], object)
    return {str(group): _summarise(feedback.take(groups == group)) for group in np.unique(groups)}


def _summarise(answers: Feedback) -> AnswerSummary:
    summary = _count(answers.compute_rewards("ctr"), answers.compute_rewards("conversion"), answers.compute_rewards("value"))
    coverage = len(np.unique(answers.item_ids[answers.shown]))
    return AnswerSummary(**vars(summary), degraded=float(answers.degraded.mean()), coverage=coverage)


def summarise_positions(feedback: Feedback) -> dict[str, Summary]:
    """Return what users did with the items at each place of the shown lists. Places count from 1."""
    places = np.broadcast_to(np.arange(1, feedback.shown.shape[1] + 1), feedback.shown.shape)
    return _summarise_items(feedback, places)


def summarise_categories(feedback: Feedback, repo: Path, generation: int) -> dict[str, Summary]:
    """Return what users did with the shown items of each category that a generation knows.

    Raises TrialError for a generation that was exported without its items' categories.
    """
    folder = find_stage_folder(repo, "rerank", generation)
    content = Content.load(folder)
    if content is None:
        raise TrialError(f"Generation {generation} does not know its items' categories: an older version exported it.")
    names = np.array([*content.names[CATEGORY], UNKNOWN], object)
    codes = np.append(np.where(content.codes[CATEGORY] == NO_GROUP, len(names) - 1, content.codes[CATEGORY]), len(names) - 1)
    positions = ItemIndex.load(folder / "item_ids.npy").find_positions(feedback.item_ids.ravel())
    known = np.minimum(positions, len(codes) - 1)  # later positions are those of new items
    return _summarise_items(feedback, names[codes[known]].reshape(feedback.item_ids.shape))


def summarise_sources(feedback: Feedback) -> dict[str, Summary]:
    """Return what users did with the shown items that each source proposed. An item counts for each of its sources."""
    members = {name: feedback.shown & (feedback.sources & bit != 0) for bit, name in SOURCE_NAMES.items()}
    members[NO_SOURCE] = feedback.shown & (feedback.sources == 0)
    return {name: _count_items(feedback, own) for name, own in members.items() if own.any()}


def _summarise_items(feedback: Feedback, groups: np.ndarray) -> dict[str, Summary]:
    """Return what users did with the shown items of each group. groups: [answers, K]"""
    kinds = np.unique(groups[feedback.shown])
    return {str(group): _count_items(feedback, feedback.shown & (groups == group)) for group in kinds}


def _count_items(feedback: Feedback, chosen: np.ndarray) -> Summary:
    """Return what users did with the chosen items. chosen: bool [answers, K]"""
    return _count(feedback.clicks[chosen], feedback.conversions[chosen], feedback.values[chosen])


def _count(clicks: np.ndarray, conversions: np.ndarray, values: np.ndarray) -> Summary:
    """Summarise n >= 1 answers or items. clicks, conversions, values: [n]"""
    rates = float(clicks.mean()), float(conversions.mean()), float(values.mean())
    return Summary(len(clicks), int(clicks.sum()), int(conversions.sum()), *rates)
