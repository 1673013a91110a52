"""An item that `upsert` moves to another category or provider takes what that one had in the exported catalogue."""

from __future__ import annotations

import numpy as np
import pytest

from repository.rules import compile_rules, insert_rows
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.features.item_statistics import HORIZONS_DAYS, Clock, ItemStatistics
from serving.stages.features.user_state import NO_CATEGORY
from serving.stages.live.catalogue.categories import ItemCategories
from serving.stages.live.catalogue.item_features import ItemFeatures
from serving.stages.live.catalogue.listed_items import ListedItems
from serving.stages.live.catalogue.ranked_items import RankedItems
from serving.stages.live.content import Content
from serving.stages.rules.config import CATEGORY, ITEM_RULES, ITEMS_FILE, NO_CAP, PROVIDER, Pin, ProviderFloor, RulesConfig
from serving.stages.rules.rules import Rules
from tests.present import present

CATEGORIES, PROVIDERS = ["bag", "bag", "lamp", "lamp"], ["Ann", "Bob", "Bob", "Bob"]
IDS = np.array([10, 11, 12, 13])


@pytest.fixture
def content() -> Content:
    return Content.of([{"category": c, "provider": p} for c, p in zip(CATEGORIES, PROVIDERS, strict=True)])


def rules_of(
    folder, config: RulesConfig, ids=IDS, category=CATEGORIES, provider=PROVIDERS, price=None, n_spare=0, k=2
) -> Rules:
    """Compile and load rules. n_spare: rows that are kept free for new items; k: items of a list"""
    compile_rules(
        folder,
        config,
        item_ids=ids,
        category=category,
        provider=provider,
        price=price,
        popularity=np.ones(len(ids)),
        items_returned=k,
    )
    insert_rows(folder / ITEMS_FILE, n_spare)
    return Rules.load(folder)


def exchange_categories(arrays) -> None:
    """Move the first bag to the lamps, then the last lamp to the bags."""
    arrays.change_item(0, {"category": "lamp"})
    arrays.change_item(3, {"category": "bag"})


def test_preprocess_gives_a_category_its_exported_code_after_its_first_item_left_it(content):
    arrays = ItemCategories(content, np.array([5, 5, 7, 7, NO_CATEGORY], np.int32))
    exchange_categories(arrays)
    assert arrays.item_category.tolist() == [7, 5, 7, 5, NO_CATEGORY]
    arrays.change_item(1, {"category": "unheard of"})
    arrays.change_item(2, {"category": None})
    assert arrays.item_category[1:3].tolist() == [NO_CATEGORY, NO_CATEGORY]


def test_the_ranker_does_too(content):
    groups = np.array([[0, 0], [0, 1], [1, 1], [1, 1], [-1, -1]], np.int32)
    counts, days = np.zeros((5, 1 + len(HORIZONS_DAYS)), np.float32), np.zeros((5, 2), np.float32)
    neighbours, weights = np.full((5, 1), 4, np.int32), np.zeros((5, 1, 1), np.float16)
    statistics = ItemStatistics(neighbours, weights, counts, np.zeros((5, 1), np.float16), days, groups, Clock(1.0, 1.0))
    rows, numbers = np.zeros((5, 1), np.int32), np.zeros((5, 0), np.float32)
    exchange_categories(RankedItems(content, rows, numbers, statistics, ItemFeatures(Plan((), ()), rows, numbers)))
    assert groups[:4, CATEGORY].tolist() == [1, 0, 1, 0]


