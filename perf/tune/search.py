"""The settings that are searched, and the search: successive halving, which knows nothing of servers.

serving.preprocess.queue_delay_us = 300        [serving.preprocess] queue_delay_us = 300
compute.rank_threads = 2                       [compute] rank_threads = 2
server.threads = 2                             not an export setting: `python -m server start --threads 2`

Every candidate is measured once, the better half twice as long, and so on until few are left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from export.settings import Settings
from perf.ratio import Ratio
from perf.slo import Bound, judge
from serving.contract.tensors import ENSEMBLE, STAGES

Changes = dict[str, Any]  # dotted key -> value that differs from the current settings; {}: the current settings
Space = dict[str, tuple[Any, ...]]  # dotted key -> values worth a try

SERVER_THREADS = "server.threads"
QUEUE_DELAYS_US = (0, 100, 300, 1_000)
PREFERRED_BATCHES: tuple[list[int], ...] = ([], [16], [8, 32], [4, 8, 16, 32], [32, 64])
COMBINED = 3  # most settings changed by one combination
DRAWS_PER_CANDIDATE = 100  # most random draws for each candidate that is wanted


def make_space(settings: Settings, layout: str, efforts: tuple[int, ...], cores: int) -> Space:
    """Return the values of each setting other than the current one.

    layout: of the export, such as "ensemble"; efforts: those of the index with enough recall; cores: of the machine
    """
    first = STAGES[0] if layout == "ensemble" else ENSEMBLE
    many = ("retrieve", "rank") if layout == "ensemble" else (ENSEMBLE,)
    all_models = "serving" if layout == "ensemble" else f"serving.{ENSEMBLE}"
    counts, most = tuple(range(1, cores + 1)), settings.merge_serving()[first].max_batch_size
    space = {
        f"serving.{first}.queue_delay_us": QUEUE_DELAYS_US,
        f"{all_models}.preferred_batch_sizes": tuple(sizes for sizes in PREFERRED_BATCHES if max(sizes, default=0) <= most),
        **{f"serving.{model}.instances": counts for model in many},
        "compute.rank_threads": counts,
        SERVER_THREADS: counts,
        "compute.index_effort": efforts,
    }
    others = {key: tuple(each for each in values if each != read_current(settings, key)) for key, values in space.items()}
    return {key: values for key, values in others.items() if values}


def read_current(settings: Settings, key: str) -> Any:
    """Return a setting's current value; 1 for the server's threads, its default."""
    if key == SERVER_THREADS:
        return 1
    section, *path = key.split(".")
    if section == "compute":
        return getattr(settings.compute, path[0])
    model = path[0] if len(path) == 2 else STAGES[0]  # the same in all stages
    value = getattr(settings.merge_serving()[model], path[-1])
    return list(value) if isinstance(value, tuple) else value


def draw_candidates(space: Space, count: int, rng: np.random.Generator) -> list[Changes]:
    """Return at most `count` different candidates: every setting changed alone, as many as fit, then random combinations."""
    alone: list[Changes] = [{key: value} for key, values in space.items() for value in values]
    chosen = [alone[i] for i in sorted(rng.permutation(len(alone))[:count])]
    for _ in range(DRAWS_PER_CANDIDATE * count):
        if len(chosen) == count or len(space) < 2:
            break
        keys = rng.permutation(list(space))[: int(rng.integers(2, COMBINED + 1))]
        candidate = {str(key): space[key][int(rng.integers(len(space[key])))] for key in sorted(keys)}
        if candidate not in chosen:
            chosen.append(candidate)
    return chosen


def apply_changes(document: dict[str, Any], changes: Changes) -> dict[str, Any]:
    """Return an export config (parsed TOML) with the changes applied, without the server's own settings."""
    changed = {name: apply_changes(value, {}) if isinstance(value, dict) else value for name, value in document.items()}
    for key, value in changes.items():
        if key == SERVER_THREADS:
            continue
        *sections, name = key.split(".")
        table = changed
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return changed


def describe_changes(changes: Changes) -> str:
    return ", ".join(f"{key} = {value}" for key, value in changes.items()) or "current settings"


Metrics = dict[str, float]  # keys as in slo.toml; without latencies where no request of the open loop was answered
RATES = ("peak_rate",)  # more is better; of everything else less
HEAT = 3  # candidates served at a time, beside the current settings
FINAL_TURNS = 5


