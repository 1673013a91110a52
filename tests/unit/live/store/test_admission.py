"""Rows that `observe` and `upsert` take, and rows that they refuse one by one."""

from __future__ import annotations

import json

import numpy as np
import pytest

from serving.contract.ids import stable_id
from serving.contract.tensors import MISSING_INT, OBSERVE, UPSERT, ContextColumn, make_live_specs
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.events import ITEM_CHANGED, USER_CHANGED, EventKind, EventKinds, Flags
from tests.unit.live.batches import KINDS, START_MS

CONTEXT = (ContextColumn("store", "integer"), ContextColumn("device", "string"), ContextColumn("heat", "continuous"))
ADMISSION = EventAdmission(KINDS, CONTEXT)
CODES = np.array([4, 5, 6], np.uint8)
CHANGES = ChangeAdmission({"item": {"price": "number", "title": "text", "tags": "texts", "available": "flag"}, "user": {}}, {})


def observed(count: int = 1, **columns) -> dict[str, np.ndarray]:
    """Inputs of `observe`, [count, 1]; what is not given is absent."""
    inputs = {}
    for tensor in make_live_specs(tuple(column.tensor for column in CONTEXT))[OBSERVE].inputs:
        values = columns.get(tensor.name, [tensor.fill if tensor.optional else 1] * count)
        inputs[tensor.name] = np.array(values, tensor.numpy_dtype).reshape(-1, 1)
    return inputs


def changed(kind: bytes, changed_id: int, columns: object) -> dict[str, np.ndarray]:
    text = columns if isinstance(columns, bytes) else json.dumps(columns).encode()
    values = {"kind": np.array([[kind]], object), "id": np.array([[changed_id]]), "columns": np.array([[text]], object)}
    assert values.keys() == {tensor.name for tensor in make_live_specs()[UPSERT].inputs}
    return values


