"""Compare the clicks that scores promise with those that users give: the calibration of the generation that answers.

Scores rank and are no probabilities: only their differences within an answer have a meaning, and users click less on lower
places. So the log itself says what a score promises. The first window of a generation's answers is its reference:

    score - mean of the answer's scores ─▶ ten bins of equally many shown items ─▶ click rate of each bin

A later window is expected to be clicked at these rates. Its calibration error is the sum over bins of |expected - observed
clicks|, divided by all expected clicks: 0 is perfect, and 1 is the error where nobody clicks any more. Its bound is what chance
explains between two windows of the reference's users.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from live.exposures import read_latest
from serving.contract.errors import ArtifactError
from serving.live.experiment import CHAMPION_ARM
from trials.feedback import Feedback, join_feedback, pad_rows, read_events
from trials.sequential import LEAST_USERS

FILE = "calibration.json"  # in the live store: references by generation
KEPT_REFERENCES = 20
WINDOW_ANSWERS, LEAST_CLICKS = 2_000, 100  # of a window; clicks that a reference needs
SETTLED_S = 3_600.0  # after an answer; only clicks until then count, in references and in windows alike
OLDEST_S = 7 * 86_400.0  # a window that begins earlier says nothing of today
BINS, RESAMPLES = 10, 10_000
AT_ONCE = 100  # resamples, which bounds the memory
FALSE_ALARMS = 0.001  # chance that a window of a generation as calibrated as ever alarms


@dataclass(frozen=True)
class ScoreReference:
    """The click rates that a generation's scores promise.

    until_ms: time of its last answer, unix milliseconds; edges: [bins - 1], between the bins; rates: [bins], clicks of a shown
    item; bound: the largest calibration error that chance explains
    """

    until_ms: int
    edges: list[float]
    rates: list[float]
    bound: float


@dataclass(frozen=True)
class Calibration:
    """A window of a generation's answers beside its reference. Rates: clicks of a shown item."""

    generation: int
    error: float
    bound: float
    expected_rate: float
    observed_rate: float


def measure_calibration(folder: Path, now_ms: int) -> tuple[Calibration | None, str]:
    """Return the calibration of the generation that answers now, or None and why not. Raises ArtifactError.

    The first window that is complete becomes the generation's reference. folder: of the live store; now_ms: unix milliseconds
    """
    answers = read_window(folder, now_ms)
    if len(answers) < WINDOW_ANSWERS:
        return None, f"{len(answers)} answers of the generation that answers can be judged; expected {WINDOW_ANSWERS}"
    generation, times_ms = answers["generation"][0].as_py(), answers["time_ms"].to_numpy()
    feedback = join_feedback(answers, read_events(folder, int(times_ms[0])), SETTLED_S)
    scores = pad_rows(answers["scores"], feedback.shown.shape[1], np.nan, np.float64)
    references = read_references(folder)
    if (reference := references.get(generation)) is None:
        if (clicks := int(feedback.clicks.sum())) < LEAST_CLICKS or feedback.users.max() + 1 < LEAST_USERS:
            users = feedback.users.max() + 1
            return None, f"{clicks} clicks of {users} users make no reference; expected {LEAST_CLICKS} of {LEAST_USERS}"
        write_references(folder, references | {generation: describe_scores(feedback, scores, int(times_ms[-1]))})
        return None, f"the reference of generation {generation} was taken; the next window will be compared with it"
    if times_ms[0] <= reference.until_ms:
        return None, f"the window after the reference of generation {generation} is not complete"
    return compare_window(reference, feedback, scores, generation), ""


def read_window(folder: Path, now_ms: int) -> pa.Table:
    """Return the latest whole answers of the generation that answers, WINDOW_ANSWERS at most, whose clicks are settled.

    Whole are scored answers of one generation, shown to users, without a fallback.
    """
    settled_ms, oldest_ms = now_ms - int(1_000 * SETTLED_S), now_ms - int(1_000 * OLDEST_S)
    field = pc.field
    champion_filter = field("arm").isin(["", CHAMPION_ARM]) & (pc.list_value_length(field("degraded")) == 0)
    settled_filter = champion_filter & (field("time_ms") <= settled_ms) & (field("time_ms") >= oldest_ms)
    latest = read_latest(folder, settled_filter, 1, oldest_ms)
    if not len(latest):
        return latest
    return read_latest(folder, settled_filter & (field("generation") == latest["generation"][0]), WINDOW_ANSWERS, oldest_ms)


