"""Rounds of continuous training that wait: for a server, for more events, and for days after what users were spared."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pytest

from export.continuous import follow
from export.continuous.follow import Terms, follow_once, publish_candidate
from export.continuous.verdict import Verdict
from export.relayout import relayout
from repository.experiments import end_experiment, start_experiment
from repository.generations import pin
from repository.registry import read_acts, record_act
from server.start.ports import find_free_ports
from server.state import ServerState
from serving.contract.errors import ServerError
from serving.contract.generations import read_pinned_generation
from serving.live.experiment import Experiment, Mode, State
from tests.long.rounds.shop import EARLY, QUIET, observe
from tests.tags import draw_tag, run_tagged


def test_a_round_waits_until_servers_have_moved_to_a_promoted_generation(repo, past, tmp_path, monkeypatch):
    monkeypatch.setattr(follow, "RUN_DIR", tmp_path / "run")
    start_experiment(repo, Experiment("generation-2", 1, 2, 0.1, promotes=True, days=7))
    end_experiment(repo, "not worse", "promoted")
    tag = draw_tag()
    with run_tagged(tag) as server:  # a process that does nothing in the place of a server
        state = ServerState(server.pid, tag, repo.resolve(), tmp_path / "log", find_free_ports(), generation=1)
        state.save(tmp_path / "run")
        told = follow_once(past, repo, None, 1_000, QUIET).report
        assert told.startswith("waits: experiment generation-2 promoted generation 2, and a server has not moved to it yet")
        replace(state, generation=2).save(tmp_path / "run")
        assert follow_once(past, repo, None, 1_000, QUIET).report.startswith("waits: 0 events are newer")


@pytest.mark.parametrize(("refused", "events"), [(1, "2,000"), (3, "8,000"), (4, "16,000"), (10, "64,000")])
def test_after_candidates_that_are_not_as_good_the_next_one_waits_for_more_events_but_not_without_end(
    repo, past, refused, events
):
    for _ in range(refused):
        record_act(repo, "not published", 1, reason="worse")
    record_act(repo, "not published", 2, reason="worse than another generation")
    done = follow_once(past, repo, None, 1_000, QUIET)
    assert f"waits: 0 events are newer than generation 1, of {events}" in done.report


@pytest.mark.parametrize(
    ("challengers", "days"), [((2,), 1), ((2, 3), 2), ((2, 3, 4, 5, 6), 8)], ids=["one", "two", "at most eight days"]
)
def test_after_challengers_that_were_not_promoted_the_next_round_waits_longer_and_says_until_when(
    repo, past, challengers, days, monkeypatch
):
    for number in challengers:
        start_experiment(repo, Experiment(f"generation-{number}", 1, number, 0.1, promotes=True))
        end_experiment(repo, "2.0% fewer of its answers are clicked", "rolled back")
    told = follow_once(past, repo, None, 1_000, QUIET).report
    assert told.startswith(f"waits: challenger {challengers[-1]} was not promoted (experiment generation-{challengers[-1]}")
    assert "2.0% fewer of its answers are clicked" in told
    ended_s = read_acts(repo)[-1].time_s
    until = datetime.fromtimestamp(ended_s + 86_400 * days, UTC)
    assert told.endswith(f"{until:%Y-%m-%d %H:%M} UTC on")
    monkeypatch.setattr(time, "time", lambda: ended_s + 86_400 * days - 1)
    assert "was not promoted" in follow_once(past, repo, None, 1_000, QUIET).report
    monkeypatch.setattr(time, "time", lambda: ended_s + 86_400 * days)
    awaited = {1: "2,000", 2: "4,000", 5: "24,000"}[len(challengers)]
    assert follow_once(past, repo, None, 1_000, QUIET).report == (f"waits: 0 events are newer than generation 1, of {awaited}")


def test_a_promoted_challenger_and_one_of_before_make_no_round_wait(exported, repo, past):
    assert relayout(exported, repo, "fused", beside=1) == 2
    pin(repo, 2)
    start_experiment(repo, Experiment("generation-2", 1, 2, 0.1, promotes=True))
    end_experiment(repo, "2.0% more of the answers are clicked", "promoted")
    start_experiment(repo, Experiment("back", 2, 1, 0.1))
    end_experiment(repo, "a person stopped it")
    assert follow_once(past, repo, None, 1_000, QUIET).report.startswith(
        "waits: 0 events are newer than generation 2, of 1,000"
    )


def test_a_shadow_and_a_test_that_a_person_stopped_make_no_round_wait(repo, past):
    ended: list[tuple[str, Mode, State]] = [("a", "ab", "stopped"), ("b", "shadow", "stopped"), ("c", "shadow", "rolled back")]
    for name, mode, state in ended:
        start_experiment(repo, Experiment(name, 1, 2, 0.1, mode))
        end_experiment(repo, "seen enough", state)
    waits = "waits: 0 events are newer than generation 1, of"
    assert follow_once(past, repo, None, 1_000, QUIET).report == f"{waits} 1,000"
    start_experiment(repo, Experiment("generation-2", 1, 2, 0.1, promotes=True))
    end_experiment(repo, "no decision within 7 days")
    assert "challenger 2 was not promoted" in follow_once(past, repo, None, 1_000, QUIET).report


def test_a_generation_that_a_server_does_not_move_to_makes_the_next_round_wait_for_more_events(
    repo, exported, past, whole, tmp_path, monkeypatch
):
    monkeypatch.setattr(follow, "RUN_DIR", tmp_path / "run")
    tag = draw_tag()
    with run_tagged(tag) as server:  # a process that does nothing in the place of a server
        state = ServerState(server.pid, tag, repo.resolve(), tmp_path / "log", find_free_ports(), generation=1)
        state.save(tmp_path / "run")
        with pytest.raises(ServerError):
            publish_candidate(exported, repo, "fused", 1, Terms(), Verdict(0, ""))
    assert read_pinned_generation(repo) == 1
    last = read_acts(repo)[-1]
    assert (last.action, last.generation) == ("not published", 1)
    assert last.reason.startswith("not every server moved to generation 2: ")
    observe(repo, whole, np.arange(EARLY, EARLY + 1_500))
    assert ", of 2,000" in follow_once(past, repo, None, 1_000, QUIET).report
