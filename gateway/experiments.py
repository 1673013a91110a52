"""Which generation answers a user while an experiment runs: assignment, interleaving, shadow questions, forced generations.

A challenger that fails costs no answer: the champion is asked instead, `degraded` says `challenger`, and the exposure log keeps
the user in the challenger's arm. It is asked through a client of its own, so that its faults open no breaker of the champion's.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from serving.contract.errors import ArtifactError
from serving.live.experiment import CHALLENGER_ARM, INTERLEAVED_ARM, Experiment, FollowedExperiment
from trials.interleaving import CHALLENGER, NOBODY, draft_teams
from triton_recommender import InvalidRequest, ModelNotFound, Recommendations, RecommenderError
from triton_recommender.tensors import PAD_ID

log = logging.getLogger("gateway")

MOST_SHADOWS = 16  # questions to a shadow at a time; more are left out, so that a slow one does not pile up
FAILED = "challenger"  # in `degraded`: the challenger failed, and the champion answered

AskChampion = Callable[[], Awaitable[Recommendations]]
AskChallenger = Callable[[int], Awaitable[Recommendations]]  # of a generation


class Enrolment(NamedTuple):
    """A request's part in an experiment. experiment: None outside of any, where arm is "".

    challenger: the generation to ask, instead of the champion or beside it; None: the champion alone answers
    """

    experiment: Experiment | None = None
    arm: str = ""
    challenger: int | None = None

    @property
    def name(self) -> str:
        return self.experiment.name if self.experiment else ""

    @property
    def assignment(self) -> float:
        """The probability with which the user met this arm; 1 outside of experiments."""
        return self.experiment.assignment_of(self.arm) if self.experiment else 1.0


NO_EXPERIMENT = Enrolment()


@dataclass(frozen=True)
class Shown:
    """An answer as it is shown. teams: of its items where two generations share it; failed: the challenger gave no answer."""

    answer: Recommendations
    teams: list[int] | None = None
    failed: bool = False


class Experiments:
    """Follows the experiment of a live store. folder: of the store. Belongs to one event loop."""

    def __init__(self, folder: Path) -> None:
        self._followed = FollowedExperiment(folder)
        self._shadows: set[asyncio.Task] = set()

    def current(self) -> Experiment | None:
        """Return the experiment, None where there is none or its file cannot be read."""
        try:
            return self._followed.current()
        except ArtifactError as error:
            log.warning("the champion answers everybody: %s", error)
            return None

    def enrol(self, user_id: int | None, forced: int | None, champion: int) -> Enrolment:
        """Return a request's part. user_id: on the wire, None of nobody, whom no experiment takes; forced: a generation."""
        if forced is not None:
            return Enrolment(challenger=None if forced == champion else forced)
        experiment = self.current()
        if experiment is None or user_id is None or not experiment.runs:
            return NO_EXPERIMENT
        challenger = experiment.challenger if experiment.enrols(user_id) else None
        return Enrolment(experiment, experiment.arm_of(user_id), challenger)

    async def answer(
        self,
        enrolment: Enrolment,
        request_id: str,
        ask_champion: AskChampion,
        ask_challenger: AskChallenger,
        log_shadow: Callable[[Recommendations | None, float], None],
    ) -> Shown:
        """Return what a user is shown. Raises what the champion's client raises, and InvalidRequest for a forced generation.

        log_shadow: keeps the answer of a shadow, None where it gave none, and its seconds
        """
        if enrolment.challenger is None:
            return Shown(await ask_champion())
        asked = ask_challenger(enrolment.challenger)
        if not enrolment.experiment:
            return Shown(await _forced(asked, enrolment.challenger))
        if enrolment.arm == CHALLENGER_ARM:
            found = await _attempt(asked)
            return Shown(await ask_champion(), failed=True) if found is None else Shown(found)
        if enrolment.arm == INTERLEAVED_ARM:
            champions, challengers = await asyncio.gather(ask_champion(), _attempt(asked))
            return Shown(champions, failed=True) if challengers is None else interleave(champions, challengers, request_id)
        self._ask_shadow(asked, log_shadow)
        return Shown(await ask_champion())

    def close(self) -> None:
        for task in self._shadows:
            task.cancel()

    def _ask_shadow(self, asked: Awaitable[Recommendations], log_shadow: Callable) -> None:
        async def ask() -> None:
            began_s = time.monotonic()
            found = await _attempt(asked)
            log_shadow(found, time.monotonic() - began_s)

        if len(self._shadows) >= MOST_SHADOWS:
            asked.close()  # type: ignore[attr-defined]  # a coroutine that is never awaited
            return
        task = asyncio.create_task(ask())
        self._shadows.add(task)
        task.add_done_callback(self._shadows.discard)


def interleave(champions: Recommendations, challengers: Recommendations, seed: str) -> Shown:
    """Return one list of both generations' items, each with the score that its team gave it.

    The coins alone decide down to the first place that either server drew; from there on, propensities are unknown.
    """
    length = max(len(champions), len(challengers))
    first, second = (
        np.pad(np.array(answer.item_ids, np.int64), (0, length - len(answer)), constant_values=PAD_ID)
        for answer in (champions, challengers)
    )
    items, teams, chances = draft_teams(first, second, seed)
    scores = [dict(found) for found in (champions, challengers)]
    drafted = [(item, team) for item, team in zip(items.tolist(), teams.tolist(), strict=True) if team != NOBODY]
    known = min(count_certain(champions), count_certain(challengers))
    chances_known = [chance if place < known else None for place, chance in enumerate(chances[: len(drafted)].tolist())]
    answer = replace(
        champions,
        item_ids=tuple(item for item, _ in drafted),
        scores=tuple(scores[team == CHALLENGER][item] for item, team in drafted),
        degraded=champions.degraded | challengers.degraded,
        propensities=tuple(chances_known),
        names=(),
        titles=(),
    )
    return Shown(answer, [team for _, team in drafted])


def count_certain(answer: Recommendations) -> int:
    """Return the number of places before the first that the server drew, or may have drawn."""
    return next((place for place, chance in enumerate(answer.propensities) if chance != 1.0), len(answer.propensities))


async def _forced(asked: Awaitable[Recommendations], generation: int) -> Recommendations:
    try:
        return await asked
    except ModelNotFound as error:
        raise InvalidRequest(
            f"generation is {generation}, which the server does not hold; expected the one that it serves, or the challenger "
            "of a running experiment."
        ) from error


async def _attempt(asked: Awaitable[Recommendations]) -> Recommendations | None:
    """Return the challenger's answer, None where it failed. What no server could answer is raised."""
    try:
        return await asked
    except InvalidRequest:
        raise
    except Exception as error:  # whatever it is: the champion answers
        log.warning("the challenger failed: %s", error, exc_info=not isinstance(error, RecommenderError))
        return None
