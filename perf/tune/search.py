"""Successive halving: everybody once, the better half twice as long, until few are left. Knows nothing of servers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from perf.figure import Ratio
from perf.slo import Bound, judge
from perf.tune.space import Changes

Metrics = dict[str, float]  # keys as in slo.toml
RATES = ("peak_rate",)  # more is better; of everything else less
HEAT = 3  # candidates served at a time, beside the current settings
FINAL_TURNS = 5


@dataclass(frozen=True)
class Trial:
    """One candidate and what was measured of it, turn by turn, beside the current settings in the same turns.

    answers: "" when it answers as recorded, else what differs.
    """

    changes: Changes
    own: tuple[Metrics, ...] = ()
    current: tuple[Metrics, ...] = ()
    answers: str = ""

    def joined(self, later: Trial) -> Trial:
        own, current = self.own + later.own, self.current + later.current
        return replace(self, own=own, current=current, answers=self.answers or later.answers)

    def gain(self, goal: str) -> Ratio:
        """How many times better than the current settings, by turn."""
        own, current = [turn[goal] for turn in self.own], [turn[goal] for turn in self.current]
        return Ratio(metric=goal, a=current, b=own) if goal in RATES else Ratio(metric=goal, a=own, b=current)

    def broken(self, slo: dict[str, Bound]) -> list[str]:
        """Objectives that the medians of its turns break."""
        return broken(self.own, slo)


def broken(turns: Sequence[Metrics], slo: dict[str, Bound]) -> list[str]:
    medians = {key: float(np.median([turn[key] for turn in turns])) for key in turns[0]}
    return [verdict.key for verdict in judge(slo, medians) if not verdict.kept]


Measure = Callable[[Sequence[Changes], int], list[Trial]]  # (candidates of a heat, turns) -> a trial each


@dataclass
class Outcome:
    """rungs: the trials of each round, best first; winner: None when nothing is surely better than the current settings."""

    goal: str
    rungs: list[list[Trial]] = field(default_factory=list)
    winner: Trial | None = None
    complete: bool = True  # False: the time was over first

    @property
    def best(self) -> list[Trial]:
        return self.rungs[-1] if self.rungs else []


def search(
    candidates: Sequence[Changes],
    measure: Measure,
    slo: dict[str, Bound],
    goal: str,
    time_is_over: Callable[[], bool],
    saved: Callable[[Outcome], None] = lambda _: None,
) -> Outcome:
    """goal: a key of Metrics; slo: bounds of keys of Metrics; time_is_over is asked before every heat.

    Every rung has half the candidates and twice the turns; the last one heat of HEAT, which are asked until each has
    FINAL_TURNS. `saved` is called after every heat.
    """
    outcome, known, turns = Outcome(goal), {}, 1
    remaining = list(candidates)
    while True:
        last = len(remaining) <= HEAT
        outcome.rungs.append([])
        for heat in _heats(remaining):
            if time_is_over():
                outcome.complete = False
                break
            asked = max(turns, FINAL_TURNS - _least_turns(known, heat)) if last else turns
            for trial in measure(heat, asked):
                key = repr(trial.changes)
                known[key] = known[key].joined(trial) if key in known else trial
                outcome.rungs[-1].append(known[key])
            saved(outcome)
        outcome.rungs[-1].sort(key=lambda trial: rank(trial, slo, goal))
        if last or not outcome.complete:
            break
        remaining = [trial.changes for trial in outcome.rungs[-1][: max(len(remaining) // 2, HEAT)]]
        turns *= 2
    outcome.rungs = [rung for rung in outcome.rungs if rung]
    outcome.winner = next((trial for trial in outcome.best if surely_better(trial, slo, goal)), None)
    saved(outcome)
    return outcome


def rank(trial: Trial, slo: dict[str, Bound], goal: str) -> tuple:
    """Sorts the best first: equal answers, then fewer broken objectives, then the larger gain."""
    return bool(trial.answers), len(trial.broken(slo)), -trial.gain(goal).median


def surely_better(trial: Trial, slo: dict[str, Bound], goal: str) -> bool:
    """Asked often enough, better in every turn, with equal answers, and nothing broken that the current settings keep."""
    kept_now = set(slo) - set(broken(trial.current, slo))
    return (
        len(trial.own) >= FINAL_TURNS
        and trial.gain(goal).low > 1.0
        and not trial.answers
        and not kept_now & set(trial.broken(slo))
    )


def _heats(candidates: Sequence[Changes]) -> Iterator[Sequence[Changes]]:
    for start in range(0, len(candidates), HEAT):
        yield candidates[start : start + HEAT]


def _least_turns(known: dict[str, Trial], heat: Sequence[Changes]) -> int:
    return min((len(known[repr(changes)].own) if repr(changes) in known else 0) for changes in heat)