def join(*rows: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return one batch of several requests."""
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def test_an_event_with_nothing_but_user_and_item_is_a_purchase_of_now():
    inputs = observed(user_id=[7], item_id=[9])
    assert ADMISSION.find_faults(inputs, START_MS) == {}
    batch = ADMISSION.make_events(inputs, CODES, START_MS)
    header = batch.headers[0]
    assert (header["user_id"], header["item_id"], header["time_ms"], header["kind"]) == (7, 9, START_MS, 5)
    assert header["flags"] == Flags.POSITIVE | Flags.SEEN | Flags.COUNTED
    assert np.isnan(header["value"])
    assert (batch.event_ids, batch.request_ids, batch.columns) == ([b""], [b""], [b""])


def test_everything_an_event_may_carry_is_kept():
    inputs = observed(
        user_id=[7],
        item_id=[9],
        event=[b"view"],
        timestamp_ms=[5_000],
        value=[2.5],
        event_id=[b"e"],
        request_id=[b"r"],
        store=[3],
        device=["é".encode()],
        heat=[0.5],
    )
    batch = ADMISSION.make_events(inputs, CODES, START_MS)
    assert (batch.headers[0]["kind"], batch.headers[0]["time_ms"], batch.headers[0]["value"]) == (4, 5_000, 2.5)
    assert (batch.event_ids, batch.request_ids) == ([b"e"], [b"r"])
    assert json.loads(batch.columns[0]) == {"store": 3, "device": "é", "heat": 0.5}


def test_texts_of_the_context_are_kept_as_the_log_has_them():
    batch = ADMISSION.make_events(observed(4, device=[b" till ", "till\u00a0".encode(), b"NULL", b" "]), CODES, START_MS)
    assert batch.columns == [b'{"device": "till"}', b'{"device": "till"}', b"", b""]


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("item_id", -1, "item_id is negative"),
        ("timestamp_ms", -5, "before 1973"),
        ("timestamp_ms", 1_795_000_000, "as seconds would be; expected unix milliseconds"),
        ("timestamp_ms", START_MS + 301_000, "ahead of this server's clock"),
        ("timestamp_ms", 2**63 - 1, "ahead of this server's clock"),
        ("value", np.inf, "value is infinite"),
        ("event", b"sold", "expected one of view, purchase, hide"),
        ("event", b"\xff", "expected one of view, purchase, hide"),
        ("event_id", b"x" * 129, "event_id has 129 bytes"),
        ("request_id", b"x" * 129, "request_id has 129 bytes"),
        ("device", b"x" * 1025, "device has 1025 bytes"),
        ("heat", -np.inf, "heat is infinite"),
    ],
)
def test_a_malformed_event_is_refused_alone(column, value, message):
    tensor = next(t for t in make_live_specs(tuple(column.tensor for column in CONTEXT))[OBSERVE].inputs if t.name == column)
    sound = tensor.fill if tensor.optional else 1
    faults = ADMISSION.find_faults(observed(3, **{column: [sound, value, sound]}), START_MS)
    assert faults.keys() == {1}
    assert message in faults[1]


def test_a_value_that_would_make_a_weight_infinite_is_refused_alone():
    kinds = EventKinds((EventKind("view", weight=0.1), EventKind("purchase", weight=2.0, positive=True)), value_is="weight")
    admission, names = EventAdmission(kinds), [b"view", b"purchase", b"purchase", b"purchase", b"purchase"]
    inputs = observed(5, event=names, value=[3e38, 3e38, -3e38, 1.7e38, np.nan])
    faults = admission.find_faults(inputs, START_MS)
    assert faults.keys() == {1, 2}
    assert "value times the weight of its event is larger than a float32 can hold" in faults[1]
    sound = {name: values[[0, 3, 4]] for name, values in inputs.items()}
    assert np.isfinite(admission.make_events(sound, CODES, START_MS).headers["weight"]).all()
    assert ADMISSION.find_faults(observed(event=[b"purchase"], value=[3e38]), START_MS) == {}  # `value` is no weight here


def test_unusual_but_sound_events_are_taken():
    inputs = observed(2, user_id=[-1, 2**63 - 1], item_id=[0, 2**63 - 1], timestamp_ms=[100_000_000_000, START_MS + 299_000])
    assert ADMISSION.find_faults(inputs, START_MS) == {}
    assert inputs["timestamp_ms"][0, 0] != MISSING_INT


def test_changes_become_events_of_their_kind():
    batch = CHANGES.make_events(changed(b"item", 7, {"price": 2}), START_MS)
    assert (batch.headers[0]["type"], batch.headers[0]["item_id"], batch.headers[0]["time_ms"]) == (ITEM_CHANGED, 7, START_MS)
    assert json.loads(batch.columns[0]) == {"price": 2}
    batch = CHANGES.make_events(changed(b"user", -3, {}), START_MS)
    assert (batch.headers[0]["type"], batch.headers[0]["user_id"]) == (USER_CHANGED, -3)


@pytest.mark.parametrize(
    "columns", [{"price": 1}, {"price": None}, {"price": 0.0, "title": "\U0001f600"}, {"tags": ["a", "b"]}, {"tags": []}]
)
def test_sound_changes_are_taken(columns):
    assert CHANGES.find_faults(changed(b"item", 7, columns)) == {}


@pytest.mark.parametrize(
    ("sent", "logged"), [(True, True), (1.0, True), ("1", True), ("True", True), (0, False), ("false", False), (None, None)]
)
def test_an_availability_is_taken_as_in_an_item_file_and_logged_as_a_boolean(sent, logged):
    inputs = changed(b"item", 7, {"available": sent, "price": 2})
    assert CHANGES.find_faults(inputs) == {}
    columns = json.loads(CHANGES.make_events(inputs, START_MS).columns[0])
    assert (columns["available"] is logged, columns["price"]) == (True, 2)


def test_a_column_of_texts_may_be_called_price():
    admission = ChangeAdmission({"item": {"price": "text"}, "user": {}}, {})
    assert admission.find_faults(changed(b"item", 7, {"price": "low"})) == {}


@pytest.mark.parametrize(
    ("kind", "columns", "message"),
    [
        (b"shop", {"price": 1}, "expected item or user"),
        (b"item", {"prise": 1}, "this data set has price, title, tags, available"),
        (b"user", {"age": 1}, "this data set has none"),
        (b"item", {"price": "1"}, "expected a number from -1e38 to 1e38"),
        (b"item", {"price": 1e39}, "price is 1e+39; expected a number from -1e38 to 1e38"),
        (b"item", {"price": True}, "expected a number from -1e38 to 1e38"),
        (b"item", {"price": 10**400}, "expected a number from -1e38 to 1e38"),
        (b"item", b'{"price": NaN}', "expected a number from -1e38 to 1e38"),
        (b"item", b'{"price": 1e999}', "expected a number from -1e38 to 1e38"),
        (b"item", {"tags": ["a", 1]}, "expected a list of texts"),
        (b"item", {"available": 2}, "available is 2; expected true or false, or 1 or 0, or null"),
        (b"item", {"available": "yes"}, "available is 'yes'; expected true or false, or 1 or 0, or null"),
        (b"item", {"available": [1]}, "expected true or false"),
        (b"item", {"title": ["a"]}, "expected a text"),
        (b"item", {"title": "\ud800"}, "expected a text of valid Unicode"),
        (b"item", {"tags": ["a", "\udfff"]}, "expected a list of texts of valid Unicode"),
        (b"item", b"{", "not JSON"),
        (b"item", b"\xff", "not JSON"),
        (b"item", b"[" * 60_000, "not JSON"),
        (b"item", b"[]", "not an object"),
        (b"item", b"{}", "not an object"),
        (b"item", b" " * 70_000, "expected at most 65536"),
    ],
)
def test_a_malformed_change_is_refused_with_what_was_expected(kind, columns, message):
    faults = CHANGES.find_faults(changed(kind, 7, columns))
    assert message in faults[0]


def test_a_negative_price_is_refused_alone_by_either_of_its_names():
    kinds = {"price": "number", "unit_price": "number", "discount": "number"}
    admission = ChangeAdmission({"item": kinds, "user": kinds}, {"price": "unit_price"})
    changes = [{"price": 2}, {"price": -1}, {"unit_price": -0.01}, {"unit_price": None, "discount": -3}]
    rows = [changed(b"item", 7, columns) for columns in changes]
    faults = admission.find_faults(join(*rows, changed(b"user", 7, {"price": -1})))
    assert faults == {
        1: "price is -1; expected a price of 0 or more, or null for a missing one",
        2: "unit_price is -0.01; expected a price of 0 or more, or null for a missing one",
    }


def test_spaces_around_texts_are_not_kept():
    """Otherwise " mug" would be a category of its own, live and in the next export."""
    admission = ChangeAdmission({"item": {"title": "text", "tags": "texts"}, "user": {"country": "text"}}, {"title": "name"})
    item = admission.make_events(changed(b"item", 7, {"title": " Red  mug\n", "tags": ["a ", " ", "b", "a"]}), START_MS)
    assert json.loads(item.columns[0]) == {"title": "Red  mug", "name": "Red  mug", "tags": ["a", "b"]}
    user = admission.make_events(changed(b"user", 7, {"country": "  "}), START_MS)
    assert json.loads(user.columns[0]) == {"country": None}


def test_a_change_is_judged_as_it_is_kept():
    """Spaces, empty texts and the spelling of a flag make no difference."""
    kinds = {"title": "text", "label": "text", "in_stock": "flag", "available": "flag", "item_id": "name"}
    admission = ChangeAdmission({"item": kinds, "user": {}}, {"title": "label", "available": "in_stock"})
    changes = [
        {"item_id": " cup "},
        {"item_id": "", "available": " TRUE "},
        {"available": " ", "title": " A", "label": "A"},
        {"available": True, "in_stock": "true", "title": "", "label": None},
    ]
    batch = join(*(changed(b"item", stable_id("cup"), columns) for columns in changes))
    assert admission.find_faults(batch) == {}
    kept = [json.loads(columns) for columns in admission.make_events(batch, START_MS).columns]
    assert [columns.get("item_id") for columns in kept] == ["cup", None, None, None]
    assert [columns.get("in_stock") for columns in kept] == [None, True, None, True]


def test_two_roles_of_one_column_may_not_disagree():
    admission = ChangeAdmission(
        {"item": {"title": "text", "category": "text", "kind": "text"}, "user": {}}, {"title": "kind", "category": "kind"}
    )
    faults = admission.find_faults(changed(b"item", 7, {"title": "A", "category": "B"}))
    assert faults == {0: "title and category are one column, and have different values; expected one"}
    assert admission.find_faults(changed(b"item", 7, {"title": "A", "category": "A ", "kind": "A"})) == {}


def test_a_column_with_two_values_by_role_and_by_name_is_refused():
    kinds = {"price": "number", "unit_price": "number"}
    admission = ChangeAdmission({"item": kinds, "user": kinds}, {"price": "unit_price"})
    both = {"price": 2, "unit_price": 3}
    changes = [(b"item", both), (b"item", {"price": 2, "unit_price": 2}), (b"user", both), (b"item", {"unit_price": 3})]
    faults = admission.find_faults(join(*(changed(kind, 7, columns) for kind, columns in changes)))
    assert faults == {0: "unit_price and price are one column, and have different values; expected one"}


def test_a_negative_item_id_is_refused():
    assert "negative" in CHANGES.find_faults(changed(b"item", -7, {"price": 1}))[0]
