"""Clicks that scores promise against clicks of later windows: no alarm while nothing changes, one when scores or users do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from live.exposures import Exposure, ExposureLog
from repository.experiments import find_experiment_folder
from serving.contract.errors import ArtifactError
from tests.repositories import copy_lean_repository
from tests.unit.trials.logs import NOW_MS, events, exposures, observe
from trials.calibration import (
    FILE,
    SETTLED_S,
    WINDOW_ANSWERS,
    Calibration,
    compare_window,
    describe_scores,
    measure_calibration,
)
from trials.feedback import Feedback, join_feedback

K, USERS = 10, 500
BEGINS_MS = 1_750_000_000_000
LEVEL = 50.0  # of all scores of an answer, which means nothing


def draw_scores(rng: np.random.Generator) -> np.ndarray:
    scores = np.sort(rng.normal(size=(WINDOW_ANSWERS, K)), axis=1)[:, ::-1]
    return scores + LEVEL * rng.normal(size=(WINDOW_ANSWERS, 1))


def draw_clicks(scores: np.ndarray, rng: np.random.Generator, appeal: float = 1.0) -> np.ndarray:
    """Higher scores and higher places are clicked more, and some users click more than others."""
    relative = scores - scores.mean(axis=1, keepdims=True)
    of_user = rng.gamma(4.0, 0.25, USERS)[np.arange(WINDOW_ANSWERS) % USERS, None]
    chances = appeal * 0.08 * of_user * np.exp(0.5 * relative) * 0.9 ** np.arange(K)
    return rng.random(scores.shape) < np.minimum(chances, 1.0)


@cache
def unclicked() -> Feedback:
    """Return the answers of a window that nobody clicked."""
    answers = ({"request_id": f"{n}", "user_id": n % USERS, "item_ids": range(K)} for n in range(WINDOW_ANSWERS))
    return join_feedback(exposures(*answers), events())


def compare(seed: int, change=lambda scores: scores, appeal: float = 1.0) -> Calibration:
    """Compare two windows. change: what happens to the scores of the later one"""
    rng = np.random.default_rng(seed)
    earlier, later = draw_scores(rng), draw_scores(rng)
    reference = describe_scores(replace(unclicked(), clicks=draw_clicks(earlier, rng)), earlier, NOW_MS)
    return compare_window(reference, replace(unclicked(), clicks=draw_clicks(later, rng, appeal)), change(later), 3)


@pytest.mark.parametrize("seed", range(6))
def test_no_false_alarm_while_nothing_changes(seed):
    found = compare(seed)
    assert found.error < found.bound < 0.5
    assert found.expected_rate == pytest.approx(found.observed_rate, rel=0.15)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    ("change", "appeal"),
    [
        (lambda scores: scores, 0.5),
        (lambda scores: scores[:, ::-1], 1.0),
        (lambda scores: scores + 3.0 * (scores - scores.mean(axis=1, keepdims=True)), 1.0),
    ],
    ids=["half of the clicks", "scores turned upside down", "scores four times as far apart"],
)
def test_scores_that_no_longer_promise_the_clicks_are_found(change, appeal, seed):
    found = compare(seed, change, appeal)
    assert found.error > found.bound


def test_without_any_click_the_error_is_one():
    found = compare(0, appeal=0.0)
    assert (found.error, found.observed_rate) == (pytest.approx(1.0), 0.0)


@pytest.fixture
def repo(tmp_path) -> Path:
    return copy_lean_repository(tmp_path / "shop")


def show(repo: Path, first: int, count: int = WINDOW_ANSWERS, **changes) -> None:
    """Log answers from one number on, a millisecond apart, with three items each, to 100 users."""
    log = ExposureLog(find_experiment_folder(repo), 1.0, keep_days=10_000, keep_bytes=1 << 30)
    for number in range(first, first + count):
        answer = Exposure(f"a{number}", BEGINS_MS + number, number // 20, 1, [3, 1, 2], [0.9, 0.5, 0.1], [])
        log.add(replace(answer, **changes))
    log.close()


def click(repo: Path, numbers: np.ndarray, after_s: float = 60.0) -> None:
    """Let the first items of answers be taken."""
    given = {"user_id": numbers // 20, "item_id": np.full(len(numbers), 3), "request_id": [b"a%d" % n for n in numbers]}
    observe(repo, given, BEGINS_MS + int(1_000 * after_s))


def measure(repo: Path, after_s: float = SETTLED_S + 60.0) -> tuple[Calibration | None, str]:
    return measure_calibration(find_experiment_folder(repo), BEGINS_MS + int(1_000 * after_s))


def test_the_first_window_is_the_reference_of_the_next_ones(repo):
    show(repo, 0)
    click(repo, np.arange(0, 2_000, 4))
    assert measure(repo, after_s=60.0)[1].startswith("0 answers")  # clicks may still come
    assert measure(repo) == (None, "the reference of generation 1 was taken; the next window will be compared with it")
    assert measure(repo) == (None, "the window after the reference of generation 1 is not complete")
    show(repo, 2_000)
    click(repo, np.arange(2_000, 4_000, 8))
    click(repo, np.arange(2_001, 4_000, 8), after_s=SETTLED_S + 30.0)  # too late to count
    found, _ = measure(repo)
    assert found is not None
    assert (found.generation, found.error) == (1, pytest.approx(0.5))
    assert (found.expected_rate, found.observed_rate) == (pytest.approx(1 / 12), pytest.approx(1 / 24))
    assert found.error > found.bound


def test_what_no_user_was_shown_by_this_generation_is_left_out(repo):
    show(repo, 0)
    click(repo, np.arange(0, 2_000, 4))
    measure(repo)
    others: list[dict[str, object]] = [
        {"degraded": ["gateway_fallback"]},
        {"arm": "shadow"},
        {"arm": "challenger", "generation": 2},
    ]
    for number, changes in enumerate(others, start=1):
        show(repo, 2_000 * number, 2_000, **changes)
    assert measure(repo)[1] == "the window after the reference of generation 1 is not complete"
    show(repo, 8_000, 100, generation=2)
    assert measure(repo)[1] == "100 answers of the generation that answers can be judged; expected 2000"


def test_few_clicks_are_no_reference(repo):
    show(repo, 0)
    click(repo, np.arange(50))
    assert measure(repo) == (None, "50 clicks of 100 users make no reference; expected 100 of 30")


def test_a_broken_file_says_what_to_do(repo):
    show(repo, 0)
    (find_experiment_folder(repo) / FILE).write_text("[1]")
    with pytest.raises(ArtifactError, match=r"calibration\.json holds no references .*Remove it"):
        measure(repo)
