"""Give training requests the pairs that a live store would have counted by then (serving/stages/live/counts/pairs.py).

For serving, what is new came after the export; for training, it is in the later part of the log, before the request.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex
from serving.stages.live.counts.pair_counts import PairCounts, is_among
from serving.stages.live.counts.visits import USER_EVENTS, VISIT_S
from serving.stages.search.search import Blocked


def put_live_pairs(
    items: ItemIndex,
    train: pd.DataFrame,
    later: pd.DataFrame,
    rows: np.ndarray,
    history: np.ndarray,
    candidates: np.ndarray,
    scores: np.ndarray,
) -> np.ndarray:
    """Put strong companions among the candidates of requests. Return their strengths, float32 [N, C].

    train, later: as for `make_visit_requests`; rows: int64 [N] of `train`, ascending, each just before which a request comes
    history: int64 [N, H] positions; candidates: int64 [N, C] and scores: float32 [N, C], both written
    """
    pair_rows, pairs = find_pairs(items, train, later)
    live, servable = PairCounts(items.n_items), np.append(np.ones(items.n_items, bool), False)
    strengths = np.empty(candidates.shape, np.float32)
    ends = np.searchsorted(pair_rows, rows)  # pairs of earlier rows
    start, bounds = 0, np.array([0, history.shape[1]])
    for number, end in enumerate(ends.tolist()):
        if end > start:
            live.add(pairs[start:end])
            start = end
        own_history, part = history[number, None], slice(number, number + 1)
        live.put_candidates(own_history, Blocked(own_history[0], bounds), servable, candidates[part], scores[part])
        strengths[part], _ = live.sum_strengths(own_history, candidates[part])
    return strengths


def find_pairs(items: ItemIndex, train: pd.DataFrame, later: pd.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of the newer events, int64 [P] ascending, and the pairs, int64 [P, 2] positions."""
    positive_rows = np.flatnonzero(train["positive"].to_numpy())
    events = train.iloc[positive_rows]
    order = np.argsort(events["user_id"].to_numpy(), kind="stable")
    is_new = np.zeros(len(train), bool)
    is_new[later["row"].to_numpy()] = True
    rows = positive_rows[order]
    columns = (events[name].to_numpy(np.int64)[order] for name in ("user_id", "timestamp"))
    found_pairs = _find_pairs(*columns, items.find_positions(events["item_id"].to_numpy(np.int64)[order]), is_new[rows])
    pair_rows = rows[found_pairs[:, 0]]
    by_row = np.argsort(pair_rows, kind="stable")
    return pair_rows[by_row], found_pairs[by_row, 1:]


@compiled
def _find_pairs(users, times_s, positions, is_new):
    """Return int64 [P, 3]: the newer event, its item and the other item. Arguments: [E], sorted by user and time."""
    pairs = np.empty((64, 3), np.int64)
    count = 0
    for event in range(len(users)):
        if not is_new[event]:
            continue
        start = event  # of the visit
        while start > max(event - USER_EVENTS + 1, 0) and users[start - 1] == users[event]:
            if times_s[event] - times_s[start - 1] > VISIT_S:
                break
            start -= 1
        if is_among(positions[event], positions[start:event]):
            continue
        for other in range(event - 1, start - 1, -1):
            if is_among(positions[other], positions[other + 1 : event]):
                continue
            if count == len(pairs):
                more = np.empty((2 * count, 3), np.int64)
                more[:count] = pairs
                pairs = more
            pairs[count] = event, positions[event], positions[other]
            count += 1
    return pairs[:count]