def test_the_rules_do_too_and_use_the_caps_of_the_new_groups(content, tmp_path):
    config = RulesConfig(category_caps={"bag": 1}, max_per_provider=3)
    arrays = ListedItems(content, np.zeros((5, 2), np.float32), rules_of(tmp_path, config), ItemIndex(IDS))
    exchange_categories(arrays)
    records = arrays.rules.items
    assert records["group"][:4, CATEGORY].tolist() == [1, 0, 1, 0]
    assert records["cap"][:4, CATEGORY].tolist() == [NO_CAP, 1, NO_CAP, 1]
    arrays.change_item(3, {"provider": "Ann"})
    assert (records["group"][3, PROVIDER], records["cap"][3, PROVIDER]) == (0, 3)
    arrays.change_item(3, {"provider": "unheard of"})
    assert (records["group"][3, PROVIDER], records["cap"][3, PROVIDER]) == (-4, NO_CAP)
    arrays.use_rules(rules_of(tmp_path / "again", RulesConfig(category_caps={"lamp": 2})))
    arrays.change_item(1, {"category": "lamp"})
    assert arrays.rules.items["group"][1, CATEGORY] == 1
    assert arrays.rules.items["cap"][1, CATEGORY] == 2


def test_an_item_of_a_provider_with_a_floor_counts_for_it_even_if_an_exported_one_is_blocked(content, tmp_path):
    config = RulesConfig(blocked_items=(10,), provider_floor=ProviderFloor(("Ann",), 0.5))
    arrays = ListedItems(content, np.zeros((5, 2), np.float32), rules_of(tmp_path, config), ItemIndex(IDS))
    arrays.change_item(3, {"provider": "Ann"})
    assert arrays.rules.items["in_floor_group"][:4].tolist() == [False, False, False, True]
    arrays.change_item(3, {"provider": "Bob"})
    assert not arrays.rules.items["in_floor_group"].any()


def test_new_rules_hold_for_what_upsert_changed_as_if_it_came_after_them(tmp_path):
    rng = np.random.default_rng(0)
    ids, items = np.arange(10, 50), ItemIndex(np.append(np.arange(10, 50), [-1] * 4))
    category, provider = (
        [None if code == 3 else f"{key} {code}" for code in rng.integers(0, 4, 40)] for key in ("category", "provider")
    )

    def compile_for(folder, config: RulesConfig) -> Rules:
        return rules_of(folder, config, ids, category, provider, np.linspace(0, 9, 40), n_spare=4, k=20)

    content = Content.of([{"category": c, "provider": p} for c, p in zip(category, provider, strict=True)])
    floor = ProviderFloor(("provider 1", "provider 2"), 0.5)
    first = RulesConfig(price_cap=3.0, max_per_category=2)
    second = RulesConfig(
        price_cap=6.0, category_caps={"category 1": 1}, provider_floor=floor, blocked_items=(12, 60, 61), pinned=(Pin(62, 3),)
    )
    changes = []
    for _ in range(200):
        columns: dict[str, object] = {key: f"{key} {rng.integers(0, 6)}" for key in ("category", "provider")}
        columns |= {"price": 9 * rng.random()}
        columns |= {str(rng.choice(list(columns))): None}
        changes.append((int(rng.integers(0, 44)), {name: columns[name] for name in columns if rng.random() < 0.5}))
    found, expected = (
        ListedItems(content, np.zeros((45, 2), np.float32), compile_for(tmp_path / name, config), items)
        for name, config in (("first", first), ("second", second))
    )
    for item_id in (60, 61, 62):
        position = items.add(item_id)
        found.add_item(position)
        expected.add_item(position)
    for position, columns in changes:
        found.change_item(position, columns)
        expected.change_item(position, columns)
    found.use_rules(compile_for(tmp_path / "again", second))
    for name in present(ITEM_RULES.names):
        np.testing.assert_array_equal(found.rules.items[name], expected.rules.items[name])
    assert len(np.unique(found.rules.items["behind"])) > 2


def test_rules_that_were_compiled_without_groups_serve_a_catalogue_that_has_them(tmp_path):
    ids, nothing = np.arange(10, 50), [None] * 40
    rules = rules_of(tmp_path, RulesConfig(), ids, nothing, nothing, n_spare=4, k=20)
    content = Content.of([{"category": "pans", "provider": "smith"}] * 40)
    items = ListedItems(content, np.zeros((45, 2), np.float32), rules, ItemIndex(np.append(ids, [-1] * 4)))
    for position in (3, 4):
        items.change_item(position, {"category": "pans"})
    groups = items.rules.items["group"][:, CATEGORY]
    assert groups[3] != groups[4]  # each stays a group of its own, which no rule limits
