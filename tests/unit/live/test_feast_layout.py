"""Keys, fields and values in Redis are Feast's, byte for byte: `python -m experiments.feast_layout --vectors` wrote Feast's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.feast_layout import PROJECT_NAME, SAMPLES, VECTORS
from serving.live.feast_layout import LISTS, SCALARS, decode_value, encode_time, encode_value, make_entity_key
from serving.live.feast_views import ITEMS_VIEW, USERS_VIEW, fill_item, fill_user, list_item_features, list_user_features
from serving.live.layout import Layout
from serving.live.transitions import apply_to_items, apply_to_users
from tests.unit.live.batches import KINDS, events

FEAST = json.loads(VECTORS.read_text())


def test_keys_and_fields_are_feasts():
    assert make_entity_key(PROJECT_NAME, "user_id", -17850).hex() == FEAST["key"]
    assert dict(zip(USERS_VIEW.features, [field.hex() for field in USERS_VIEW.fields], strict=True)) == FEAST["fields"]
    assert USERS_VIEW.time_field == b"_ts:recommender_users"


@pytest.mark.parametrize("kind", FEAST["values"])
def test_values_are_feasts(kind):
    assert encode_value(kind, SAMPLES[kind]).hex() == FEAST["values"][kind]
    np.testing.assert_equal(decode_value(kind, bytes.fromhex(FEAST["values"][kind])), SAMPLES[kind])


def test_what_is_missing_or_of_another_type_is_none():
    assert FEAST["values"].keys() == SCALARS.keys() | LISTS.keys()
    assert decode_value("int64", None) is None
    assert decode_value("int64", b"") is None
    assert decode_value("int64", encode_value("double", 1.0)) is None
    assert decode_value("int64_list", encode_value("int64_list", [])) == []


def test_times_are_protobuf_timestamps():
    assert encode_time(1_700_000_000_250) == b"\x08\x80\xe2\xcf\xaa\x06\x10\x80\xe5\x9aw"


def test_records_survive_as_features():
    layout = Layout()
    batch = events(np.random.default_rng(0), 400).headers
    users, items = layout.make_empty_users(20), layout.make_empty_items(30)
    apply_to_users(users, batch["user_id"] + 10, batch)
    apply_to_items(items, batch["item_id"].astype(np.int64), batch)
    for record in users:
        again = layout.make_empty_users(1)[0]
        stored = [value for _, value in USERS_VIEW.encode(list_user_features(record, [1, 2], KINDS.names))]
        fill_user(again, USERS_VIEW.decode(stored), KINDS.names)
        assert again.tobytes() == record.tobytes()
    for record in items:
        again = layout.make_empty_items(1)[0]
        fill_item(again, ITEMS_VIEW.decode([value for _, value in ITEMS_VIEW.encode(list_item_features(record))]))
        assert again.tobytes() == record.tobytes()


def test_an_event_that_this_machine_has_no_name_for_is_unknown_to_it():
    record, again = Layout().make_empty_users(1)[0], Layout().make_empty_users(1)[0]
    record["session_ids"][0], record["session_kinds"][0] = 5, 1
    fill_user(again, list_user_features(record, [], ["view", "hide"]), ["view"])
    assert (again["session_ids"][0], again["session_kinds"][0]) == (5, 255)