def describe_scores(feedback: Feedback, scores: np.ndarray, until_ms: int) -> ScoreReference:
    """Return a reference of answers. scores: float64 [answers, K], NaN where nothing is shown"""
    relative = center_scores(scores)
    edges = np.unique(np.quantile(relative[feedback.shown], np.linspace(0, 1, BINS + 1)[1:-1]))
    shown, clicks = count_by_user(edges, feedback, relative)
    bound = bound_error(shown, clicks)
    return ScoreReference(until_ms, edges.tolist(), divide(clicks.sum(axis=0), shown.sum(axis=0)).tolist(), bound)


def compare_window(reference: ScoreReference, feedback: Feedback, scores: np.ndarray, generation: int) -> Calibration:
    """Compare a window of answers with a reference. scores: as in `describe_scores`"""
    shown, clicks = (counts.sum(axis=0) for counts in count_by_user(np.array(reference.edges), feedback, center_scores(scores)))
    expected = shown * np.array(reference.rates)
    error = float(np.abs(expected - clicks).sum() / expected.sum())
    rates = float(expected.sum() / shown.sum()), float(clicks.sum() / shown.sum())
    return Calibration(generation, error, reference.bound, *rates)


def center_scores(scores: np.ndarray) -> np.ndarray:
    """Return scores minus the mean of their answer, float64 [answers, K], NaN where nothing is shown."""
    return scores - np.nanmean(scores, axis=1, keepdims=True)


def count_by_user(edges: np.ndarray, feedback: Feedback, relative: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return how many items each user was shown and clicked in each bin, two float64 [users, bins].

    edges: float64 [bins - 1]; relative: float64 [answers, K], from `center_scores`
    """
    bins, users = len(edges) + 1, np.broadcast_to(feedback.users[:, None], relative.shape)[feedback.shown]
    cells = users * bins + np.searchsorted(edges, relative[feedback.shown], side="right")
    size = (int(feedback.users.max()) + 1) * bins
    shown, clicks = (np.bincount(cells, weights, size) for weights in (None, feedback.clicks[feedback.shown]))
    return shown.reshape(-1, bins).astype(np.float64), clicks.reshape(-1, bins)


def bound_error(shown: np.ndarray, clicks: np.ndarray) -> float:
    """Return the error that a window exceeds by chance in FALSE_ALARMS of all cases, by a bootstrap over users.

    shown, clicks: float64 [users, bins], from `count_by_user`. Both the reference and the window are drawn, because both err.
    """
    generator, count = np.random.default_rng(0), len(shown)
    errors = np.empty(RESAMPLES)
    counts = np.hstack([shown, clicks])
    for start in range(0, RESAMPLES, AT_ONCE):
        rows = 2 * min(AT_ONCE, RESAMPLES - start)
        users = generator.integers(0, count, (rows, count)) + count * np.arange(rows)[:, None]
        draws = np.bincount(users.ravel(), minlength=rows * count).reshape(rows, count).astype(float) @ counts
        of_shown, of_clicks = np.hsplit(draws, 2)
        expected = of_shown[1::2] * divide(of_clicks[::2], of_shown[::2])
        missed = np.abs(expected - of_clicks[1::2]).sum(axis=1)
        errors[start : start + rows // 2] = missed / np.maximum(expected.sum(axis=1), 1.0)
    return float(np.quantile(errors, 1 - FALSE_ALARMS))


def divide(clicks: np.ndarray, shown: np.ndarray) -> np.ndarray:
    """Return the click rate of each bin, float64 [bins], 0 where nothing was shown."""
    return clicks / np.maximum(shown, 1.0)


def read_references(folder: Path) -> dict[int, ScoreReference]:
    """Return the references by generation. folder: of the live store. Raises ArtifactError."""
    path = folder / FILE
    try:
        return {int(generation): ScoreReference(**entry) for generation, entry in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} holds no references ({error!r}). Remove it: the next windows become references."
        ) from error


def write_references(folder: Path, references: Mapping[int, ScoreReference]) -> None:
    """Replace the file of references, by one rename. The oldest generations beyond KEPT_REFERENCES are left out."""
    kept_references = {str(generation): asdict(references[generation]) for generation in sorted(references)[-KEPT_REFERENCES:]}
    unfinished = folder / f".{FILE}.{os.getpid()}"
    unfinished.write_text(json.dumps(kept_references) + "\n")
    unfinished.replace(folder / FILE)
