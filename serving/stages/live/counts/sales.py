"""Count each item's sales as of now: the generation's count, decayed, plus the live events since.

    count(item) = exported · exp(-(now - exported at) / horizon) + live · exp(-(now - latest sale) / horizon)

Training computes the same numbers from a whole log (training/models/rankers/item_statistics.py). "Now" is the watermark,
rounded down to an hour of event time. When it moves on, all items are computed again; in between, only those with new events.

The live store counts all live events. A generation that learned from some of them publishes their counts (LEARNED_SALES), which
are subtracted here, so that no sale counts twice. One that publishes none was exported without this store: the shop's own log
may hold the same events. Then those up to the generation's clock do not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from serving.contract.artifacts import open_checked_array
from serving.live.events import OBSERVED, Flags
from serving.live.layout import HORIZONS_DAYS, Layout
from serving.live.reader import Snapshot
from serving.live.store import Progress
from serving.live.timeline import Timeline
from serving.live.transitions import apply_to_items
from serving.stages.features.ids import ItemIndex
from serving.stages.live.counts.counted_events import MOST_AHEAD_MS

STEP_S = 3_600
SECONDS_PER_DAY = 86_400.0
HORIZONS_S = np.array(HORIZONS_DAYS) * SECONDS_PER_DAY
FIELDS = ("positive_count", "decayed", "first_ms", "last_ms")
LEARNED_FIELDS = ("positive_count", "decayed", "last_ms")
LEARNED_SALES = "learned_sales"  # name of the file; missing if the export knew no live events
LEARNED_SALE = np.dtype(  # one item's live sales; files are sorted by item_id
    [("item_id", "<i8"), ("positive_count", "<i8"), ("decayed", "<f8", (len(HORIZONS_DAYS),)), ("last_ms", "<i8")]
)
NO_SALES = np.empty(0, LEARNED_SALE)


def load_learned_sales(folder: Path) -> np.ndarray | None:
    """Return the live sales that a stage's generation learned from, LEARNED_SALE [L]; None if unknown. Raises ArtifactError."""
    if not (folder / f"{LEARNED_SALES}.npy").exists():
        return None
    return open_checked_array(folder, LEARNED_SALES, LEARNED_SALE, None)


