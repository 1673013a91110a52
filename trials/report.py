"""Break feedback down: what users did with answers by generation and arm, and with shown items by their groups."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from live.exposures import SOURCE_NAMES
from serving.contract.artifacts import find_stage_folder
from serving.contract.generations import read_pinned_generation
from serving.live.experiment import INTERLEAVED_ARM
from trials.feedback import Feedback

Groups = Iterable[tuple[str | int, np.ndarray]]  # name, and bool [answers, K]: the items in it
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


@dataclass
class Tally:
    """Sums over answers or shown items. items: those that the answers show, each once"""

    count: int = 0
    clicked: int = 0
    converted: int = 0
    value: float = 0.0
    degraded: int = 0
    items: set[int] = field(default_factory=set)

    def add(self, clicks: np.ndarray, conversions: np.ndarray, values: np.ndarray) -> None:
        """Add answers or items, [n] each: whether it was clicked and converted, and its value."""
        self.count += len(clicks)
        self.clicked, self.converted = self.clicked + int(clicks.sum()), self.converted + int(conversions.sum())
        self.value += float(values.sum())

    def summarise(self) -> Summary:
        """Return the rates of one or more answers or items."""
        rates = (total / self.count for total in (self.clicked, self.converted, self.value))
        return Summary(self.count, self.clicked, self.converted, *rates)

    def summarise_answers(self) -> AnswerSummary:
        """Return the rates of one or more answers."""
        return AnswerSummary(**vars(self.summarise()), degraded=self.degraded / self.count, coverage=len(self.items))


def summarise(parts: Iterable[Feedback], by: By, repo: Path) -> Mapping[str, Summary]:
    """Return what users did, by group; categories are those of the pinned generation. Raises TrialError.

    parts: of a log that may not fit in memory as a whole
    """
    if by == "position":
        return summarise_items(parts, group_positions)
    if by == "category":
        return summarise_items(parts, group_categories(repo, read_pinned_generation(repo)))
    if by == "source":
        return summarise_items(parts, group_sources)
    return summarise_answers(parts, by)


def summarise_answers(parts: Iterable[Feedback], by: Literal["generation", "arm"]) -> dict[str, AnswerSummary]:
    """Return what users did with the answers of each generation, or of each arm as EXPERIMENT/ARM.

    Interleaved answers are a group of their own beside the champion's, whose generation they are logged with.
    """
    tallies: dict[Any, Tally] = defaultdict(Tally)
    for feedback in parts:
        if by == "generation":
            groups = 2 * feedback.generations + (feedback.arms == INTERLEAVED_ARM)
        else:
            pairs = zip(feedback.experiments, feedback.arms, strict=True)
            groups = np.array([f"{name}/{arm}" if name else NO_ARM for name, arm in pairs], object)
        for group in np.unique(groups):
            answers = feedback.take(groups == group)
            tally = tallies[group]
            tally.add(*(answers.compute_rewards(metric) for metric in ("ctr", "conversion", "value")))
            tally.degraded += int(answers.degraded.sum())
            tally.items.update(np.unique(answers.item_ids[answers.shown]).tolist())
    name = name_generation if by == "generation" else str
    return {name(group): tallies[group].summarise_answers() for group in sorted(tallies)}


def name_generation(code: int) -> str:
    """Return the name of a group of answers. code: twice the generation, and 1 more for interleaved ones"""
    return f"{code // 2}, interleaved" if code % 2 else str(code // 2)


def summarise_items(parts: Iterable[Feedback], find_groups: Callable[[Feedback], Groups]) -> dict[str, Summary]:
    """Return what users did with the shown items of each group."""
    tallies: dict[Any, Tally] = defaultdict(Tally)
    for feedback in parts:
        for group, members in find_groups(feedback):
            chosen = feedback.shown & members
            if chosen.any():
                tallies[group].add(feedback.clicks[chosen], feedback.conversions[chosen], feedback.values[chosen])
    return {str(group): tallies[group].summarise() for group in sorted(tallies, key=lambda group: (group == NO_SOURCE, group))}


def group_positions(feedback: Feedback) -> Groups:
    """Yield the items at each place of the lists. Places count from 1."""
    places = np.arange(feedback.shown.shape[1])
    return ((place + 1, np.broadcast_to(places == place, feedback.shown.shape)) for place in places.tolist())


def group_sources(feedback: Feedback) -> Groups:
    """Yield the items that each source proposed. An item counts for each of its sources."""
    for bit, name in SOURCE_NAMES.items():
        yield name, feedback.sources & bit != 0
    yield NO_SOURCE, feedback.sources == 0


def group_categories(repo: Path, generation: int) -> Callable[[Feedback], Groups]:
    """Return a function that yields the items of each category that a generation knows. Raises ArtifactError."""
    # They take a second to import, and neither a guard nor the progress of an experiment needs them.
    from serving.stages.features.ids import ItemIndex
    from serving.stages.live.content import NO_GROUP, Content

    folder = find_stage_folder(repo, "rerank", generation)
    content = Content.load(folder)
    names = [*content.names[CATEGORY], UNKNOWN]
    codes = np.append(np.where(content.codes[CATEGORY] == NO_GROUP, len(names) - 1, content.codes[CATEGORY]), len(names) - 1)
    items = ItemIndex.load(folder / "item_ids.npy")

    def group(feedback: Feedback) -> Groups:
        positions = items.find_positions(feedback.item_ids.ravel())
        item_codes = codes[np.minimum(positions, len(codes) - 1)].reshape(feedback.item_ids.shape)  # later ones are new items
        return ((names[code], item_codes == code) for code in np.unique(item_codes[feedback.shown]).tolist())

    return group
