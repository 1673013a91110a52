"""Compute the hit rates of LRU levels exactly from a trace of keys, without running a cache.

An LRU of n rows holds a key exactly if fewer than n other keys were used since its last use. That number, the stack distance,
depends on the trace only. Distances come from counting, for each use, the repeated uses in its window: one radix pass over the
whole trace per bit, instead of one cache operation per key.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from serving.contract.errors import DataError

NEVER = np.iinfo(np.int64).max  # stack distance of a key's first use
WARM_UP_SHARE = 0.2  # share of the trace that fills the levels and is not counted


@dataclass(frozen=True)
class HitRates:
    """Shares of lookups answered by each level; the rest is answered by L3 (or, without one, by the default vector)."""

    lookups: int  # counted, after the warm-up
    l1: float  # of all lookups
    l2: float  # of all lookups, not only of L1's misses

    @property
    def memory(self) -> float:
        """Share of lookups that never leave memory."""
        return self.l1 + self.l2


def find_previous_uses(keys: np.ndarray) -> np.ndarray:
    """Return the position of the previous use of each key, int64 [N], -1 at the first."""
    order = np.argsort(keys, kind="stable")
    same = keys[order[1:]] == keys[order[:-1]]
    previous = np.full(len(keys), -1, np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def compute_stack_distances(keys: np.ndarray) -> np.ndarray:
    """Return the number of distinct other keys since each key's previous use, int64 [N], NEVER at the first."""
    previous = find_previous_uses(keys)
    between = np.arange(len(keys)) - previous - 1
    # Count each key in between once: skip a use if the previous use of its key is also in between.
    distances = between - _count_greater_before(previous + 1)
    return np.where(previous < 0, NEVER, distances)


def _count_greater_before(values: np.ndarray) -> np.ndarray:
    """Return how many earlier elements are greater, int64 [N], for values >= 0, from the highest bit down."""
    greater = np.zeros(len(values), np.int64)
    order = np.arange(len(values))  # sorted by the bits above the current one, in order of time within equals
    for bit in reversed(range(int(values.max(initial=0)).bit_length())):
        in_order = values[order]
        is_set = (in_order >> bit) & 1
        group = in_order >> (bit + 1)
        set_until = np.cumsum(is_set)
        starts = np.concatenate([[True], group[1:] != group[:-1]])
        set_before_group = np.maximum.accumulate(np.where(starts, set_until - is_set, 0))
        unset = is_set == 0
        greater[order[unset]] += (set_until - set_before_group)[unset]
        order = order[np.argsort(in_order >> bit, kind="stable")]
    return greater


def predict_hit_rates(keys: np.ndarray, l1_rows: int, l2_rows: int, instances: int = 1) -> HitRates:
    """Return the hit rates of one table under a trace. keys: int64 [N] in order of use, unique within a request.

    Uses are dealt to the instances in turn; each has its own L1 of l1_rows, and all share an L2 of l2_rows, which sees L1's
    misses only. The first fifth of the trace fills the levels and is not counted.
    """
    keys = np.asarray(keys)
    if keys.ndim != 1 or keys.dtype.kind not in "iu" or not keys.size:
        raise DataError(
            f"the key trace is {keys.dtype} {list(keys.shape)}. Expected integers [N], one per lookup. "
            "Record the keys of a table in order of use."
        )
    misses = np.zeros(len(keys), bool)
    for instance in range(instances):
        misses[instance::instances] = compute_stack_distances(keys[instance::instances]) >= l1_rows
    l2_hits = np.zeros(len(keys), bool)
    l2_hits[misses] = compute_stack_distances(keys[misses]) < l2_rows
    counted = slice(int(len(keys) * WARM_UP_SHARE), None)
    return HitRates(len(misses[counted]), float(1 - misses[counted].mean()), float(l2_hits[counted].mean()))
