"""Settings of the business rules that cannot be meant are refused by name."""

from __future__ import annotations

import pytest

from serving.contract.errors import ConfigError
from serving.stages.rules.config import (
    Pin,
    RulesConfig,
)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"price_limit": 3}, "no setting 'price_limit'"),
        ({"blocked_items": "12"}, "blocked_items is '12'; expected a list"),
        ({"blocked_items": [1.5]}, "blocked_items is 1.5; expected a whole number"),
        ({"blocked_items": [2**63]}, "blocked_items is 9223372036854775808; expected a whole number"),
        ({"pinned": [{"item_id": 1}]}, "missing 1 required positional argument: 'slot'. Expected item_id, slot"),
        ({"pinned": [{"item_id": 1, "slot": -1}]}, "pinned.slot is -1"),
        ({"pinned": [{"item_id": 1, "slot": 0, "days": 3}]}, "pinned has no setting 'days'"),
        ({"pinned": [{"item_id": 1, "slot": 0}, {"item_id": 2, "slot": 0}]}, "slot 0 more than once"),
        ({"pinned": [3]}, "pinned is 3; expected an object with item_id, slot"),
        ({"price_cap": 0}, "price_cap is 0; expected a number above 0.0"),
        ({"price_cap": float("nan")}, "price_cap is nan"),
        ({"price_cap": float("inf")}, "price_cap is inf"),
        ({"price_cap": 10**400}, "expected a number above 0.0"),
        ({"max_per_category": 0}, "max_per_category is 0"),
        ({"max_per_category": 2**15 - 1}, "max_per_category is 32767; expected a whole number of at least 1 and at most 32766"),
        ({"max_per_provider": True}, "max_per_provider is True"),
        ({"category_caps": ["Bags"]}, "category_caps is ['Bags']; expected names with caps"),
        ({"category_caps": {"Bags": -1}}, "category_caps['Bags'] is -1"),
        ({"category_caps": {"Bags": 2**15 - 1}}, "category_caps['Bags'] is 32767"),
        ({"provider_floor": {"providers": "Ada", "share": 0.1}}, "provider_floor.providers is 'Ada'; expected a list"),
        ({"provider_floor": {"providers": ["Ada"], "share": 1.2}}, "provider_floor.share is 1.2"),
        ({"provider_floor": {"providers": ["Ada"], "share": 0}}, "provider_floor.share is 0; expected a number above 0.0"),
        ({"provider_floor": {"providers": [], "share": 0.1}}, "provider_floor.providers is []; expected a list of names"),
        ({"provider_floor": {"providers": [7], "share": 0.1}}, "provider_floor.providers is [7]; expected a list of names"),
        ({"diversity": 2}, "diversity is 2; expected a number at least 0.0 and at most 1.0"),
        ({"exploration": {"slots": 0}}, "exploration.slots is 0"),
        ({"exploration": {"slots": 5, "pool": 4}}, "exploration.pool is 4; expected a whole number of at least 5"),
        ({"exploration": {"slots": 1, "pool": 2**31}}, "exploration.pool is 2147483648; expected a whole number"),
        ({"exploration": {"slots": 1, "novelty": 99}}, "exploration.novelty is 99"),
        ({"exploration": {"slots": 1, "seed": -1}}, "exploration.seed is -1"),
        ({"exploration": {"slots": 1, "seed": 2**64}}, "exploration.seed is 18446744073709551616"),
        ({"pinned": {"item_id": 1, "slot": 0}}, "expected a list. Write [] for none"),
        ({"pinned": [{"item_id": 1.5, "slot": 0}]}, "pinned.item_id is 1.5"),
    ],
)
def test_a_bad_setting_is_named(values, message):
    with pytest.raises(ConfigError) as caught:
        RulesConfig.from_dict(values)
    assert message in str(caught.value)


def test_one_item_is_not_pinned_as_number_and_as_text():
    with pytest.raises(ConfigError, match="pinned has item_id 5 more than once"):
        RulesConfig(pinned=(Pin(5, 0), Pin("5", 1)))
    with pytest.raises(ConfigError, match="pinned has item_id 5 more than once"):
        RulesConfig(pinned=(Pin(5, 0), Pin(5, 1), Pin("a", 2), Pin("a", 3)))
