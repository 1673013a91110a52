"""Compile declared aggregations to plans, which compute the same features from a whole log or from stored records.

EntityPlan.compute_point_in_time(events, …)    features at any moments of a log
EntityPlan.update(records, …)                  add events to records
EntityPlan.read(records, as_of_ms)             features of records
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from serving.contract.errors import ConfigError
from serving.live.aggregations import loops
from serving.live.aggregations.layout import lay_out
from serving.live.aggregations.spec import CROSS, ITEM, USER, Aggregation, is_of_users
from serving.loops.hashing import hash_integers, hash_strings

EVENT = np.dtype(
    [
        ("sequence", np.int64),  # its place in the log, rising
        ("time_ms", np.int64),  # event time
        ("user_id", np.int64),
        ("item_id", np.int64),
        ("event", np.int64),  # number of its name in `event_names`, 0 to 62
        ("weight", np.float32),
        ("amount", np.float32),  # NaN = missing, as in price
        ("price", np.float32),
    ]
)
MOST_EVENT_NAMES = 63
NO_KEY = np.iinfo(np.int64).min  # of an event that belongs to no entity, such as one whose item has no category
KEY_WIDTH = 2
VALUE_FIELDS = ("weight", "amount", "price")  # in the order of loops.WEIGHT, AMOUNT, PRICE


class Instants(NamedTuple):
    """M moments at which features are computed.

    keys: int64 [M, KEY_WIDTH] of the entities; time_ms: int64 [M]
    sequence: int64 [M] of the first event that is not yet known at the moment
    """

    keys: np.ndarray
    time_ms: np.ndarray
    sequence: np.ndarray


@dataclass(frozen=True)
class EntityPlan:
    """All aggregations of one entity. Records are a contiguous array of `dtype`.

    names: of the features, in their order; dtype: of a record (zeros are the record of an entity without events)
    cells, reads: the program of `loops.py`, int64 [n_cells, CELL_WIDTH] and int64 [F, 3]
    """

    entity: str
    names: tuple[str, ...]
    dtype: np.dtype
    cells: np.ndarray
    reads: np.ndarray

    def make_empty(self, n_records: int) -> np.ndarray:
        """Return `n_records` records without events."""
        return np.zeros(n_records, self.dtype)

    def update(self, records: np.ndarray, rows: np.ndarray, events: np.ndarray) -> None:
        """Add events, sorted by sequence, to records in place.

        records: `dtype` [R]; rows: int64 [N] record of each event, -1 = none; events: EVENT [N]
        """
        columns = self._take_columns(events)
        loops.update_records(*self._make_views(records), rows.astype(np.int64, copy=False), *columns, self.cells)

    def read(self, records: np.ndarray, as_of_ms: int | np.ndarray) -> np.ndarray:
        """Return the features, float32 [R, F], of records `dtype` [R]. as_of_ms: time of all of them, or int64 [R]"""
        features = np.empty((len(records), len(self.names)), np.float32)
        clocks = np.array(as_of_ms, np.int64, ndmin=1)
        loops.read_records(*self._make_views(records), clocks, self.cells, self.reads, features)
        return features

    def compute_point_in_time(self, events: np.ndarray, keys: np.ndarray, instants: Instants) -> np.ndarray:
        """Return the features, float32 [M, F], at each instant, from the events that are known by then.

        events: EVENT [N] sorted by sequence; keys: int64 [N, KEY_WIDTH] of `make_entity_keys`
        """
        features = np.empty((len(instants.time_ms), len(self.names)), np.float32)
        order, groups = _sort_for_replay(events["sequence"], keys, instants)
        scratch = self._make_views(self.make_empty(1))
        clocks = instants.time_ms.astype(np.int64, copy=False)
        columns = self._take_columns(events)
        belongs = keys[:, 0] != NO_KEY  # an instant without a key gets the features of no events at all
        loops.replay_events(order, groups, *scratch, belongs, *columns, clocks, self.cells, self.reads, features)
        return features

    def _make_views(self, records: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return views of the records as int64 [R, W], float64 [R, W] and int32 [R, 2 W]."""
        whole = records.view(np.int64).reshape(-1, self.dtype.itemsize // 8)
        return whole, whole.view(np.float64), whole.view(np.int32)

    def _take_columns(self, events: np.ndarray) -> tuple[np.ndarray, ...]:
        """Return the columns of events that the loops take: time_ms, event, values, other (ids of the other entity)."""
        values = np.stack([events[name] for name in VALUE_FIELDS]).astype(np.float64)
        other = events["item_id" if is_of_users(self.entity) else "user_id"]
        contiguous = [np.ascontiguousarray(events[name]) for name in ("time_ms", "event")]
        return (*contiguous, values, np.ascontiguousarray(other))


def compile_aggregations(aggregations: Sequence[Aggregation], event_names: Sequence[str]) -> dict[str, EntityPlan]:
    """Return one plan per entity, in the order in which entities are first named. event_names: number -> name, as in EVENT."""
    if len(event_names) > MOST_EVENT_NAMES:
        raise ConfigError(
            f"[events] has {len(event_names)} names; expected at most {MOST_EVENT_NAMES}. Merge some that count alike."
        )
    by_entity: dict[str, list[Aggregation]] = {}
    for aggregation in aggregations:
        by_entity.setdefault(aggregation.entity, []).append(aggregation)
    return {
        entity: EntityPlan(entity, tuple(chain.from_iterable(a.feature_names for a in group)), *lay_out(group, event_names))
        for entity, group in by_entity.items()
    }


def make_entity_keys(
    entity: str, user_ids: np.ndarray, item_ids: np.ndarray, category_keys: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Return int64 [N, KEY_WIDTH]: which record each event belongs to; NO_KEY where it belongs to none.

    category_keys: category column -> int64 [N] keys of the events' categories, NO_KEY = missing. A key must mean the same
    category in every generation
    """
    keys = np.zeros((len(user_ids), KEY_WIDTH), np.int64)
    if entity in (USER, ITEM):
        keys[:, 0] = user_ids if entity == USER else item_ids
    elif entity.startswith(CROSS):
        categories = category_keys[entity.removeprefix(CROSS)]
        keys[:, 0], keys[:, 1] = np.where(categories == NO_KEY, NO_KEY, user_ids), categories
    else:
        keys[:, 0] = category_keys[entity]
    return keys


def hash_categories(texts: np.ndarray) -> np.ndarray:
    """Return a key for each category, object [N] of str or None -> int64 [N]; NO_KEY for None. Equal in every generation."""
    missing = np.array([text is None for text in texts], bool)
    # The shift keeps keys from being negative, so that none is NO_KEY.
    return np.where(missing, NO_KEY, (hash_strings(texts) >> np.uint64(1)).astype(np.int64))


def join_keys(keys: np.ndarray) -> np.ndarray:
    """Return one number for each key, int64 [N, KEY_WIDTH] -> int64 [N]; NO_KEY for keys of no entity.

    The numbers are equal in every generation. Two keys get the same one with a probability of 2^-63.
    """
    first, second = np.ascontiguousarray(keys.T)
    joined = hash_integers(hash_integers(first).view(np.int64) ^ second) >> np.uint64(1)
    return np.where(first == NO_KEY, NO_KEY, joined.astype(np.int64))


def _sort_for_replay(sequence: np.ndarray, keys: np.ndarray, instants: Instants) -> tuple[np.ndarray, np.ndarray]:
    """Return (order, groups) for `loops.replay_events`: an instant comes before the event of the same sequence."""
    n_events = len(sequence)
    all_keys = np.concatenate([keys, instants.keys])
    # Events are sorted by sequence. An instant is placed directly before the first event that it must not see.
    places = np.concatenate([2 * np.arange(n_events) + 1, 2 * np.searchsorted(sequence, instants.sequence)])
    order = np.lexsort((places, all_keys[:, 1], all_keys[:, 0]))
    ordered = all_keys[order]
    starts = np.ones(len(order), bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return order, np.cumsum(starts)
