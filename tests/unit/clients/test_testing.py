"""The fake refuses what a server refuses, so that a shop's own tests find it."""

from __future__ import annotations

import time
from dataclasses import fields
from typing import get_args, get_type_hints

import numpy as np
import pytest

from serving.contract.tensors import OBSERVE, ContextColumn, make_live_specs
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.events import EventKinds
from triton_recommender import Event, InvalidRequest, Recommender
from triton_recommender.testing import FakeRecommender

NOW_MS = time.time_ns() // 1_000_000
DEVICE = ContextColumn("device", "string")


def find_server_fault(inputs: dict[str, np.ndarray]) -> str | None:
    """Return what the model `observe` says of one event. inputs: tensors of the client"""
    absent = {
        spec.name: np.array([[spec.fill]], spec.numpy_dtype)
        for spec in make_live_specs((DEVICE.tensor,))[OBSERVE].inputs
        if spec.optional
    }
    return EventAdmission(EventKinds(), (DEVICE,)).find_faults(absent | inputs, NOW_MS).get(0)


@pytest.mark.parametrize(
    "details",
    [
        {"timestamp_ms": NOW_MS // 1_000},
        {"timestamp_ms": 0},
        {"event_id": "x" * 129},
        {"event_id": "é" * 65},
        {"request_id": "x" * 129},
        {"context": {"device": "é" * 513}},
    ],
)
def test_an_event_that_a_server_refuses_is_refused_by_the_fake(details):
    shop = FakeRecommender(context={"device": "BYTES"})
    with pytest.raises(InvalidRequest) as refused:
        shop.observe(7, 3, **details)
    assert refused.value.call is not None
    fault = find_server_fault(dict(refused.value.call.inputs))
    assert fault is not None
    assert fault.startswith(str(refused.value))
    assert shop.events == []


@pytest.mark.parametrize(
    "details", [{"timestamp_ms": NOW_MS}, {"value": -2.0}, {"event_id": "é" * 64, "request_id": "x" * 128}, {}]
)
def test_an_event_that_a_server_takes_is_taken_by_the_fake(details):
    shop = FakeRecommender()
    shop.observe(7, 3, **details)
    assert find_server_fault(dict(shop.server.calls[-1].inputs)) is None
    assert shop.events == [Event(7, 3, **details)]


@pytest.mark.parametrize(
    "events",
    [
        [Event(7, 3, event_id="a"), Event(7, 4, event_id="b", timestamp_ms=1)],
        [Event(7, 3, event_id="a"), Event(7, 4, event_id="a")],
        [Event(7, 3, event_id="a"), Event(7, 4, event_id="known")],
    ],
)
def test_no_event_of_a_refused_request_counts(events):
    shop = FakeRecommender()
    shop.observe(7, 3, event_id="known")
    with pytest.raises(InvalidRequest):
        shop.observe_many(events)
    assert [event.event_id for event in shop.events] == ["known"]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({}, "columns is not an object with columns"),
        ({"title": "x" * 65_536}, "columns has 65549 bytes; expected at most 65536"),
    ],
    ids=["none", "long"],
)
def test_a_change_that_no_server_takes_is_refused_by_server_and_fake(columns, message):
    shop = FakeRecommender()
    with pytest.raises(InvalidRequest, match=message) as refused:
        shop.upsert("item", 3, columns)
    assert refused.value.call is not None
    inputs = dict(refused.value.call.inputs)
    assert ChangeAdmission({"item": {"title": "text"}, "user": {}}, {}).find_faults(inputs)[0].startswith(message)
    with pytest.raises(InvalidRequest):
        shop.upsert_many("item", [(4, {"title": "mug"}), (3, columns)])
    assert shop.upserts == []


def test_a_type_checker_knows_the_fields_of_an_event_that_observe_takes():
    (details,) = get_args(get_type_hints(Recommender.observe)["details"])
    assert details.__optional_keys__ == {field.name for field in fields(Event)} - {"user_id", "item_id", "event"}
    of_event = get_type_hints(Event)
    assert {name: of_event[name] for name in details.__optional_keys__} == get_type_hints(details)
