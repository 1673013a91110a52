"""Bring what training requests say of items' sales to the scale at which it is served.

Training requests are made before the last fifth of each user's events, which are most of the log's last weeks. Without them,
items look older than they are served, and less sold of late. Such a number orders items rightly, but its size is another one.
So each is shifted and stretched to the mean and the deviation that it has among the candidates of requests as served.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from serving.stages.features.ranking import N_FEATURES, POPULARITY, SHARE
from training.models.ranking_data import Requests

# of the last axis of `Requests.cross`: popularity to last_sold_since
SALES = slice(POPULARITY - N_FEATURES, SHARE - N_FEATURES)


def align_requests(requests: Requests, served: Requests) -> Requests:
    """Return the requests with sales numbers of the same mean and deviation as in `served`.

    These are the numbers of items that differ between the two catalogues, and the columns SALES. served: as they will be served
    """
    if not (requests.valid.any() and served.valid.any()):
        return requests
    numbers, cross = requests.items.numbers.copy(), requests.cross.copy()
    for column in range(numbers.shape[1]):
        if not np.array_equal(numbers[:, column], served.items.numbers[:, column]):
            values = numbers[:, column]
            numbers[:, column] = _align(
                values,
                values[requests.candidates[requests.valid]],
                served.items.numbers[served.candidates[served.valid], column],
            )
    for column in range(*SALES.indices(cross.shape[2])):
        values = cross[..., column]
        values[requests.valid] = _align(values[requests.valid], values[requests.valid], served.cross[served.valid, column])
    return replace(requests, items=replace(requests.items, numbers=numbers), cross=cross)


def _align(values: np.ndarray, own: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Return values whose mean and deviation over `own` become those of `wanted`. own, wanted: float32 [n]"""
    own_mean, own_deviation, mean, deviation = (f(x, dtype=np.float64) for x in (own, wanted) for f in (np.mean, np.std))
    stretch = deviation / own_deviation if own_deviation > 0 else 0.0
    return ((values - own_mean) * stretch + mean).astype(np.float32)
