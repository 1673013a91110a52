"""Declarations that `[[aggregations]]` accepts, and the messages about all others."""

import pytest

from serving.contract.errors import ConfigError
from serving.live.aggregations import compile_aggregations, parse_aggregations

GOOD = {"name": "sales_24h", "entity": "item", "value": "count", "function": "count", "window": "24h"}
PARSE = {"category_columns": ["department", "brand"], "event_names": ["view", "purchase"]}


def parse(*tables: dict):
    return parse_aggregations(tables, **PARSE)


def test_a_declaration_is_parsed():
    (aggregation,) = parse(GOOD | {"events": ["purchase"]})
    assert aggregation.span == ("window", 86_400_000)
    assert aggregation.feature_names == ("sales_24h",)
    assert aggregation.events == ("purchase",)


def test_an_event_that_is_named_twice_counts_once():
    twice, once = (
        compile_aggregations(parse(GOOD | {"events": ["purchase"] * n}), ["view", "purchase"])["item"] for n in (2, 1)
    )
    assert twice.cells.tolist() == once.cells.tolist()


def test_last_values_become_a_column_each():
    (aggregation,) = parse({"name": "paid", "entity": "user", "value": "amount", "function": "last", "n": 3})
    assert aggregation.feature_names == ("paid_1", "paid_2", "paid_3")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"windw": "1h"}, "unknown key 'windw'. Expected one of name, entity, value, function, window, half_life"),
        ({"windw": "1h"}, "did you mean 'window'?"),
        ({"entity": "departmnt"}, "did you mean 'department'?"),
        ({"entity": "user x shelf"}, "Expected one of user, item, department, brand, user x department, user x brand"),
        ({"value": "quantity"}, "Expected one of count, amount, price, distinct"),
        ({"function": "median"}, "Expected one of count, sum, mean, last, distinct"),
        ({"window": "1 week"}, 'a time such as "10min", "24h" or "7d"'),
        ({"window": "5min"}, "at least 10min"),
        ({"window": 3600}, "window is 3600. Expected a text"),
        ({"window": ""}, "it has none. Expected exactly one"),
        ({"half_life": "3d"}, "it has window and half_life. Expected exactly one"),
        ({"function": "last"}, "n is 0. Expected a whole number from 1 to 16"),
        ({"function": "last", "n": True}, "n is True"),
        ({"function": "last", "n": 2, "window": "", "half_life": "1d"}, "last is combined with half_life"),
        ({"n": 2}, "n = 2 is given with function = 'count'"),
        ({"value": "distinct"}, "Expected distinct for both, with a window"),
        ({"value": "distinct", "function": "distinct", "window": "", "half_life": "1d"}, "Expected distinct for both"),
        ({"events": ["buy"]}, "events names 'buy'. Expected one of view, purchase"),
        ({"events": "view"}, "a list of names of [events]"),
        ({"name": "sales per day"}, "letters, digits and _"),
        ({"name": 7}, "name is 7. Expected a text"),
    ],
)
def test_a_bad_declaration_is_explained(change, told):
    with pytest.raises(ConfigError) as error:
        parse(GOOD | change)
    assert told in str(error.value)
    assert "dataset.toml" in str(error.value)


def test_a_required_key_is_named():
    with pytest.raises(ConfigError, match=r"number 2, 'x', lacks the key 'entity'. Expected name, entity, value, function"):
        parse(GOOD, {"name": "x"})


def test_two_columns_of_one_name_are_refused():
    last = {"name": "a", "entity": "user", "value": "amount", "function": "last", "n": 2}
    with pytest.raises(ConfigError, match="the column 'a_1' exists already"):
        parse(last, GOOD | {"name": "a_1"})


def test_more_event_names_than_bits_are_refused():
    with pytest.raises(ConfigError, match=r"\[events\] has 64 names; expected at most 63"):
        compile_aggregations(parse(GOOD), [str(number) for number in range(64)])
