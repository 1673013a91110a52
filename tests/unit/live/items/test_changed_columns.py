"""Columns of an item or a user that `upsert` changes are used in the very next answer."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from export.steps.live import find_column_roles, list_changeable_columns
from serving.contract.tensors import NULL_ROW, OBSERVE, OOV_ROW
from serving.live.reader import Reader
from serving.live.store import find_live_folder
from serving.stages.features.encode import FIRST_ROW, CategoryColumn, Plan, StringVocabulary
from serving.stages.live.catalogue.item_features import encode_value
from serving.stages.live.models import Observe
from serving.stages.live.users.live_users import write_profile
from tests.unit.live.answers import answer, upserted
from tests.unit.live.shops import KINDS
from training.dataset.description import Description


def test_an_item_with_another_items_columns_has_its_features(pipeline, upsert):
    """Items 1 and 2 differ in price and kind; both names of a column, its role and its own, are understood."""
    inputs = pipeline.stages["rank"].inputs
    rows, numbers = inputs.item_rows, inputs.item_numbers
    price_column = [column.source for column in pipeline.stages["rank"].item_plan.continuous].index("catalogue_unit_price")
    assert numbers[0, price_column] != numbers[1, price_column]
    upserted(upsert, 1, price=2.0, category=KINDS[2])
    answer(pipeline, [7])
    assert numbers[0, price_column] == numbers[1, price_column]
    kind = [column.source for column in pipeline.stages["rank"].item_plan.categorical].index("catalogue_kind")
    assert rows[0, kind] == rows[1, kind]
    assert rows[0, 0] != rows[1, 0]
    upserted(upsert, 1, unit_price=30.0)
    answer(pipeline, [7])
    assert numbers[0, price_column] == numbers[29, price_column]


def test_a_new_item_has_the_features_of_its_own_columns(pipeline, upsert):
    upserted(upsert, 1_000, kind=KINDS[1], price=22.0)
    answer(pipeline, [7])
    rank = pipeline.stages["rank"]
    position = int(rank.inputs.items.find_positions(np.array([1_000]))[0])
    price_column = [column.source for column in rank.item_plan.continuous].index("catalogue_unit_price")
    assert rank.inputs.item_numbers[position, price_column] == rank.inputs.item_numbers[21, price_column]
    kind = [column.source for column in rank.item_plan.categorical].index("catalogue_kind")
    assert rank.inputs.item_rows[position, kind] == rank.inputs.item_rows[21, kind]


def describe_items(**items: object) -> Description:
    log = {"path": "events.csv", "user_id": "customer", "item_id": "sku", "timestamp": "time"}
    return Description.model_validate(
        {"name": "shop", "interactions": log, "items": {"path": "i.csv", "item_id": "sku"} | items}
    )


@pytest.mark.parametrize(
    ("items", "roles"),
    [
        ({"title": "name", "available": "stock"}, {"title": "name", "available": "stock"}),
        ({"category": "kind", "provider": "kind"}, {"category": "kind", "provider": "kind"}),
        ({"category": "genres", "multi_categorical": {"genres": "|"}}, {}),  # a list, while the role is one text
        ({"available": "stock", "continuous": ["stock"]}, {}),  # a number, while the role is a flag
        ({"title": "category"}, {}),  # the name of a role names that role
        ({"title": "title", "price": "cost"}, {"price": "cost"}),
    ],
)
def test_a_column_with_a_role_may_be_changed_by_its_name_in_the_data(items, roles):
    description = describe_items(**items)
    assert find_column_roles(description) == roles
    columns = list_changeable_columns(description, has_names=False)["item"]
    assert {columns[name] for name in roles.values()} == {columns[role] for role in roles}


def test_a_title_that_is_changed_by_its_name_in_the_data_is_the_title(repository, upsert):
    upserted(upsert, 1, name="A new name")
    with closing(Reader(find_live_folder(repository))) as reader, reader.snapshot() as snapshot:
        assert snapshot.read_changes(after=0)[0].columns["title"] == "A new name"


def test_columns_of_users_are_written_as_their_kinds():
    profile = {"age": np.array([np.nan, 3.0]), "city": np.array([None, "Rome"], object), "band": np.array([1, 2])}
    write_profile(profile, [(1, {"age": 4, "city": None, "band": "7", "unknown": 1}), (0, {"age": None, "city": "Oslo"})])
    assert profile["age"][1] == 4.0
    assert profile["city"].tolist() == ["Oslo", None]
    assert profile["band"].tolist() == [1, 7]


def test_values_from_before_a_column_changed_its_type_are_missing_or_read_as_the_new_type():
    """The live store outlives exports: a column may have become a number, a text or a category since."""
    profile = {"age": np.array([1.0, 2.0, 3.0]), "city": np.array(["Rome", "Oslo", "Bern"], object)}
    write_profile(profile, [(0, {"age": "18-25", "city": 7}), (1, {"age": "4.5", "city": ["a"]}), (2, {"age": "inf"})])
    np.testing.assert_array_equal(profile["age"], [np.nan, 4.5, np.nan])
    assert profile["city"].tolist() == [None, None, "Bern"]
    vocabulary = StringVocabulary(["red"], np.array([FIRST_ROW]))
    plan = Plan((CategoryColumn("color", "color", "strings", FIRST_ROW + 1),), (), (), {"color": vocabulary})
    values = ("red", "blue", None, ["red", "blue"], 5)
    assert [int(encode_value(plan, "color", value)) for value in values] == [FIRST_ROW, OOV_ROW, NULL_ROW, NULL_ROW, NULL_ROW]


def test_users_columns_are_read_with_the_next_request(repository, upsert, pipeline):
    observe = Observe.load(repository / OBSERVE / "1")
    reader = pipeline.stages["preprocess"].inputs.live.reader
    upsert.settings.columns["user"]["country"] = "text"
    inputs = {"kind": np.array([[b"user"]], object), "columns": np.array([[b'{"country": "DE"}']], object)}
    assert upsert.find_faults(inputs | {"id": np.array([[7]])}) == {}
    upsert(inputs | {"id": np.array([[7]])})
    with reader.snapshot() as snapshot:
        assert snapshot.read_user_columns(np.array([5, 7, -1])) == [(1, {"country": "DE"})]
    observe.close()