@dataclass
class LiveSales:
    """The live positive events of each item, by item position; the last row is padding.

    items: the catalogue; as_of_s: the generation's clock
    learned: LEARNED_SALE [L] of the generation; None: those up to its clock, which `read` finds
    counts: int64 [n_items + 1]; decayed: float64 [n_items + 1, horizons], the counts decayed as of last_s
    first_s, last_s: int64 [n_items + 1], first and latest event; clock_s: now. All times are feature time (timeline.py)
    has_live_events: whether an event of any kind came in a second after the generation's clock; set by `LiveItems`
    """

    items: ItemIndex
    as_of_s: int
    learned: np.ndarray | None = None
    counts: np.ndarray = field(init=False)
    decayed: np.ndarray = field(init=False)
    first_s: np.ndarray = field(init=False)
    last_s: np.ndarray = field(init=False)
    clock_s: int = field(init=False)
    has_live_events: bool = field(default=False, init=False)
    _found_until: int | None = field(default=None, init=False)  # sequence up to which `read` has found `learned`

    def __post_init__(self) -> None:
        n_rows = self.items.n_items + 1
        self.counts, self.first_s, self.last_s = (np.zeros(n_rows, np.int64) for _ in range(3))
        self.decayed, self.clock_s = np.zeros((n_rows, len(HORIZONS_DAYS))), self.as_of_s

    @property
    def elapsed_days(self) -> float:
        """Days from the generation's clock to now."""
        return (self.clock_s - self.as_of_s) / SECONDS_PER_DAY

    def count_days_since(self, moments_s: np.ndarray) -> np.ndarray:
        """Return the days from moments, int64 [N], to now; 0 for moments after the rounded clock."""
        return np.maximum(self.clock_s - moments_s, 0) / SECONDS_PER_DAY

    def read(
        self, snapshot: Snapshot, progress: Progress, headers: np.ndarray | None, changed_ids: list[int], after: int
    ) -> np.ndarray | None:
        """Read the sales since the last call. Return the positions of the changed items, int64 [N]; None for all items.

        headers: HEADER [N] of the events since the last call, after a sequence; None to read all items
        changed_ids: new items, which may have got a position after their sales were read
        """
        timeline = snapshot.read_timeline(progress, self.as_of_s)
        elapsed_s = max(timeline.skip_pauses(progress.watermark_ms // 1_000) - self.as_of_s, 0)
        clock_s = self.as_of_s + elapsed_s // STEP_S * STEP_S
        if self.learned is None or (headers is None and self._found_until is not None):
            self.learned, self._found_until = find_sales_until(self.as_of_s, snapshot), progress.last_sequence
        elif self._found_until is not None and headers is not None:
            self.learned = add_sales_until(self.as_of_s, self.learned, headers[max(self._found_until - after, 0) :])
            self._found_until = max(self._found_until, after + len(headers))
        if headers is None:
            ids, records = snapshot.read_all_items()
        else:
            ids = np.union1d(headers["item_id"], np.array(changed_ids, np.int64))
            rows, records = snapshot.read_items(ids)
            ids = ids[rows]
        positions = self._store(ids, records, timeline)
        stepped = clock_s != self.clock_s
        self.clock_s = clock_s
        return None if stepped or headers is None else positions

    @property
    def fading(self) -> np.ndarray:
        """The share of the generation's counts that decay has left by now, float64 [horizons]."""
        return np.exp(-(self.clock_s - self.as_of_s) / HORIZONS_S)

    def compute_live_counts(self, positions: np.ndarray) -> np.ndarray:
        """Return the counts of live events, decayed as of now, float64 [N, horizons]. positions: int64 [N]"""
        since_s = (self.clock_s - self.last_s[positions])[:, None]
        return self.decayed[positions] * np.exp(-since_s / HORIZONS_S)

    def _store(self, ids: np.ndarray, records: np.ndarray, timeline: Timeline) -> np.ndarray:
        """Store the records, [N], of items, int64 [N]. Return the positions, int64 [M], of those that the catalogue has."""
        positions = self.items.find_positions(np.ascontiguousarray(ids))
        is_known = (positions < self.items.n_items) & (records["positive_count"] > 0)
        positions = positions[is_known]
        counts, decayed, first_ms, last_ms = (records[name][is_known] for name in FIELDS)
        counts, decayed = self._subtract_learned(ids[is_known], counts, decayed, first_ms, last_ms)
        self.counts[positions], self.decayed[positions] = counts, decayed
        self.first_s[positions] = timeline.skip_all_pauses(first_ms // 1_000)
        self.last_s[positions] = timeline.skip_all_pauses(last_ms // 1_000)
        return positions

    def _subtract_learned(
        self, ids: np.ndarray, counts: np.ndarray, decayed: np.ndarray, first_ms: np.ndarray, last_ms: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return counts int64 [N] and decayed float64 [N, horizons] of items, minus what the generation learned from.

        A record that begins later holds nothing of that: its store began after the export, as when `export follow` judges.
        """
        if self.learned is None or not len(self.learned):
            return counts, decayed
        places = np.minimum(np.searchsorted(self.learned["item_id"], ids), len(self.learned) - 1)
        learned = self.learned[places]
        applies = (learned["item_id"] == ids) & (first_ms <= learned["last_ms"])
        age_s = np.maximum(last_ms - learned["last_ms"], 0)[:, None] / 1_000
        left = np.where(applies[:, None], learned["decayed"] * np.exp(-age_s / HORIZONS_S), 0.0)
        remaining = np.maximum(counts - np.where(applies, learned["positive_count"], 0), 0)
        return remaining, np.where(remaining[:, None] > 0, np.maximum(decayed - left, 0.0), 0.0)


def add_sales_until(as_of_s: int, learned: np.ndarray, headers: np.ndarray) -> np.ndarray:
    """Return LEARNED_SALE [L] with the sales up to a moment that arrived later. headers: HEADER [N] of new events"""
    is_late = (headers["type"] == OBSERVED) & (headers["time_ms"] // 1_000 <= as_of_s)
    late = headers[is_late & ((headers["flags"] & Flags.POSITIVE) != 0)]
    return add_sales(learned, late) if len(late) else learned


def add_sales(sales: np.ndarray, sold: np.ndarray) -> np.ndarray:
    """Return LEARNED_SALE [L] with further sales. sold: HEADER [N] of positive events"""
    ids = np.union1d(sales["item_id"], sold["item_id"])
    records, added = Layout().make_empty_items(len(ids)), np.zeros(len(ids), LEARNED_SALE)
    places = np.searchsorted(ids, sales["item_id"])
    for name in LEARNED_FIELDS:
        records[name][places] = sales[name]
    apply_to_items(records, np.searchsorted(ids, sold["item_id"]), sold)
    for name in LEARNED_FIELDS:
        added[name] = records[name]
    added["item_id"] = ids
    return added


def find_sales_until(as_of_s: int, snapshot: Snapshot) -> np.ndarray:
    """Return the sales up to a moment, LEARNED_SALE [L]: those of all records, minus what the log holds of later ones.

    The log holds the events of the last 30 days that came after an export (live/maintenance.py).
    """
    ids, records = snapshot.read_all_items()
    earlier = (records["positive_count"] > 0) & (records["first_ms"] // 1_000 <= as_of_s)
    blocks = snapshot.read_held_headers(snapshot.find_last_before(1_000 * as_of_s - MOST_AHEAD_MS))
    later = (headers[headers["time_ms"] // 1_000 > as_of_s] for _, headers in blocks)
    return subtract_sales(ids[earlier], records[earlier], later)


def subtract_sales(ids: np.ndarray, records: np.ndarray, blocks: Iterable[np.ndarray]) -> np.ndarray:
    """Return the sales that the records, [N], of items, int64 [N], count beside those of some events, LEARNED_SALE [L].

    blocks: HEADER [M] each
    """
    order = np.argsort(ids)
    ids, records = ids[order], records[order]
    left, others = np.zeros(len(ids), LEARNED_SALE), Layout().make_empty_items(len(ids))
    for name in LEARNED_FIELDS:
        left[name] = records[name]
    left["item_id"] = ids
    for headers in blocks if len(ids) else ():
        sold = headers[(headers["type"] == OBSERVED) & np.isin(headers["item_id"], ids)]
        apply_to_items(others, np.searchsorted(ids, sold["item_id"]), sold)
    age_s = (records["last_ms"] - others["last_ms"])[:, None] / 1_000
    fading = np.exp(-np.maximum(age_s, 0) / HORIZONS_S)
    left["positive_count"] -= others["positive_count"]
    left["decayed"] = np.maximum(
        left["decayed"] - np.where(others["positive_count"][:, None] > 0, others["decayed"] * fading, 0.0), 0.0
    )
    return left[left["positive_count"] > 0]
