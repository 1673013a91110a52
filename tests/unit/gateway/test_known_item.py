"""GET /v1/items/{id}: what recommendations know of an item, before and after `upsert` and rules have changed it."""

from __future__ import annotations

import numpy as np

from gateway import schema
from repository.applied_rules import apply_rules
from serving.contract.artifacts import find_stage_folder
from tests.unit.gateway.conftest import Gateway
from tests.unit.trials.logs import observe

NEW_ITEM = 9_999


def describe(door: Gateway, item: object) -> dict:
    response = door.ask("GET", f"/v1/items/{item}")
    assert response.status_code == 200, response.text
    schema.KnownItem.model_validate(response.json())
    return response.json()


def test_popularity_ranks_are_those_of_the_vectors_popularity(door, own_repo):
    folder = find_stage_folder(own_repo, "retrieve", 1)
    ids, available = np.load(folder / "item_ids.npy"), np.load(folder / "available.npy")
    popularity = np.load(folder / "item_vectors.npy")[: len(ids), -1]
    sold = {int(item): float(popularity[place]) for place, item in enumerate(ids) if item > 0 and available[place]}
    for item in sorted(sold)[:10]:
        known = describe(door, item)
        assert known["popularity_rank"] == 1 + sum(other > sold[item] for other in sold.values())
        assert (known["known"], known["exported"], known["can_be_shown"], known["why_not"]) == (True, True, True, None)


def test_an_item_is_known_by_its_changes(door, change):
    assert describe(door, 3)["can_be_shown"]
    change(3, available=False, category="tea")
    gone = describe(door, 3)
    assert (gone["can_be_shown"], gone["why_not"], gone["popularity_rank"]) == (False, "It is unavailable.", None)
    assert gone["category"] == "tea"
    change(3, available=True, title="Mug")
    back = describe(door, 3)
    assert (back["can_be_shown"], back["item"]["title"]) == (True, "Mug")


def test_a_new_item_is_known_once_it_is_added(door, change):
    before = describe(door, NEW_ITEM)
    assert (before["known"], before["exported"], before["can_be_shown"]) == (False, False, False)
    assert before["why_not"] == "Generation 1 does not know the item; an upsert, or the next export, adds it."
    change(NEW_ITEM, title="Kite")
    after = describe(door, NEW_ITEM)
    assert (after["known"], after["exported"], after["can_be_shown"]) == (True, False, True)


def test_events_raise_the_rank_at_once(door):
    by_rank = {describe(door, item)["popularity_rank"]: item for item in range(1, 40)}
    item = by_rank[max(rank for rank in by_rank if rank is not None)]
    before = describe(door, item)["popularity_rank"]
    observe(door.repo, {"user_id": list(range(100_000, 100_300)), "item_id": [item] * 300})
    assert describe(door, item)["popularity_rank"] < before


def test_rules_are_part_of_what_is_known(door, own_repo):
    apply_rules(own_repo, {"blocked_items": [3], "pinned": [{"item_id": 5, "slot": 2}]})
    blocked, pinned = describe(door, 3), describe(door, 5)
    assert (blocked["can_be_shown"], blocked["why_not"]) == (False, "A rule drops it: blocked_items.")
    assert (pinned["can_be_shown"], pinned["pinned_place"], blocked["pinned_place"]) == (True, 3, None)


def test_a_blocked_item_has_no_rank_and_takes_none(door, own_repo):
    by_rank = {describe(door, item)["popularity_rank"]: item for item in range(1, 40)}
    first, second = (by_rank[rank] for rank in sorted(rank for rank in by_rank if rank is not None)[:2])
    before = describe(door, second)["popularity_rank"]
    apply_rules(own_repo, {"blocked_items": [first]})
    assert describe(door, first)["popularity_rank"] is None
    assert describe(door, second)["popularity_rank"] == before - 1


def test_an_id_of_another_kind_is_refused(door):
    assert "this shop's ids are whole numbers" in door.read_error("GET", "/v1/items/mug")["message"]
