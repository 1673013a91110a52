"""Explanations name the sources of items that are new since the export, or have sold well only since then."""

from __future__ import annotations

import numpy as np

from gateway.answers.explain import build_inputs, find_sources
from live.exposures import SOURCE_NAMES
from serving.pipeline import Pipeline
from tests.unit.live.answers import event_inputs, last_event_ms, upserted
from triton_recommender import Query

LIVE_PAIRS, LIVE_SALES, NEW_ITEMS = "live_pairs", "live_sales", "new_items"
BUYER, VISITOR = 7, -5  # a user of the log, and one without a history


def name_sources(pipeline: Pipeline, user: int, item: int) -> set[str]:
    inputs = build_inputs(pipeline, Query(user))
    trace = inputs | pipeline.trace(inputs)
    position = int(pipeline.stages["retrieve"].items.find_positions(np.array([item]))[0])
    [(sources, _)] = find_sources(pipeline, trace, [position])
    for ids, marks in (("candidate_ids", "candidate_sources"), ("item_ids", "sources")):  # the answer says the same
        for bits in trace[marks][trace[ids] == item].tolist():
            assert {name for bit, name in SOURCE_NAMES.items() if bit & bits} == set(sources)
    return set(sources)


def test_a_new_item_is_proposed_as_such_while_it_may_be_served(pipeline, upsert):
    assert name_sources(pipeline, BUYER, 1_000) == set()
    upserted(upsert, 1_000, kind="game", price=3.0)
    assert NEW_ITEMS in name_sources(pipeline, BUYER, 1_000)
    assert NEW_ITEMS not in name_sources(pipeline, BUYER, 5)
    upserted(upsert, 1_000, available=False)
    assert NEW_ITEMS not in name_sources(pipeline, BUYER, 1_000)


def test_what_sells_now_is_proposed_to_users_without_a_history(pipeline, observe, repository):
    assert LIVE_SALES not in name_sources(pipeline, VISITOR, 45)
    at_ms = last_event_ms(repository) + 1_000
    observe(event_inputs(user_id=list(range(1_000, 1_080)), item_id=[45] * 80, timestamp_ms=[at_ms] * 80))
    assert LIVE_SALES in name_sources(pipeline, VISITOR, 45)
    assert LIVE_SALES not in name_sources(pipeline, BUYER, 45)


def test_what_is_bought_together_since_the_export_is_proposed(pipeline, observe, repository):
    at_ms, first, second = last_event_ms(repository) + 1_000, 3, 5
    observe(event_inputs(user_id=[101, 101, 200], item_id=[first, second, first], timestamp_ms=[at_ms, at_ms + 1, at_ms + 2]))
    assert LIVE_PAIRS in name_sources(pipeline, 200, second)
    assert LIVE_PAIRS not in name_sources(pipeline, 200, 45)
