"""Records of users and items as two Feast feature views, so that a shop's own Feast reads and writes them.

    recommender_users   entity user_id (INT64)      history, session, totals and seen items of a user
    recommender_items   entity item_id (INT64)      counts and decayed popularity of an item

Lists hold no padding, and events of a session are named, because codes of events differ between machines.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from serving.contract.tensors import PAD_ID
from serving.live.layout import LATEST_SECOND
from serving.live.shared.feast_layout import FeatureValue, decode_value, encode_value, make_feature_field, make_time_field

UNKNOWN_KIND = 255  # of an event whose name this machine has not seen
HISTORY_FEATURES = {"history_ids": "int64_list", "history_s": "int64_list"}
SESSION_FEATURES = {"session_ids": "int64_list", "session_ms": "int64_list", "session_values": "float_list"}
TOTALS = {
    "event_count": "int64",
    "sum_weight": "double",
    "sum_label": "double",
    "first_ms": "int64",
    "last_ms": "int64",
    "received_ms": "int64",
}
USER_FEATURES = HISTORY_FEATURES | SESSION_FEATURES | {"session_events": "string_list"} | TOTALS | {"seen_ids": "int64_list"}
ITEM_FEATURES = dict.fromkeys(("event_count", "positive_count", "first_ms", "last_ms"), "int64") | {"decayed": "double_list"}


@dataclass(frozen=True)
class View:
    """A feature view of one entity with an int64 id. features: name -> type (feast_layout.py)"""

    name: str
    join_key: str
    features: Mapping[str, str]

    @cached_property
    def fields(self) -> list[bytes]:
        """The fields of the hash, in the order of `features`."""
        return [make_feature_field(self.name, feature) for feature in self.features]

    @cached_property
    def time_field(self) -> bytes:
        return make_time_field(self.name)

    def encode(self, values: Mapping[str, FeatureValue]) -> list[tuple[bytes, bytes]]:
        """Return (field, value) of every feature."""
        encoded = (encode_value(kind, values[feature]) for feature, kind in self.features.items())
        return list(zip(self.fields, encoded, strict=True))

    def decode(self, stored: Sequence[bytes | None]) -> dict[str, FeatureValue]:
        """Return the features that the hash has, from the values of `fields`."""
        pairs = zip(self.features.items(), stored, strict=True)
        values = {feature: decode_value(kind, value) for (feature, kind), value in pairs}
        return {feature: value for feature, value in values.items() if value is not None}


USERS_VIEW = View("recommender_users", "user_id", USER_FEATURES)
ITEMS_VIEW = View("recommender_items", "item_id", ITEM_FEATURES)


def list_user_features(record: np.ndarray, seen_ids: Sequence[int], names: Sequence[str]) -> dict[str, FeatureValue]:
    """Return a user's record as features. names: of events, by code"""
    n_history = int(np.count_nonzero(record["history_ids"] != PAD_ID))
    n_session = int(np.count_nonzero(record["session_ids"] != PAD_ID))
    values: dict[str, FeatureValue] = {name: record[name][:n_history].tolist() for name in HISTORY_FEATURES}
    values |= {name: record[name][:n_session].tolist() for name in SESSION_FEATURES}
    kinds = record["session_kinds"][:n_session].tolist()
    values["session_events"] = [names[kind] if kind < len(names) else "" for kind in kinds]
    values |= {name: record[name].item() for name in TOTALS}
    return values | {"seen_ids": list(seen_ids)}


def fill_user(record: np.ndarray, values: Mapping[str, FeatureValue], names: Sequence[str]) -> None:
    """Write features into a record without events. Missing features leave it unchanged.

    Events of a history are left out, with a warning, if their times are no unix seconds of 32 bits: they would wrap around.
    """
    history = list(zip(*(get_list(values, name) for name in HISTORY_FEATURES), strict=False))
    valid_events = [(item, second) for item, second in history if 0 <= second <= LATEST_SECOND]
    if len(valid_events) < len(history):
        warnings.warn(
            f"Redis holds users with values of history_s that are no unix seconds; expected 0 to {LATEST_SECOND}. These events "
            "are left out. Let the shop's Feast write seconds, not milliseconds.",
            stacklevel=2,
        )
    for place, event in enumerate(valid_events[: len(record["history_ids"])]):
        record["history_ids"][place], record["history_s"][place] = event
    for name in SESSION_FEATURES:
        entries = get_list(values, name)[: len(record[name])]
        record[name][: len(entries)] = entries
    for name in TOTALS:
        record[name] = values.get(name, record[name])
    codes = {name: code for code, name in enumerate(names)}
    entries = get_list(values, "session_events")[: len(record["session_kinds"])]
    record["session_kinds"][: len(entries)] = [codes.get(name, UNKNOWN_KIND) for name in entries]


def get_list(values: Mapping[str, FeatureValue], name: str) -> Sequence:
    """Return a feature that is a list, an empty one where it is missing."""
    value = values.get(name, ())
    assert isinstance(value, Sequence)  # as the view declares it
    return value


def list_item_features(record: np.ndarray) -> dict[str, FeatureValue]:
    """Return an item's record as features."""
    values = {name: record[name].item() for name in ITEM_FEATURES if name != "decayed"}
    return values | {"decayed": record["decayed"].tolist()}


def fill_item(record: np.ndarray, values: Mapping[str, FeatureValue]) -> None:
    """Write features into a record without events. Missing features, and lists of another length, leave it unchanged."""
    for name in ITEM_FEATURES:
        if name in values and np.shape(values[name]) == record[name].shape:
            record[name] = values[name]
