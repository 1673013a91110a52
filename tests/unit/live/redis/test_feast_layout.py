"""Keys, fields and values in Redis are Feast's, byte for byte: `python -m experiments.feast_layout --vectors` wrote Feast's."""

from __future__ import annotations

import json

import numpy as np
import pytest

from experiments.feast_layout import PROJECT_NAME, SAMPLES, VECTORS
from serving.contract.tensors import PAD_ID
from serving.live.layout import LATEST_SECOND, Layout
from serving.live.shared.feast_layout import LISTS, SCALARS, decode_value, encode_time, encode_value, make_entity_key
from serving.live.shared.feast_views import ITEMS_VIEW, USERS_VIEW, fill_item, fill_user, list_item_features, list_user_features
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


def test_times_of_a_foreign_history_that_are_no_unix_seconds_are_left_out():
    record = Layout().make_empty_users(1)[0]
    seconds = [LATEST_SECOND + 1, 1_700_000_000, -1, LATEST_SECOND, 1_700_000_000_000]
    with pytest.warns(UserWarning, match=r"history_s that are no unix seconds; expected 0 to 4294967295.*not milliseconds"):
        fill_user(record, {"history_ids": [1, 2, 3, 4, 5], "history_s": seconds}, [])
    assert record["history_ids"][:3].tolist() == [2, 4, PAD_ID]
    assert record["history_s"][:3].tolist() == [1_700_000_000, LATEST_SECOND, 0]
