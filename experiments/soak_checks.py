"""Check looked-up rows against the versions that they may have (`soak.py` lists the faults)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from serving.tables.store.ring import UpdateRing
from serving.tables.store.row_formats import RowCodec
from serving.tables.store.tables import Rows

WIDTH = 8
VISIBLE_WITHIN_S, RESTARTED_WITHIN_S = 5.0, 10.0  # generous: milliseconds, and 3 to 4 s from a kill until it has caught up
FAULTS = ("foreign", "torn", "early", "stale", "fallen", "late", "lost")


def make_rows(keys: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """Return float32 [N, 8]: the key, then the version seven times."""
    rows = np.repeat(versions.astype(np.float32)[:, None], WIDTH, axis=1)
    rows[:, 0] = keys
    return rows


class Applied:
    """The versions that the updater applied last, int32 [rows] by key; 0 where none was seen."""

    def __init__(self, ring: UpdateRing, codec: RowCodec, n_rows: int) -> None:
        self._ring, self._codec = ring, codec
        self._position = max(0, ring.head - ring.size // 2)
        self.versions = np.zeros(n_rows, np.int32)

    def follow(self) -> None:
        """Read the updates in the ring since the last call. Forget all versions when some of them were overwritten."""
        recent = self._ring.read_since(self._position)
        if recent is None:
            self._position = self._ring.head
            self.versions[:] = 0
            return
        keys, stored, self._position = recent
        self.versions[keys] = self._codec.decode(stored)[:, 1].astype(np.int32)


class Checker:
    """Compares the rows that one process read with the versions that they may have, int32 [rows] by key.

    published: the last ones acknowledged; due: those that must be visible. Others write both while this reads.
    """

    def __init__(self, published: np.ndarray, due: np.ndarray, applied: Applied) -> None:
        self._published, self._due, self._applied = published, due, applied
        self._given = np.zeros(len(published), np.int32)

    def look_up(self, lookup: Callable[[np.ndarray], Rows[np.ndarray]], keys: np.ndarray) -> tuple[dict[str, np.ndarray], bool]:
        """Look up int64 [N] keys; return the keys of the wrong rows by fault, and whether the look-up was degraded."""
        self._applied.follow()
        due, applied = self._due[keys], self._applied.versions[keys]
        answer = lookup(keys)
        rows = answer.values
        newest = self._published[keys] + 1  # the next version may be visible before it is acknowledged
        given, version = self._given[keys], rows[:, 1]
        foreign, torn = rows[:, 0] != keys, (rows[:, 1:] != rows[:, 1:2]).any(axis=1)
        known = ~foreign & ~torn & (version <= newest)
        np.maximum.at(self._given, keys[known], version[known].astype(np.int32))
        of_kind = {"foreign": foreign, "torn": torn & ~foreign, "early": ~foreign & ~torn & ~known}
        of_kind |= {"stale": known & (version < applied), "fallen": known & (version < given), "late": known & (version < due)}
        return {kind: keys[is_faulty] for kind, is_faulty in of_kind.items() if is_faulty.any()}, answer.degraded


class Due:
    """Move versions into `due` (int32 [rows]) when they must be visible: a while after both them and the updater's start."""

    def __init__(self, due: np.ndarray, now_s: float) -> None:
        self._due, self._updater_since_s = due, now_s
        self._waiting: deque[tuple[float, np.ndarray, np.ndarray]] = deque()

    def note_acknowledged(self, keys: np.ndarray, versions: np.ndarray, now_s: float) -> None:
        self._waiting.append((now_s, keys, versions))

    def note_updater_killed(self, now_s: float) -> None:
        self._updater_since_s = now_s

    def advance(self, now_s: float) -> None:
        if now_s < self._updater_since_s + RESTARTED_WITHIN_S:
            return
        while self._waiting and now_s >= self._waiting[0][0] + VISIBLE_WITHIN_S:
            _, keys, versions = self._waiting.popleft()
            self._due[keys] = versions
