"""The search with a made-up machine: it finds what is better, spares losers, keeps SLOs, and stops when the time is over."""

import numpy as np
import pytest

from export.settings import FUSED, Settings
from perf.slo import Bound
from perf.tune.search import (
    FINAL_TURNS,
    HEAT,
    PREFERRED_BATCHES,
    SERVER_THREADS,
    Outcome,
    Trial,
    apply_changes,
    describe_changes,
    draw_candidates,
    is_surely_better,
    make_sort_key,
    make_space,
    read_current,
    search,
)

SLO = {"p99_ms": Bound(at_most=50.0)}


class Machine:
    """peak_rate 100 for the current settings and 100 * `worth[x]` for {"x": x}; a drift that changes by half every turn."""

    def __init__(self, worth, p99_ms=None, answers=None):
        self.worth, self.p99_ms, self.answers = worth, p99_ms or {}, answers or {}
        self.turns = dict.fromkeys(worth, 0)
        self.rng = np.random.default_rng(0)

    def measure(self, heat, turns):
        drift = self.rng.uniform(0.5, 1.5, turns)
        now = tuple({"peak_rate": 100 * d, "p99_ms": 40.0} for d in drift)
        trials = []
        for changes in heat:
            x = changes["x"]
            self.turns[x] += turns
            own = tuple({"peak_rate": 100 * d * self.worth[x], "p99_ms": self.p99_ms.get(x, 40.0)} for d in drift)
            trials.append(Trial(changes, own, now, self.answers.get(x, "")))
        return trials


def run(machine, time_is_over=lambda: False, saved=lambda outcome: None):
    return search([{"x": x} for x in machine.worth], machine.measure, SLO, "peak_rate", time_is_over, saved)


def test_the_best_wins_although_the_machine_drifts_and_losers_are_asked_least():
    machine = Machine({x: 1 + x / 50 for x in range(-6, 6)})
    outcome = run(machine)
    assert outcome.complete
    assert outcome.winner.changes == {"x": 5}
    assert outcome.winner.compute_gain("peak_rate").median == pytest.approx(1.1)
    assert [len(rung) for rung in outcome.rungs] == [12, 6, 3]
    assert sorted(machine.turns, key=machine.turns.__getitem__)[-3:] == [3, 4, 5]
    assert {machine.turns[x] for x in range(-6, 0)} == {1}
    assert machine.turns[5] == len(outcome.winner.turns) >= FINAL_TURNS


def test_nothing_better_keeps_the_current_settings():
    assert run(Machine({x: 1 - x / 100 for x in range(8)})).winner is None


def test_a_candidate_that_breaks_an_objective_loses_to_all_that_keep_it():
    outcome = run(Machine({0: 2.0, 1: 1.1, 2: 1.0, 3: 0.9}, p99_ms={0: 60.0}))
    assert outcome.winner.changes == {"x": 1}
    assert outcome.rungs[0][-1].changes == {"x": 0}
    assert outcome.rungs[0][-1].find_broken(SLO) == ["p99_ms"]


def test_an_objective_that_the_current_settings_break_too_does_not_forbid_a_win():
    trial = Trial({"x": 1}, ({"peak_rate": 2.0, "p99_ms": 60.0},) * FINAL_TURNS, ({"peak_rate": 1.0, "p99_ms": 90.0},) * 5)
    assert is_surely_better(trial, SLO, "peak_rate")


@pytest.mark.parametrize("rates", [[2.0] * FINAL_TURNS + [0.9], [2.0]])
def test_one_turn_that_disagrees_and_too_few_turns_forbid_a_win(rates):
    own = tuple({"peak_rate": rate, "p99_ms": 1.0} for rate in rates)
    assert not is_surely_better(Trial({"x": 1}, own, ({"peak_rate": 1.0, "p99_ms": 1.0},) * len(own)), SLO, "peak_rate")


@pytest.mark.parametrize("goal", ["peak_rate", "p99_ms"])
def test_a_turn_without_an_answered_request_breaks_its_objectives_and_is_no_gain(goal):
    """Such a turn has no latencies."""
    answered, unanswered = {"peak_rate": 2.0, "p99_ms": 20.0}, {"peak_rate": 2.0}
    now = ({"peak_rate": 1.0, "p99_ms": 40.0},) * FINAL_TURNS
    trial = Trial({"x": 1}, (unanswered,) + (answered,) * (FINAL_TURNS - 1), now)
    assert trial.find_broken(SLO) == ["p99_ms"]
    assert not is_surely_better(trial, SLO, goal)
    other = Trial({"x": 2}, (answered,) * FINAL_TURNS, now)
    assert sorted([trial, other], key=lambda trial: make_sort_key(trial, SLO, goal)) == [other, trial]
    unknown = Trial({"x": 3}, (answered,) * FINAL_TURNS, (unanswered,) * FINAL_TURNS)
    assert unknown.compute_gain("p99_ms").high == 0.0
    assert Trial({"x": 4}, (unanswered,), (unanswered,)).compute_gain("p99_ms").median == 0.0


