"""Join what was shown with what users did: clicks, conversions and their values, by generation, arm and position.

An event belongs to an answer when it carries the answer's request id and names a shown item. Events that arrive
more than `attribution_s` after the answer are not counted; until then, a report over the same days changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from live.archive import CLOCK_ERROR_MS, find_start, read_log
from serving.live.events import HEADER, OBSERVED, EventBatch, Flags
from serving.live.experiment import SHADOW_ARM
from serving.live.reader import Reader
from trials.sequential import Arm

ATTRIBUTION_S = 7 * 86_400.0


def read_events(folder: Path, since_ms: int, until_ms: int | None = None) -> Iterable[tuple[np.ndarray, EventBatch]]:
    """Return the live log; nothing where no event was ever recorded. folder: of the live store

    since_ms, until_ms: when events to join can have arrived, in unix milliseconds; most others are left out
    """
    if not Reader(folder).exists():
        return ()
    log = read_log(folder, find_start(folder, since_ms) if since_ms else 0)
    if until_ms is None:
        return log
    return takewhile(lambda part: part[1].headers["received_ms"].min() <= until_ms + CLOCK_ERROR_MS, log)


@dataclass(frozen=True)
class Feedback:
    """One row per logged answer. clicks, conversions: bool [answers, K]; values: float64 [answers, K].

    A conversion is a positive event on a shown item. A click is that, or an event of a kind that shows interest: of a weight
    above 0, and never positive. Dismissals (weight 0), returns and low ratings are neither. values: sums of what the
    conversions stated as `value`
    """

    generations: np.ndarray  # int64 [answers]
    users: np.ndarray  # int64 [answers], numbers from 0; each anonymous answer has its own
    arms: np.ndarray  # str [answers]
    experiments: np.ndarray  # str [answers]
    assignments: np.ndarray  # float64 [answers], probability with which the user met the arm
    degraded: np.ndarray  # bool [answers]
    shown: np.ndarray  # bool [answers, K]
    teams: np.ndarray  # int8 [answers, K], -1 without
    item_ids: np.ndarray  # int64 [answers, K], -1 without
    sources: np.ndarray  # uint8 [answers, K], bits of SOURCE_NAMES (live/exposures.py); 0 where none is logged
    clicks: np.ndarray
    conversions: np.ndarray
    values: np.ndarray

    def __len__(self) -> int:
        return len(self.generations)

    def take(self, rows: np.ndarray) -> Feedback:
        """Return the chosen answers."""
        return Feedback(**{name: getattr(self, name)[rows] for name in self.__dataclass_fields__})

    def compute_rewards(self, metric: str) -> np.ndarray:
        """Return a reward per answer, float64: "ctr" (any click), "conversion" (any), "value" or "degraded"."""
        if metric == "value":
            return self.values.sum(axis=1)
        if metric == "degraded":
            return self.degraded.astype(np.float64)
        return (self.clicks if metric == "ctr" else self.conversions).any(axis=1).astype(np.float64)

    def sum_arm(self, metric: str, arm: str) -> Arm:
        """Return the sums of one arm, for trials/sequential.py."""
        is_in_arm = self.arms == arm
        return Arm.of(self.compute_rewards(metric)[is_in_arm], self.users[is_in_arm])


def join_feedback(
    exposures: pa.Table, log: Iterable[tuple[np.ndarray, EventBatch]], attribution_s: float = ATTRIBUTION_S
) -> Feedback:
    """Join exposures (live/exposures.py) with a log of events (`live.archive.read_log`).

    A shadow's answer has the request id of the answer that was shown, and gets none of its feedback.
    """
    arms = exposures["arm"].to_numpy()
    width = pc.max(pc.list_value_length(exposures["item_ids"])).as_py() or 0
    item_ids = pad_rows(exposures["item_ids"], width, -1, np.int64)
    clicks, conversions, values = np.zeros(item_ids.shape, bool), np.zeros(item_ids.shape, bool), np.zeros(item_ids.shape)
    request_ids, headers = collect_reactions(log, set(exposures["request_id"].cast(pa.binary()).to_pylist()))
    rows = find_answers(exposures, arms, request_ids)
    is_known = rows >= 0  # a shadow's answer has none
    rows, headers = rows[is_known], headers[is_known]
    reacts = item_ids[rows] == headers["item_id"][:, None]
    in_time = headers["received_ms"] <= exposures["time_ms"].to_numpy()[rows] + 1_000 * attribution_s
    counts = reacts.any(axis=1) & in_time
    rows, headers, places = rows[counts], headers[counts], reacts[counts].argmax(axis=1) if width else np.empty(0, np.int64)
    positive, counted = (headers["flags"] & flag != 0 for flag in (Flags.POSITIVE, Flags.COUNTED))
    interested = positive | (~counted & (headers["weight"] > 0))
    clicks[rows[interested], places[interested]] = True
    conversions[rows[positive], places[positive]] = True
    np.add.at(values, (rows[positive], places[positive]), np.nan_to_num(headers["value"][positive]))
    return Feedback(
        exposures["generation"].to_numpy(),
        number_users(exposures["user_id"]),
        arms,
        exposures["experiment"].to_numpy(),
        exposures["assignment"].to_numpy(),
        pc.fill_null(pc.list_value_length(exposures["degraded"]), 0).to_numpy() > 0,
        item_ids != -1,
        pad_rows(exposures["teams"], width, -1, np.int8),
        item_ids,
        pad_rows(exposures["sources"], width, 0, np.uint8),
        clicks,
        conversions,
        values,
    )


def has_mark(exposures: pa.Table, mark: str) -> np.ndarray:
    """Return which answers have `mark` in `degraded`, bool [answers]."""
    marks = exposures["degraded"].combine_chunks()
    has: np.ndarray = np.zeros(len(exposures), bool)
    has[pc.list_parent_indices(marks).filter(pc.equal(pc.list_flatten(marks), mark)).to_numpy()] = True
    return has


def collect_reactions(log: Iterable[tuple[np.ndarray, EventBatch]], answers: set[bytes]) -> tuple[list[bytes], np.ndarray]:
    """Return the request ids of the observed events that name one of the answers, and their HEADER [events].

    answers: request ids
    """
    request_ids, headers = [], [np.empty(0, HEADER)]
    for _, batch in log:
        observed = (batch.headers["type"] == OBSERVED).tolist()
        chosen = [event for event, request_id in enumerate(batch.request_ids) if request_id in answers and observed[event]]
        request_ids += [batch.request_ids[event] for event in chosen]
        headers.append(batch.headers[chosen])
    return request_ids, np.concatenate(headers)


def find_answers(exposures: pa.Table, arms: np.ndarray, request_ids: list[bytes]) -> np.ndarray:
    """Return the row of the shown answer of each request id, the last one of several, int64 [ids]; -1 for none."""
    shown_rows = np.flatnonzero(arms != SHADOW_ARM)[::-1]
    known_ids = exposures["request_id"].take(shown_rows).cast(pa.binary()).combine_chunks()
    positions = pc.fill_null(pc.index_in(pa.array(request_ids, pa.binary()), known_ids), -1).to_numpy()
    return np.append(shown_rows, -1)[positions]


def number_users(user_ids: pa.ChunkedArray) -> np.ndarray:
    """Return int64 [answers]: users numbered from 0; every anonymous answer (null) has a number of its own."""
    encoded = user_ids.combine_chunks().dictionary_encode()
    numbers = pc.fill_null(encoded.indices, -1).to_numpy().astype(np.int64)
    anonymous = numbers < 0
    numbers[anonymous] = len(encoded.dictionary) + np.arange(anonymous.sum())
    return numbers


def pad_rows(rows: pa.ChunkedArray, width: int, fill: float, dtype: type) -> np.ndarray:
    """Return lists of at most `width` values as one array [rows, width]. `fill` pads them, and replaces nulls."""
    padded: np.ndarray = np.full((len(rows), width), fill, dtype)
    lengths = pc.fill_null(pc.list_value_length(rows), 0).to_numpy()
    padded[np.arange(width) < lengths[:, None]] = pc.fill_null(pc.list_flatten(rows), fill).to_numpy()
    return padded
