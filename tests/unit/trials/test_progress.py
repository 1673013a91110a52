"""Progress of an experiment: counts by arm, confidence intervals over time, and the decision in words."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from live.archive import compact, list_segments
from live.exposures import Exposure, ExposureLog
from serving.live.experiment import EXPERIMENT_FILE, Experiment, Mode
from serving.live.layout import Layout
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS, purchase
from tests.unit.live.conftest import Clock
from tests.unit.trials.logs import NOW_MS, events, exposures
from trials import progress
from trials.progress import LOOKS, Progress, describe_progress, measure_progress
from trials.sequential import LEAST_OBSERVATIONS, Arm, compare_arms

ANSWERS = 1_000  # of each arm
SPRING = Experiment("spring/1", 1, 2, 0.5, started_ms=NOW_MS, changed_ms=NOW_MS)


def make_answers(arm: str, request_ids: str, **columns) -> list[dict]:
    """Answers of one arm, a second apart, each of the items 1 and 2."""
    usual = {"experiment": SPRING.name, "arm": arm, "item_ids": [1, 2]} | columns
    return [usual | {"request_id": f"{request_ids}{n}", "time_ms": NOW_MS + 1_000 * n} for n in range(ANSWERS)]


def make_clicks(request_ids: str, every: int, item: int = 1) -> list[tuple]:
    return [(f"{request_ids}{n}", item, True, 1.0, n + 1) for n in range(0, ANSWERS, every)]


def measure(experiment: Experiment, rows: list[dict], clicked: list[tuple]) -> Progress:
    return measure_progress(experiment, exposures(*rows), events(*clicked))


@pytest.mark.parametrize(
    ("every", "verdict", "words"),
    [(2, "better", "better beyond doubt"), (10, "undecided", "no decision yet"), (200, "worse", "worse beyond doubt")],
)
def test_arms_intervals_and_decision_of_an_ab_test(every, verdict, words):
    others = [row | {"experiment": "winter"} for row in make_answers("challenger", "w")]
    before = [{"request_id": "x", "time_ms": NOW_MS - 1, "item_ids": [1], "experiment": SPRING.name}]
    rows = make_answers("challenger", "b") + before + others + make_answers("champion", "a")
    progress = measure(SPRING, rows, make_clicks("a", 10) + make_clicks("b", every) + make_clicks("w", 1))
    assert {arm: (summary.count, summary.clicked) for arm, summary in progress.arms.items()} == {
        "champion": (ANSWERS, 100),
        "challenger": (ANSWERS, ANSWERS // every),
    }
    assert len(progress.looks) == LOOKS
    assert [time_ms for time_ms, _ in progress.looks] == sorted(time_ms for time_ms, _ in progress.looks)
    rewards = [np.arange(ANSWERS) % distance == 0 for distance in (10, every)]
    last = compare_arms(Arm.of(rewards[0]), Arm.of(rewards[1]))
    assert progress.looks[-1] == (NOW_MS + 1_000 * (ANSWERS - 1), last)
    assert progress.verdict == verdict
    assert words in progress.decision


def test_of_too_many_answers_whole_users_are_left_out_and_the_share_is_told(tmp_path, monkeypatch):
    log = ExposureLog(tmp_path, 1.0, keep_days=1_000_000, keep_bytes=1 << 30)
    for number in range(2 * ANSWERS):
        arm = ("champion", "challenger")[number % 2]
        answer = Exposure(f"a{number}", NOW_MS + number, number % 200, 1, [1, 2], [2.0, 1.0], [], SPRING.name, arm)
        log.add(replace(answer, assignment=SPRING.find_assignment(arm)))
    log.close()
    (tmp_path / EXPERIMENT_FILE).write_text(SPRING.write_text())
    whole = describe_progress(tmp_path)
    assert (whole["users_share"], [arm["answers"] for arm in whole["arms"]]) == (1.0, [ANSWERS, ANSWERS])
    monkeypatch.setattr(progress, "MOST_SHOWN", ANSWERS)
    part = describe_progress(tmp_path)
    assert part["users_share"] in (0.5, 0.25)
    assert all(0.5 < arm["answers"] / (part["users_share"] * ANSWERS) < 1.5 for arm in part["arms"])
    assert sum(arm["answers"] for arm in part["arms"]) % 10 == 0  # each user has ten


def test_what_came_months_after_an_experiment_is_not_read(tmp_path):
    """The latest experiment stays the latest: otherwise the gateway's page would read more and more of the log."""
    over = replace(SPRING, state="stopped", share=0.0, changed_ms=NOW_MS + 60_000)
    (tmp_path / EXPERIMENT_FILE).write_text(over.write_text())
    written_s = [NOW_MS / 1_000, NOW_MS / 1_000 + 6 * 86_400]
    for number, at_s in enumerate(written_s):
        log = ExposureLog(tmp_path, 1.0, keep_days=100, keep_bytes=1 << 30, now=partial(float, at_s))
        log.add(Exposure(f"a{number}", NOW_MS + number, number, 1, [1, 2], [2.0, 1.0], [], SPRING.name, "champion"))
        log.close()
    late_ms = NOW_MS + 90 * 86_400_000
    (tmp_path / "exposures" / f"exposures-{late_ms:013d}-1-0.parquet").write_bytes(b"not to be read")
    clock = Clock()
    with closing(Writer(tmp_path, Layout(), KINDS.names, now_ms=clock)) as writer:
        for sent_ms in (NOW_MS + 2_000, late_ms - 86_400_000, late_ms):
            clock.ms = sent_ms
            writer.append(purchase(1, 1, NOW_MS))
            compact(writer, sent_ms + 1)
    list_segments(tmp_path)[-1].path.write_bytes(b"not to be read either")
    assert [(arm["arm"], arm["answers"]) for arm in describe_progress(tmp_path)["arms"]] == [("champion", 2)]


