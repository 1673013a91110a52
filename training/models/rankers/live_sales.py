"""Give training requests the sales that a live store would have counted by then (serving/stages/live/counts/sales.py).

A server with live events moves popularity, and the days since an item's first and latest sale, on to the moment of a request.
With those of the split, an item that first sold before a user's last visit would seem newer than that visit.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from serving.loops.compiled import compiled
from serving.stages.features.ids import ItemIndex
from serving.stages.features.item_statistics import HORIZONS_DAYS, ItemStatistics
from serving.stages.features.ranking import N_FEATURES, POPULARITY, SCALE, SOLD, write_sales
from training.features.build import Examples

SECONDS_PER_DAY = 86_400.0
HORIZONS_S = np.array(HORIZONS_DAYS) * SECONDS_PER_DAY


def put_live_sales(
    items: ItemIndex,
    train: pd.DataFrame,
    statistics: ItemStatistics,
    rows: np.ndarray,
    times_s: np.ndarray,
    users: Examples,
    candidates: np.ndarray,
    cross: np.ndarray,
) -> None:
    """Write the features that depend on sales as `compute_cross_features` computes them when all earlier sales are known.

    train: the log, sorted by time; statistics: of a part of it from its first event on, whose popularity around past visits
    stays; rows: int64 [N] of `train`, each just before which a request comes at the unix second times_s, int64 [N]
    users: the Examples of the N users; candidates: int [N, C] positions
    cross: float32 [N, C, F], whose last columns are the cross features, written
    """
    sold_rows = np.flatnonzero(train["positive"].to_numpy())
    sales = train.iloc[sold_rows]
    positions, sold_s = items.find_positions(sales["item_id"].to_numpy(np.int64)), sales["timestamp"].to_numpy(np.int64)
    order = np.argsort(positions, kind="stable")
    starts = np.searchsorted(positions[order], np.arange(items.n_items + 1))
    past_popularity = statistics.popularity_then.view(np.uint16)
    log_days = (times_s - sold_s.min()) / SECONDS_PER_DAY
    by_item = (starts, sold_rows[order], sold_s[order], _accumulate_fading(starts, sold_s[order], HORIZONS_S))
    idle_days = np.where(users.history_positions[:, 0] < items.n_items, np.maximum(users.history_age_days[:, 0], 0), 0)
    requests = (rows, times_s, log_days, idle_days.astype(np.float32), candidates.astype(np.int64), cross[..., -N_FEATURES:])
    _write(*by_item, past_popularity, statistics.clock.bucket_days, HORIZONS_S, *requests)


@compiled
def _accumulate_fading(starts, times_s, horizons_s):
    """Return each sale's number of sales so far of its item, decayed as of its time, float64 [E, horizons]."""
    decayed = np.ones((len(times_s), len(horizons_s)))
    for item in range(len(starts) - 1):
        for sale in range(starts[item] + 1, starts[item + 1]):
            for number in range(len(horizons_s)):
                fading = np.exp(-(times_s[sale] - times_s[sale - 1]) / horizons_s[number])
                decayed[sale, number] += decayed[sale - 1, number] * fading
    return decayed


@compiled
def _write(
    starts, sold_rows, sold_s, decayed, popularity_then, bucket_days, horizons_s,
    rows, times_s, log_days, idle_days, candidates, cross,
):  # fmt: skip
    """Write the features of all requests. starts: int64 [n_items + 1], of each item's sales among those sorted by item."""
    n_items = len(starts) - 1
    popularity = np.zeros((n_items + 1, 1 + len(horizons_s)), np.float32)
    sold_days = np.zeros((n_items + 1, 2), np.float32)
    for request in range(len(candidates)):
        for item in candidates[request]:
            if item == n_items:
                continue
            first, end = starts[item], starts[item + 1]
            count = np.searchsorted(sold_rows[first:end], rows[request])
            popularity[item] = 0.0
            sold_days[item, 0], sold_days[item, 1] = 0.0, log_days[request]
            if count > 0:
                latest = first + count - 1
                since_s = times_s[request] - sold_s[latest]
                popularity[item, 0] = np.log1p(count) * SCALE
                for number in range(len(horizons_s)):
                    fading = np.exp(-since_s / horizons_s[number])
                    popularity[item, 1 + number] = np.log1p(decayed[latest, number] * fading) * SCALE
                sold_days[item, 0] = (times_s[request] - sold_s[first]) / SECONDS_PER_DAY
                sold_days[item, 1] = since_s / SECONDS_PER_DAY
        own_cross = cross[request]
        moment = (log_days[request], bucket_days, idle_days[request])
        write_sales(popularity, popularity_then, sold_days, *moment, candidates[request], own_cross)
        for place in range(candidates.shape[1]):
            if candidates[request, place] == n_items:
                own_cross[place, POPULARITY : SOLD + 2] = 0.0