@dataclass(frozen=True)
class Trial:
    """One candidate's measurements.

    turns: its metrics, turn by turn; current_turns: those of the current settings in the same turns
    answers: "" when its answers are the recorded ones, else the difference
    """

    changes: Changes
    turns: tuple[Metrics, ...] = ()
    current_turns: tuple[Metrics, ...] = ()
    answers: str = ""

    def join(self, later: Trial) -> Trial:
        """Return this trial with the turns of a later one of the same candidate."""
        turns, current_turns = self.turns + later.turns, self.current_turns + later.current_turns
        return replace(self, turns=turns, current_turns=current_turns, answers=self.answers or later.answers)

    def compute_gain(self, goal: str) -> Ratio:
        """Return the improvement over the current settings, by turn; 0 in a turn in which either did not measure the goal."""
        candidate = [turn.get(goal, 0.0 if goal in RATES else np.inf) for turn in self.turns]
        current = [turn.get(goal, np.inf if goal in RATES else 0.0) for turn in self.current_turns]
        return Ratio(metric=goal, a=current, b=candidate) if goal in RATES else Ratio(metric=goal, a=candidate, b=current)

    def find_broken(self, slo: dict[str, Bound]) -> list[str]:
        """Return the objectives that the candidate breaks."""
        return find_broken(self.turns, slo)


def find_broken(turns: Sequence[Metrics], slo: dict[str, Bound]) -> list[str]:
    """Return the keys of the objectives that the medians of turns break, or that one of the turns did not measure."""
    return [verdict.key for verdict in judge(slo, find_medians(turns)) if not verdict.kept]


def find_medians(turns: Sequence[Metrics]) -> Metrics:
    """Return the medians of the metrics that every turn measured."""
    measured = [key for key in turns[0] if all(key in turn for turn in turns)]
    return {key: float(np.median([turn[key] for turn in turns])) for key in measured}


Measure = Callable[[Sequence[Changes], int], list[Trial]]  # (candidates of a heat, turns) -> a trial each


@dataclass
class Outcome:
    """Result of a search.

    rungs: the trials of each round, best first; winner: None when none is surely better than the current settings
    """

    goal: str
    rungs: list[list[Trial]] = field(default_factory=list)
    winner: Trial | None = None
    complete: bool = True  # False: the time ran out before the end

    @property
    def best(self) -> list[Trial]:
        return self.rungs[-1] if self.rungs else []


def search(
    candidates: Sequence[Changes],
    measure: Measure,
    slo: dict[str, Bound],
    goal: str,
    time_is_over: Callable[[], bool],
    save: Callable[[Outcome], None],
) -> Outcome:
    """Search by successive halving. goal: a key of Metrics; slo: bounds of Metrics; time_is_over: checked before every heat.

    Every rung has half the candidates and twice the turns. The last one is a heat of HEAT candidates, measured until each has
    FINAL_TURNS. `save` is called after every heat.
    """
    outcome, turns = Outcome(goal), 1
    trials: dict[str, Trial] = {}
    remaining = list(candidates)
    while True:
        last = len(remaining) <= HEAT
        outcome.rungs.append([])
        for heat in _split_into_heats(remaining):
            if time_is_over():
                outcome.complete = False
                break
            least = min(len(trials[repr(changes)].turns) if repr(changes) in trials else 0 for changes in heat)
            n_turns = max(turns, FINAL_TURNS - least) if last else turns
            for trial in measure(heat, n_turns):
                key = repr(trial.changes)
                trials[key] = trials[key].join(trial) if key in trials else trial
                outcome.rungs[-1].append(trials[key])
            save(outcome)
        outcome.rungs[-1].sort(key=lambda trial: make_sort_key(trial, slo, goal))
        if last or not outcome.complete:
            break
        remaining = [trial.changes for trial in outcome.rungs[-1][: max(len(remaining) // 2, HEAT)]]
        turns *= 2
    outcome.rungs = [rung for rung in outcome.rungs if rung]
    outcome.winner = next((trial for trial in outcome.best if is_surely_better(trial, slo, goal)), None)
    save(outcome)
    return outcome


def make_sort_key(trial: Trial, slo: dict[str, Bound], goal: str) -> tuple:
    """Return a sort key, best first: equal answers, then fewer broken objectives, then the larger gain."""
    return bool(trial.answers), len(trial.find_broken(slo)), -trial.compute_gain(goal).median


def is_surely_better(trial: Trial, slo: dict[str, Bound], goal: str) -> bool:
    """Return whether a candidate is better in every turn, of at least FINAL_TURNS.

    Its answers must equal the recorded ones, and it must break no objective that the current settings keep.
    """
    kept_now = set(slo) - set(find_broken(trial.current_turns, slo))
    return (
        len(trial.turns) >= FINAL_TURNS
        and trial.compute_gain(goal).low > 1.0
        and not trial.answers
        and not kept_now & set(trial.find_broken(slo))
    )


def _split_into_heats(candidates: Sequence[Changes]) -> Iterator[Sequence[Changes]]:
    for start in range(0, len(candidates), HEAT):
        yield candidates[start : start + HEAT]
