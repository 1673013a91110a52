"""Point in time, record by record, and by definition: three computations of the same features."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.live.aggregations import (
    EVENT,
    Instants,
    StateTable,
    compile_aggregations,
    make_entity_keys,
    parse_aggregations,
)
from tests.unit.live.aggregations import twin

EVENT_NAMES = ("view", "cart", "purchase")
CATEGORY = {10: 1, 11: 1, 12: 2, 13: -7, 14: np.iinfo(np.int64).min}  # of each item; the last one has none
ENTITIES = ("user", "item", "department", "user x department")
SPANS = ({"window": "10min"}, {"window": "1h"}, {"window": "7d"}, {"half_life": "2h"}, {"session_gap": "30min"})
DAY_MS = 86_400_000


def declared() -> list[dict]:
    """Every combination of value, function and span that exists, over all entities."""
    tables = []
    for entity in ENTITIES:
        combinations: list[dict[str, Any]] = [
            {"value": value, "function": function, **span}
            for value in ("count", "amount", "price")
            for function in ("count", "sum", "mean")
            for span in SPANS
        ]
        combinations += [{"value": "distinct", "function": "distinct", "window": window} for window in ("10min", "7d")]
        combinations += [{"value": value, "function": "last", "n": 3} for value in ("count", "amount")]
        combinations += [{"value": "price", "function": "last", "n": 2, "window": "1h", "events": ["view"]}]
        combinations += [{"value": "count", "function": "count", "window": "1h", "events": ["cart", "purchase"]}]
        tables += [combination | {"entity": entity} for combination in combinations]
    return [table | {"name": f"a{number}"} for number, table in enumerate(tables)]


AGGREGATIONS = parse_aggregations(declared(), ["department"], EVENT_NAMES)
PLANS = compile_aggregations(AGGREGATIONS, EVENT_NAMES)

numbers = st.one_of(st.just(math.nan), st.floats(-100, 100, width=32), st.floats(0, 1000, width=32))
steps_ms = st.one_of(
    st.just(0),
    st.integers(0, 5_000),
    st.integers(0, 3 * 3_600_000),
    st.integers(-2 * DAY_MS, 0),
    st.sampled_from([1_800_000, 1_800_001, 7 * DAY_MS, -DAY_MS, -DAY_MS - 1]),
    st.sampled_from([10_000 * buckets for buckets in (-61, -60, -59, 59, 60, 61)]),
)


@st.composite
def logs(draw):
    """Events in the order of their sequence; times mostly rise, and sometimes fall back."""
    sequence, time_ms, events = draw(st.integers(0, 5)), draw(st.integers(0, 10**12)), []
    for _ in range(draw(st.integers(1, 25))):
        sequence += draw(st.integers(1, 3))
        time_ms = max(0, time_ms + draw(steps_ms))
        user_id, item_id = draw(st.integers(-1, 2)), draw(st.sampled_from(list(CATEGORY)))
        name, weight = draw(st.sampled_from(EVENT_NAMES)), draw(st.sampled_from([1.0, 0.125, 3.0]))
        events.append(twin.Event(sequence, time_ms, user_id, item_id, name, weight, draw(numbers), draw(numbers)))
    return events


@st.composite
def instants(draw, log):
    """(time, sequence) pairs, ascending by sequence, inside, before and after the log."""
    pairs = []
    for _ in range(draw(st.integers(1, 5))):
        event = draw(st.sampled_from(log))
        pairs.append((max(0, event.time_ms + draw(steps_ms)), event.sequence + draw(st.integers(-2, 2))))
    return sorted(pairs, key=lambda pair: pair[1])


def as_array(log: list[twin.Event]) -> np.ndarray:
    return np.array([(*event[:4], EVENT_NAMES.index(event.event), *event[5:]) for event in log], EVENT)


def keys_of(entity: str, user_ids: list[int], item_ids: list[int]) -> np.ndarray:
    categories = np.array([CATEGORY[item] for item in item_ids], np.int64)
    return make_entity_keys(entity, np.array(user_ids, np.int64), np.array(item_ids, np.int64), {"department": categories})


def belongs(entity: str, event: twin.Event, user_id: int, item_id: int) -> bool:
    """Does the event count for the entity that (user_id, item_id) stands for?"""
    category = CATEGORY[item_id]
    same_category = category == CATEGORY[event.item_id] and category != np.iinfo(np.int64).min
    return {
        "user": event.user_id == user_id,
        "item": event.item_id == item_id,
        "department": same_category,
        "user x department": same_category and event.user_id == user_id,
    }[entity]


def sold(sequence: int, time_ms: int, amount: float) -> twin.Event:
    return twin.Event(sequence, time_ms, 1, 10, "purchase", 1.0, amount, math.nan)


BUCKET_MS = 10_000  # of the window of ten minutes
EDGES = {
    "late by 59 buckets": [sold(0, 700 * BUCKET_MS, 1.0), sold(1, 641 * BUCKET_MS, 2.0)],
    "late by 60 buckets": [sold(0, 700 * BUCKET_MS, 1.0), sold(1, 640 * BUCKET_MS, 2.0)],
    "59 buckets later": [sold(0, 641 * BUCKET_MS, 1.0), sold(1, 700 * BUCKET_MS, 2.0)],
    "60 buckets later": [sold(0, 640 * BUCKET_MS, 1.0), sold(1, 700 * BUCKET_MS, 2.0)],
    "same time": [sold(0, 5_000, 1.0), sold(1, 5_000, 2.0), sold(2, 5_000, 4.0), sold(3, 5_000, 8.0)],
    "late by all that is allowed": [sold(0, 2 * DAY_MS, 1.0), sold(1, DAY_MS, 2.0), sold(2, DAY_MS - 1, 4.0)],
}


@pytest.mark.parametrize("log", EDGES.values(), ids=EDGES)
def test_the_three_computations_agree_at_the_edges(log):
    assert_agreement(log, [(log[-1].time_ms, log[-1].sequence), (log[-1].time_ms, log[-1].sequence + 1)], 1, 10)


@given(st.data())
def test_the_three_computations_agree(data):
    log = data.draw(logs())
    moments = data.draw(instants(log))
    assert_agreement(log, moments, data.draw(st.integers(-1, 2)), data.draw(st.sampled_from(list(CATEGORY))))


def assert_agreement(log: list[twin.Event], moments: list[tuple[int, int]], user_id: int, item_id: int) -> None:
    """moments: (time, sequence), ascending by sequence; user_id, item_id: what the entities stand for"""
    events = as_array(log)
    times, sequences = (np.array(values, np.int64) for values in zip(*moments, strict=True))
    for entity, plan in PLANS.items():
        keys = keys_of(entity, [event.user_id for event in log], [event.item_id for event in log])
        wanted = keys_of(entity, [user_id] * len(moments), [item_id] * len(moments))
        at_once = plan.compute_point_in_time(events, keys, Instants(wanted, times, sequences))

        table, one_by_one, start = StateTable(plan), [], 0
        for time_ms, sequence in moments:
            end = int(np.searchsorted(events["sequence"], sequence))
            table.update(keys[start:end], events[start:end])
            one_by_one.append(table.read(wanted[:1], time_ms)[0])
            start = end
        np.testing.assert_array_equal(at_once, np.stack(one_by_one))

        own = [event for event in log if belongs(entity, event, user_id, item_id)]
        declared_here = [aggregation for aggregation in AGGREGATIONS if aggregation.entity == entity]
        for row, moment in enumerate(moments):
            expected = [value for aggregation in declared_here for value in twin.features(aggregation, own, *moment)]
            np.testing.assert_allclose(at_once[row], np.array(expected), rtol=1e-6, atol=1e-9, err_msg=str(moment))
            for column, aggregation in columns_of(declared_here):
                if aggregation.function in ("count", "distinct") and not aggregation.half_life:
                    assert at_once[row, column] == expected[column]


def columns_of(aggregations):
    names = [(name, aggregation) for aggregation in aggregations for name in aggregation.feature_names]
    return [(column, aggregation) for column, (_, aggregation) in enumerate(names)]


@given(st.data())
def test_how_a_log_is_cut_into_batches_changes_nothing(data):
    log = data.draw(logs())
    events = as_array(log)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(log)), max_size=4)))
    plan = PLANS["user"]
    keys = keys_of("user", [event.user_id for event in log], [event.item_id for event in log])
    whole, parts = StateTable(plan), StateTable(plan)
    whole.update(keys, events)
    for start, end in pairwise([0, *cuts, len(log)]):
        parts.update(keys[start:end], events[start:end])
    assert whole.copy_records(keys).tobytes() == parts.copy_records(keys).tobytes()


@pytest.mark.parametrize("n_ids", [1, 3, 10, 50, 300])
def test_the_distinct_estimate_is_near_the_number_of_ids(n_ids):
    plan = PLANS["user"]
    column = next(c for c, a in columns_of([a for a in AGGREGATIONS if a.entity == "user"]) if a.value == "distinct")
    estimates = []
    for start in range(0, 40 * n_ids, n_ids):
        events = np.zeros(2 * n_ids, EVENT)  # everything twice
        events["sequence"], events["item_id"] = np.arange(2 * n_ids), start + np.arange(2 * n_ids) % n_ids
        records = plan.make_empty(1)
        plan.update(records, np.zeros(2 * n_ids, np.int64), events)
        estimates.append(plan.read(records, 0)[0, column])
    assert abs(np.mean(estimates) / n_ids - 1) < 0.03
    assert np.std(estimates) / n_ids < 0.09


def test_times_that_no_clock_shows_are_not_aggregated():
    plan, events = PLANS["item"], np.zeros(3, EVENT)
    records, events["time_ms"] = plan.make_empty(1), [-1, 1 << 60, np.iinfo(np.int64).min]
    plan.update(records, np.zeros(3, np.int64), events)
    assert records.tobytes() == plan.make_empty(1).tobytes()


def test_rows_without_a_record_are_skipped():
    plan = PLANS["item"]
    records, events = plan.make_empty(2), np.zeros(3, EVENT)
    plan.update(records, np.array([-1, 2, -(1 << 40)]), events)
    assert records.tobytes() == plan.make_empty(2).tobytes()