def test_other_answers_forbid_a_win_and_come_last():
    outcome = run(Machine({0: 2.0, 1: 1.1}, answers={0: "3 of 64 id lists differ"}))
    assert outcome.winner.changes == {"x": 1}
    assert outcome.best[-1].changes == {"x": 0}


def test_a_time_goal_is_better_when_smaller():
    now = ({"peak_rate": 1.0, "p99_ms": 40.0},)
    slow, fast = (Trial({"x": ms}, ({"peak_rate": 1.0, "p99_ms": ms},), now) for ms in (45.0, 20.0))
    assert fast.compute_gain("p99_ms").median == pytest.approx(2.0)
    assert sorted([slow, fast], key=lambda trial: make_sort_key(trial, SLO, "p99_ms")) == [fast, slow]


def test_when_the_time_is_over_no_heat_begins_and_what_is_known_stays():
    machine, asked = Machine({x: 1 + x / 50 for x in range(12)}), iter([False, False, True])
    seen = []
    outcome = run(machine, lambda: next(asked), lambda outcome: seen.append(sum(map(len, outcome.rungs))))
    assert not outcome.complete
    assert outcome.winner is None
    assert sum(machine.turns.values()) == 2 * HEAT
    assert [trial.changes["x"] for trial in outcome.best] == [5, 4, 3, 2, 1, 0]
    assert seen == [3, 6, 6]


def test_nothing_to_try_is_no_winner():
    assert run(Machine({})) == Outcome("peak_rate")


def space_of(layout="ensemble"):
    return make_space(Settings(), layout, (192, 256), cores=2)


@pytest.mark.parametrize(("layout", "model"), [("ensemble", "preprocess"), ("fused", "recommend")])
def test_the_space_holds_what_differs_from_the_current_settings(layout, model):
    space = space_of(layout)
    assert set(space[f"serving.{model}.queue_delay_us"]) == {100, 300, 1_000}
    preferred, now = ("serving", []) if layout == "ensemble" else ("serving.recommend", FUSED["preferred_batch_sizes"])
    assert now not in space[f"{preferred}.preferred_batch_sizes"]
    assert len(space[f"{preferred}.preferred_batch_sizes"]) == len(PREFERRED_BATCHES) - 1
    assert space[SERVER_THREADS] == (2,)
    assert space["compute.index_effort"] == (192, 256)
    assert ("serving.rank.instances" in space) == (layout == "ensemble")
    assert "compute.index_effort" not in make_space(Settings(), layout, (), cores=2)


def test_batches_that_never_come_are_not_tried():
    space = make_space(Settings(serving={"max_batch_size": 16}), "ensemble", (), cores=2)
    assert space["serving.preferred_batch_sizes"] == ([16],)


def test_current_values_are_read_as_the_export_reads_them():
    settings = Settings.model_validate(
        {"serving": {"preferred_batch_sizes": [4], "rank": {"instances": 3}}, "compute": {"rank_threads": 2}}
    )
    assert read_current(settings, "serving.rank.instances") == 3
    assert read_current(settings, "serving.preferred_batch_sizes") == [4]
    assert read_current(settings, "serving.preprocess.queue_delay_us") == 0
    assert read_current(settings, "compute.rank_threads") == 2


@pytest.mark.parametrize("count", [3, 10, 40])
def test_candidates_are_different_and_new(count):
    space = space_of()
    chosen = draw_candidates(space, count, np.random.default_rng(0))
    assert len(chosen) == count == len({repr(changes) for changes in chosen})
    assert all(value in space[key] for changes in chosen for key, value in changes.items())
    alone = sum(len(values) for values in space.values())
    assert sum(len(changes) == 1 for changes in chosen) == min(count, alone)


def test_a_small_space_ends():
    assert draw_candidates({"a": (1,), "b": (2,)}, 40, np.random.default_rng(0)) == [{"a": 1}, {"b": 2}, {"a": 1, "b": 2}]


def test_changes_go_where_their_key_says_and_the_original_stays():
    document = {"serving": {"rank": {"instances": 1}}}
    changes = {"serving.rank.instances": 2, "compute.rank_threads": 2, SERVER_THREADS: 2}
    assert apply_changes(document, changes) == {"serving": {"rank": {"instances": 2}}, "compute": {"rank_threads": 2}}
    assert document == {"serving": {"rank": {"instances": 1}}}
    assert describe_changes({}) == "current settings"