def test_a_look_sees_the_answers_given_until_then():
    progress = measure(
        SPRING, make_answers("champion", "a") + make_answers("challenger", "b"), make_clicks("a", 10) + make_clicks("b", 5)
    )
    for time_ms, look in progress.looks:
        assert look.requests == 2 * ((time_ms - NOW_MS) // 1_000 + 1)
        assert np.isfinite(look.low) == (look.requests >= 2 * LEAST_OBSERVATIONS)
    facts = progress.as_json()["looks"]
    assert (facts[0]["low"], facts[0]["high"], facts[0]["difference"]) == (None, None, None)
    assert facts[-1]["low"] < 0.1 < facts[-1]["high"]


@pytest.mark.parametrize(
    ("champions", "verdict", "words"),
    [
        (ANSWERS, "better", "better beyond doubt"),
        (ANSWERS // 2, "undecided", "no decision: the split is wrong: 500 users met the champion and 1,000 the challenger"),
    ],
)
def test_a_wrong_split_leaves_everything_undecided(champions, verdict, words):
    rows = make_answers("champion", "a", assignment=0.5)[:champions] + make_answers("challenger", "b", assignment=0.5)
    rows = [row | {"user_id": number} for number, row in enumerate(rows)]
    progress = measure(SPRING, rows, make_clicks("a", 10) + make_clicks("b", 2))
    assert progress.looks[-1][1].verdict == "better"
    assert progress.verdict == progress.as_json()["verdict"] == verdict
    facts = progress.as_json()
    assert words in facts["decision"]
    assert facts["wrong_split"] == (champions < ANSWERS)
    assert f"{champions:,} users met the champion and 1,000 the challenger, which a share of 0.5" in facts["split"]


def test_the_split_of_a_test_that_is_over_is_that_of_its_last_share():
    rows = make_answers("champion", "a", assignment=0.9)[:800] + make_answers("challenger", "b", assignment=0.1)[:100]
    later = make_answers("champion", "c", assignment=0.7)[:100] + make_answers("challenger", "d", assignment=0.3)[:100]
    rows += [row | {"time_ms": row["time_ms"] + 10_000_000} for row in later]
    rows = [row | {"user_id": number} for number, row in enumerate(rows)]
    progress = measure(replace(SPRING, state="stopped", share=0.0), rows, make_clicks("a", 10))
    assert progress.as_json()["wrong_split"]
    assert "100 users met the champion and 100 the challenger, which a share of 0.3" in progress.as_json()["split"]
    assert progress.decision == "stopped"  # by a person


@pytest.mark.parametrize("state", ["running", "stopped"])
def test_equal_arms_stay_equal_where_the_share_grew_as_users_clicked_more(state):
    """Under a share of 0.1, 5 % are clicked; under 0.5, 10 %. So of all answers, more of the challenger's are clicked."""
    rows, clicked = [], []
    for share, every, first in ((0.1, 20, 0), (0.5, 10, ANSWERS)):
        for arm, assignment, count in (
            ("champion", 1 - share, ANSWERS),
            ("challenger", share, round(ANSWERS * share / (1 - share))),
        ):
            answers = make_answers(arm, f"{arm}{first}/", assignment=assignment)[:count]
            rows += [row | {"time_ms": row["time_ms"] + 1_000 * first} for row in answers]
            clicked += [(f"{arm}{first}/{n}", 1, True, 1.0, first + n + 1) for n in range(0, count, every)]
    ended = {"state": state, "share": 0.5 if state == "running" else 0.0}
    progress = measure(replace(SPRING, changed_ms=NOW_MS + 1_000 * ANSWERS, **ended), rows, clicked)
    assert {arm: (summary.count, summary.clicked) for arm, summary in progress.arms.items()} == {
        "champion": (ANSWERS, 100),
        "challenger": (ANSWERS, 100),
    }
    assert progress.looks[-1][1].difference == 0


@pytest.mark.parametrize(("item", "verdict"), [(2, "better"), (1, "worse")])
def test_interleaving_credits_the_team_whose_item_was_clicked(item, verdict):
    experiment = replace(SPRING, mode="interleave")
    rows = make_answers("interleaved", "a", teams=[0, 1]) + make_answers("champion", "b")
    progress = measure(experiment, rows, make_clicks("a", 4, item))
    assert progress.verdict == verdict
    assert progress.looks[-1][1].difference == pytest.approx(0.25 if item == 2 else -0.25)
    assert progress.looks[-1][1].requests == ANSWERS


def test_a_shadow_is_in_no_arm_and_decides_nothing():
    rows = make_answers("champion", "a") + make_answers("shadow", "a", generation=2)
    progress = measure(replace(SPRING, mode="shadow"), rows, make_clicks("a", 4))
    assert list(progress.arms) == ["champion"]
    assert progress.looks == []
    assert progress.as_json()["split"] == ""
    assert "no clicks to compare" in progress.decision


@pytest.mark.parametrize("mode", ["ab", "interleave", "shadow"])
def test_without_answers_there_is_no_decision(mode: Mode):
    progress = measure(replace(SPRING, mode=mode), [], [])
    assert (progress.arms, progress.looks, progress.verdict) == ({}, [], "undecided")


@pytest.mark.parametrize(
    ("state", "reason", "words"),
    [("rolled back", "its p99 is 200 ms", "rolled back: its p99 is 200 ms"), ("stopped", "", "stopped")],
)
def test_an_experiment_that_ended_says_how(state, reason, words):
    progress = measure(replace(SPRING, state=state, reason=reason, share=0.0), make_answers("champion", "a"), [])
    assert progress.decision == words
    assert progress.as_json()["experiment"]["state"] == state
