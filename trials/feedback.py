"""Join what was shown with what users did: clicks, conversions and revenue of requests, by generation, arm and position.

An event belongs to an answer when it carries the answer's request id and names a shown item. Events that arrive
more than `attribution_s` after the answer are not counted; until then, a report over the same days changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from live.archive import find_start, read_log
from serving.live.events import OBSERVED, EventBatch, Flags
from serving.live.experiment import SHADOW_ARM
from serving.live.reader import Reader
from trials.sequential import Arm

ATTRIBUTION_S = 7 * 86_400.0


def read_events(folder: Path, since_ms: int = 0) -> Iterable[tuple[np.ndarray, EventBatch]]:
    """Return the live log; nothing where no event was ever recorded. folder: of the live store

    since_ms: of the answers to join, in unix milliseconds: events from before are left out where that is cheap
    """
    if not Reader(folder).exists():
        return ()
    return read_log(folder, find_start(folder, since_ms) if since_ms else 0)


@dataclass(frozen=True)
class Feedback:
    """One row per logged answer. clicks, conversions: bool [answers, K]; revenue: float64 [answers, K].

    A click is any event on a shown item, a conversion a positive one; revenue is the sum of the conversions' values.
    """

    generations: np.ndarray  # int64 [answers]
    users: np.ndarray  # int64 [answers], numbers from 0; each anonymous answer has its own
    arms: np.ndarray  # str [answers]
    experiments: np.ndarray  # str [answers]
    assignments: np.ndarray  # float64 [answers], probability with which the user met the arm; NaN where it is not logged
    degraded: np.ndarray  # bool [answers]
    shown: np.ndarray  # bool [answers, K]
    teams: np.ndarray  # int8 [answers, K], -1 without
    item_ids: np.ndarray  # int64 [answers, K], -1 without
    sources: np.ndarray  # uint8 [answers, K], bits of SOURCE_NAMES (live/exposures.py); 0 where none is logged
    clicks: np.ndarray
    conversions: np.ndarray
    revenue: np.ndarray

    def __len__(self) -> int:
        return len(self.generations)

    def take(self, rows: np.ndarray) -> Feedback:
        """Return the chosen answers."""
        return Feedback(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    def compute_rewards(self, metric: str) -> np.ndarray:
        """Return a reward per answer, float64: "ctr" (any click), "conversion" (any), "revenue" or "degraded"."""
        if metric == "revenue":
            return self.revenue.sum(axis=1)
        if metric == "degraded":
            return self.degraded.astype(np.float64)
        return (self.clicks if metric == "ctr" else self.conversions).any(axis=1).astype(np.float64)

    def sum_arm(self, metric: str, arm: str) -> Arm:
        """Return the sums of one arm, for trials/sequential.py."""
        own = self.arms == arm
        return Arm.of(self.compute_rewards(metric)[own], self.users[own])


def join_feedback(
    exposures: pa.Table, log: Iterable[tuple[np.ndarray, EventBatch]], attribution_s: float = ATTRIBUTION_S
) -> Feedback:
    """Join exposures (live/exposures.py) with a log of events (`live.archive.read_log`).

    A shadow's answer has the request id of the answer that was shown, and gets none of its feedback.
    """
    arms = exposures["arm"].to_pylist()
    request_ids = {
        request_id.encode(): row
        for row, request_id in enumerate(exposures["request_id"].to_pylist())
        if arms[row] != SHADOW_ARM
    }
    lists = exposures["item_ids"].to_pylist()
    times_ms = exposures["time_ms"].to_numpy()
    count, width = len(lists), max(map(len, lists), default=0)
    places = [{item: place for place, item in enumerate(items)} for items in lists]
    clicks, conversions = np.zeros((count, width), bool), np.zeros((count, width), bool)
    revenue = np.zeros((count, width))
    for _, batch in log:
        for event, request_id in enumerate(batch.request_ids):
            row = request_ids.get(request_id) if request_id else None
            header = batch.headers[event]
            if row is None or header["type"] != OBSERVED:
                continue
            place = places[row].get(int(header["item_id"]))
            if place is None or header["received_ms"] > times_ms[row] + 1_000 * attribution_s:
                continue
            clicks[row, place] = True
            if header["flags"] & Flags.POSITIVE:
                conversions[row, place] = True
                revenue[row, place] += 0.0 if np.isnan(header["value"]) else float(header["value"])
    return Feedback(
        exposures["generation"].to_numpy(),
        number_users(exposures["user_id"].to_pylist()),
        np.array(arms, object),
        np.array(exposures["experiment"].to_pylist(), object),
        exposures["assignment"].to_numpy(),
        np.array([bool(marks) for marks in exposures["degraded"].to_pylist()], bool),
        pad_rows(lists, width, -1, np.int64) != -1,
        pad_rows([teams or [] for teams in exposures["teams"].to_pylist()], width, -1, np.int8),
        pad_rows(lists, width, -1, np.int64),
        pad_rows([sources or [] for sources in exposures["sources"].to_pylist()], width, 0, np.uint8),
        clicks,
        conversions,
        revenue,
    )


def number_users(user_ids: Sequence[int | None]) -> np.ndarray:
    """Return int64 [answers]: users numbered from 0 as they come; every anonymous answer (None) has its own number."""
    numbers: dict[object, int] = {}
    keys = (("answer", row) if user_id is None else user_id for row, user_id in enumerate(user_ids))
    return np.array([numbers.setdefault(key, len(numbers)) for key in keys], np.int64)


def pad_rows(rows: Sequence[Sequence[float]], width: int, fill: float, dtype: type) -> np.ndarray:
    """Return rows of at most `width` values as one array [rows, width], padded with `fill`."""
    padded: np.ndarray = np.full((len(rows), width), fill, dtype)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return padded
