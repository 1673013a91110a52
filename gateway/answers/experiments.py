"""Choose the generation that answers a user while an experiment runs: assignment, interleaving, shadows, forced generations.

A failed challenger costs no answer: the champion answers instead, `degraded` says `challenger`, and the exposure log keeps
the user in the challenger's arm. The challenger has a client of its own, so that its failures open no circuit breaker of the
champion's client.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.errors import ArtifactError
from serving.live.experiment import CHALLENGER_ARM, CHAMPION_ARM, INTERLEAVED_ARM, Experiment, FollowedExperiment
from trials.interleaving import CHALLENGER, CHAMPION, NOBODY, draft_teams
from triton_recommender import InvalidRequest, ModelNotFound, Recommendations, RecommenderError
from triton_recommender.tensors import PAD_ID

log = logging.getLogger("gateway")

MOST_SHADOWS = 16  # shadow requests in flight; further ones are not sent, so that they do not pile up at a slow challenger

Ask = Callable[[], Awaitable[Recommendations]]


class Enrolment(NamedTuple):
    """A request's part in an experiment. Outside of experiments `experiment` is None and `arm` is "".

    challenger: the generation to ask instead of the champion, or in addition to it; None: only the champion answers
    forced: whether the caller demanded the generation; such answers of testers are not logged, as no user was assigned to them
    """

    experiment: Experiment | None = None
    arm: str = ""
    challenger: int | None = None
    forced: bool = False

    @property
    def name(self) -> str:
        return self.experiment.name if self.experiment else ""

    @property
    def assignment(self) -> float:
        """The probability with which the user was assigned to this arm; 1 outside of experiments."""
        return self.experiment.find_assignment(self.arm) if self.experiment else 1.0

    @property
    def is_shadow(self) -> bool:
        """Whether the challenger is asked and not shown."""
        return self.challenger is not None and self.arm == CHAMPION_ARM

    def describe_difference(self, explained: int) -> str | None:
        """Return a sentence if the user is shown items of another generation than the explained one, None otherwise."""
        if self.experiment is None:
            return None
        shown_generations = self.list_shown(self.experiment.champion)
        if shown_generations == (explained,):
            return None
        items = f"items of generation {' mixed with those of '.join(map(str, shown_generations))}"
        return f"This explains generation {explained}. In the experiment {self.name!r} this user is shown {items}."

    def list_shown(self, champion: int) -> tuple[int, ...]:
        """Return the generations whose items the user is shown. champion: the served one"""
        if self.challenger is None or self.is_shadow:
            return (champion,)
        return (self.challenger, champion) if self.arm == INTERLEAVED_ARM else (self.challenger,)


NO_EXPERIMENT = Enrolment()


@dataclass(frozen=True)
class Shown:
    """An answer as it is shown.

    teams: of an interleaved answer, the team of each item (trials/interleaving.py); None for other answers
    failed: whether the challenger gave no answer, so that the champion's is shown
    """

    answer: Recommendations
    teams: list[int] | None = None
    failed: bool = False


class Experiments:
    """Follows the experiment of the live store in `folder`. Belongs to one event loop."""

    def __init__(self, folder: Path) -> None:
        self._followed = FollowedExperiment(folder)
        self._shadows: set[asyncio.Task] = set()

    def read_current(self) -> Experiment | None:
        """Return the experiment; None if there is none, or if its file cannot be read, which is logged."""
        try:
            return self._followed.read_current()
        except ArtifactError as error:
            log.warning("the champion answers everybody: %s", error)
            return None

    def list_served(self, champion: int) -> set[int]:
        """Return the generations that may answer: the champion, and the challenger while an experiment runs."""
        experiment = self.read_current()
        return {champion, experiment.challenger} if experiment and experiment.runs else {champion}

    async def answer(
        self,
        enrolment: Enrolment,
        request_id: str,
        ask_champion: Ask,
        ask_challenger: Callable[[int], Awaitable[Recommendations]],
        log_shadow: Callable[[Recommendations | None, float], None],
        list_pins: Callable[[], Collection[tuple[int, int]]],
    ) -> Shown:
        """Return what a user is shown. Raises the errors of the champion's client.

        A forced generation that the server does not hold raises InvalidRequest. ask_challenger: takes a generation
        log_shadow: called with the answer of a shadow (None if it failed) and its latency in seconds, but not for a request
            that the challenger refuses as invalid
        list_pins: returns the pins of the champion's rules
        """
        if enrolment.challenger is None:
            return Shown(await ask_champion())
        call = partial(ask_challenger, enrolment.challenger)
        if not enrolment.experiment:
            return Shown(await _ask_forced(call, enrolment.challenger))
        if enrolment.arm == CHALLENGER_ARM:
            answer = await _attempt(call)
            return Shown(await ask_champion(), failed=True) if answer is None else Shown(answer)
        if enrolment.arm == INTERLEAVED_ARM:
            champions, challengers = await asyncio.gather(ask_champion(), _attempt(call))
            if challengers is None:
                return Shown(champions, failed=True)
            return interleave(champions, challengers, request_id, list_pins())
        self._start_shadow(call, log_shadow)
        return Shown(await ask_champion())

    def close(self) -> None:
        for task in self._shadows:
            task.cancel()

    def _start_shadow(self, call: Ask, log_shadow: Callable[[Recommendations | None, float], None]) -> None:
        async def ask() -> None:
            began_s = time.monotonic()
            answer: Recommendations | None = None
            try:
                answer = await call()
            except InvalidRequest as error:  # probably the caller's fault, which must not count against the challenger
                _log_failure(error)
                return
            except Exception as error:
                _log_failure(error)
            log_shadow(answer, time.monotonic() - began_s)

        if len(self._shadows) >= MOST_SHADOWS:
            return
        task = asyncio.create_task(ask())
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)


def find_discarded(experiment: Experiment | None) -> int | None:
    """Return the challenger of the latest experiment if it ended without a promotion; None otherwise."""
    return None if experiment is None or experiment.state in ("running", "promoted") else experiment.challenger


def enrol(experiment: Experiment | None, user_id: int | None, forced: int | None, champion: int) -> Enrolment:
    """Return a request's part in the latest experiment.

    user_id: int64 id on the wire; None, for a request without a user, takes part in no experiment
    forced: the generation that the caller demands; None: the experiment decides. champion: the served generation
    """
    if forced is not None:
        return Enrolment(challenger=None if forced == champion else forced, forced=True)
    if experiment is None or user_id is None or not experiment.runs:
        return NO_EXPERIMENT
    challenger = experiment.challenger if experiment.enrols(user_id) else None
    return Enrolment(experiment, experiment.find_arm(user_id), challenger)


def interleave(
    champions: Recommendations, challengers: Recommendations, seed: str, pins: Collection[tuple[int, int]] = ()
) -> Shown:
    """Return one list drafted from both generations' items, each with score and sources of the generation that it is from.

    seed: of the coin flips. They alone decide the places before the first that either server drew at random; from there on,
    propensities are unknown. pins: as in `draft_teams`
    """
    length = max(len(champions), len(challengers))
    first, second = (
        np.pad(np.array(answer.item_ids, np.int64), (0, length - len(answer)), constant_values=PAD_ID)
        for answer in (champions, challengers)
    )
    items, teams, probabilities = draft_teams(first, second, seed, pins)
    scores = [dict(answer) for answer in (champions, challengers)]
    sources = [dict(zip(answer.item_ids, answer.sources, strict=False)) for answer in (champions, challengers)]
    scores.append(scores[CHALLENGER] | scores[CHAMPION])  # for BOTH: only one list may have a pinned item
    sources.append(sources[CHALLENGER] | sources[CHAMPION])
    drafted = [(item, team) for item, team in zip(items.tolist(), teams.tolist(), strict=True) if team != NOBODY]
    n_known = min(count_certain(champions), count_certain(challengers))
    chances = [chance if place < n_known else None for place, chance in enumerate(probabilities[: len(drafted)].tolist())]
    answer = replace(
        champions,
        item_ids=tuple(item for item, _ in drafted),
        scores=tuple(scores[team][item] for item, team in drafted),
        degraded=champions.degraded | challengers.degraded,
        propensities=tuple(chances),
        sources=tuple(sources[team][item] for item, team in drafted) if all(sources) else (),
        names=(),
        titles=(),
    )
    return Shown(answer, [team for _, team in drafted])


def count_certain(answer: Recommendations) -> int:
    """Return the number of places before the first whose item the server drew, or may have drawn, at random."""
    return next((place for place, chance in enumerate(answer.propensities) if chance != 1.0), len(answer.propensities))


async def _ask_forced(call: Ask, generation: int) -> Recommendations:
    try:
        return await call()
    except ModelNotFound as error:
        raise InvalidRequest(
            f"generation is {generation}, which the server does not hold; expected the one that it serves, or the challenger "
            "of a running experiment."
        ) from error


async def _attempt(call: Ask) -> Recommendations | None:
    """Return the challenger's answer; None if it failed, which is logged.

    A request that the challenger refuses as invalid goes to the champion too, which may know other context columns.
    """
    try:
        return await call()
    except Exception as error:  # any failure: the champion answers instead
        _log_failure(error)
        return None


def _log_failure(error: Exception) -> None:
    log.warning("the challenger failed: %s", error, exc_info=not isinstance(error, RecommenderError))
