"""New items among the candidates, in the re-ranked list and in the answer."""

from __future__ import annotations

import numpy as np
import pytest

from serving.stages.features.ids import MOST_NEWCOMERS
from serving.stages.live.catalogue.candidates import LATEST_NEWCOMERS, SearchedItems, put_new_and_pinned
from serving.stages.live.catalogue.listed_items import explore_newcomers, keep_candidates
from serving.stages.live.content import Content, compute_tokens
from serving.stages.rules.config import ABOVE_PRICE_CAP, BLOCKED, CATEGORY, ITEM_RULES, NO_CAP
from serving.stages.rules.propensities import UNKNOWN
from serving.stages.rules.retrieval import NO_ITEMS
from serving.stages.search.search import Blocked, Neighbours, Search

VECTORS = np.eye(8, dtype=np.float32)
USERS = np.full((1, 8), 2.0, np.float32)
SEED = np.uint64(7)


@pytest.mark.parametrize(
    ("listed", "newcomers", "expected"),
    [
        pytest.param([0, 1, 8, 8], [5], [0, 1, 5, 8], id="a list with room grows"),
        pytest.param([0, 1, 2, 8], [5, 6], [0, 1, 6, 5], id="then its last go"),
        pytest.param([0, 5, 2, 3], [5, 6], [0, 5, 2, 6], id="what is there stays"),
        pytest.param([0, 1, 2, 5], [5, 6], [0, 1, 6, 5], id="at the end too"),
        pytest.param([0, 1, 2, 6], [5, 6], [0, 1, 5, 6], id="whichever comes first"),
        pytest.param([0, 1, 2, 3], [7], [0, 1, 2, 3], id="blocked"),
        pytest.param([8, 8, 8, 8], [4, 5, 6, 3, 2], [4, 5, 6, 3], id="no more than fit"),
    ],
)
def test_new_items_are_among_the_candidates(listed, newcomers, expected):
    positions, scores = np.array([listed]), np.zeros((1, 4), np.float32)
    put_new_and_pinned(np.array(newcomers), NO_ITEMS, VECTORS, USERS, np.array([7]), np.array([0, 1]), positions, scores)
    assert positions[0].tolist() == expected
    changed = positions[0] != listed
    assert (scores[0][changed] == 2.0).all()
    assert not scores[0][~changed].any()


def test_new_and_pinned_items_take_no_place_from_each_other():
    positions, scores, nothing = np.array([[0, 1, 2, 3]]), np.zeros((1, 4), np.float32), (NO_ITEMS, np.zeros(2, np.int64))
    put_new_and_pinned(np.array([5]), np.array([3, 6]), VECTORS, USERS, *nothing, positions, scores)
    assert positions[0].tolist() == [0, 5, 6, 3]


def test_pinned_items_are_put_where_new_ones_would_fill_the_whole_list():
    positions, scores, nothing = np.array([[0, 1]]), np.zeros((1, 2), np.float32), (NO_ITEMS, np.zeros(2, np.int64))
    put_new_and_pinned(np.array([4, 5, 6]), np.array([2]), VECTORS, USERS, *nothing, positions, scores)
    assert positions[0].tolist() == [4, 2]
    positions[0] = 4, 5  # also where they are in it by their scores
    put_new_and_pinned(np.array([4, 5, 6]), np.array([2]), VECTORS, USERS, *nothing, positions, scores)
    assert positions[0].tolist() == [4, 2]


def test_of_many_new_items_the_latest_and_those_with_the_best_scores_become_candidates():
    n_items, newcomers = 100, np.arange(40, 100)
    values = np.random.default_rng(0).permutation(n_items).astype(np.float32)
    positions, scores = np.arange(30)[None], np.zeros((1, 30), np.float32)
    older = newcomers[:-LATEST_NEWCOMERS]
    best_first = older[np.argsort(-values[older])]
    blocked = best_first[:1]  # its place goes to the next one
    user = np.ones((1, 1), np.float32)
    put_new_and_pinned(newcomers, NO_ITEMS, values[:, None].copy(), user, blocked, np.array([0, 1]), positions, scores)
    n_best = MOST_NEWCOMERS - LATEST_NEWCOMERS
    assert set(positions[0, -MOST_NEWCOMERS:]) == {*best_first[1 : 1 + n_best], *newcomers[-LATEST_NEWCOMERS:]}
    assert positions[0, :-MOST_NEWCOMERS].tolist() == list(range(30 - MOST_NEWCOMERS))
    assert (scores[0, -MOST_NEWCOMERS:] == values[positions[0, -MOST_NEWCOMERS:]]).all()


def test_a_new_item_is_taken_again_where_the_item_most_like_it_is():
    """Its neighbours are those of that item, but not that item as a repeat."""
    like, new, other = 1, 3, 2
    positions, weights = np.full((5, 2), 4, np.int32), np.zeros((5, 2), np.float32)
    positions[like], weights[like] = (like, other), (0.7, 0.2)
    search = Search(np.zeros((4, 2), np.float32), Neighbours(positions, weights), np.array([True, True, True, False]))
    items = SearchedItems(search, np.zeros((5, 2), np.float32))
    items.add_item(new)
    items.resemble(new, np.array([like]))
    nothing = Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
    found, scores = search(np.zeros((1, 2), np.float32), np.array([[new]]), nothing, 4)
    assert dict(zip(found[0].tolist(), scores[0].round(6).tolist(), strict=True)) == {
        new: np.float32(0.7).round(6),
        other: np.float32(0.2).round(6),
        like: 0.0,
        0: 0.0,
    }


def test_new_and_pinned_items_stay_in_the_list_that_is_re_ranked():
    columns = np.array([[0, 1, 2], [4, 1, 0], [0, 1, 4], [0, 3, 4], [2, 3, 4]])
    is_kept = [[0, 0, 0, 1, 1], [0, 0, 0, 0, 1], [0, 0, 0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]]
    keep_candidates(columns, np.array(is_kept, bool))
    assert columns.tolist() == [[0, 4, 3], [4, 1, 0], [0, 3, 4], [2, 3, 4], [2, 3, 4]]  # the last list has no room


def no_rules() -> np.ndarray:
    """Return records of nine items, the last one padding, each of a group of its own."""
    items = np.zeros(9, ITEM_RULES)
    items["group"], items["cap"] = -1 - np.arange(9)[:, None], NO_CAP
    return items


def explored(
    columns: list[int],
    positions: list[int],
    place: int,
    items: np.ndarray | None = None,
    floor: float = 0.0,
    share: float = 1.0,
) -> list[int]:
    """New items are at the positions 6 and 7."""
    own, items = np.array([columns]), no_rules() if items is None else items
    user, found = np.array([1]), np.array([positions])
    explore_newcomers(own, certain(own), found, 6, 8, items, floor, user, SEED, share, place)
    return own[0].tolist()


def certain(columns: np.ndarray) -> np.ndarray:
    return np.ones(columns.shape, np.float32)


@pytest.mark.parametrize(
    ("listed", "candidates", "place", "expected"),
    [
        pytest.param([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, [0, 4, 1, 2], id="the others move behind it"),
        pytest.param([0, 1, 4, 3], [0, 1, 2, 3, 6], 1, [0, 4, 1, 3], id="one further back moves up"),
        pytest.param([1, 2, 0, 3], [6, 0, 1, 2], 1, [1, 0, 2, 3], id="and so does the best candidate"),
        pytest.param([4, 1, 2, 3], [0, 1, 2, 3, 6], 1, [4, 1, 2, 3], id="one is shown already"),
        pytest.param([0, 1, -1, -1], [0, 6, 8, 8, 8], 2, [0, 1, -1, -1], id="a short list shows all its candidates"),
        pytest.param([0, 2, 1, -1], [0, 6, 1, 8, 8], 1, [0, 1, 2, -1], id="and a new one of them moves up"),
    ],
)
def test_a_new_item_is_shown_at_its_place(listed, candidates, place, expected):
    assert explored(listed, candidates, place) == expected


@pytest.mark.parametrize(
    ("listed", "drawn", "place", "expected_list", "expected"),
    [
        pytest.param([0, 1, 2, 3], {2: 0.5, 3: 0.25}, 1, [0, 4, 1, 2], [1.0, 0.25, 1.0, UNKNOWN], id="it moves them"),
        pytest.param([0, 1, 4, 3], {2: 0.5, 3: 0.25}, 1, [0, 4, 1, 3], [1.0, 0.25, 1.0, UNKNOWN], id="it was one of them"),
        pytest.param([0, 1, 4, 3], {3: 0.5}, 1, [0, 4, 1, 3], [1.0, 0.25, 1.0, 0.5], id="it was above them"),
        pytest.param([0, 1, 2, 3], {1: 0.5, 2: 0.5}, 1, [0, 4, 1, 2], [1.0, *[UNKNOWN] * 3], id="they begin at its place"),
    ],
)
def test_what_the_rules_drew_and_a_new_item_moved_is_unknown(listed, drawn, place, expected_list, expected):
    """The share is a half; item 4 of the list is one of two new ones. Some user's list shows it at its place."""
    propensities = np.ones(4, np.float32)
    propensities[[*drawn]] = [*drawn.values()]
    for user in range(100):
        own, chances = np.array([listed]), propensities[None].copy()
        rules = no_rules(), 0.0
        found = np.array([[0, 1, 2, 3, 6, 7]])
        explore_newcomers(own, chances, found, 6, 8, *rules, np.array([user]), SEED, 0.5, place)
        if own[0, place] == 4:
            break
    assert own[0].tolist() == expected_list
    assert chances[0].tolist() == expected


def test_a_new_item_that_the_rules_block_is_not_shown():
    items = no_rules()
    items["blocked"][6] = True
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, items) == [0, 1, 2, 3]


def test_a_new_item_above_the_price_cap_is_not_shown_before_cheaper_ones():
    items = no_rules()
    items["behind"][6] = ABOVE_PRICE_CAP
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, items) == [0, 1, 2, 3]
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6, 7], 1, items) == [0, 5, 1, 2]


@pytest.mark.parametrize(
    ("alike", "cap", "expected"),
    [
        ([0, 2, 6], 0, [0, 1, 2, 3]),
        ([0, 2, 6], 2, [0, 1, 2, 3]),
        ([0, 2, 6], 3, [0, 4, 1, 2]),
        ([0, 6], 1, [0, 1, 2, 3]),
        ([0, 6], 2, [0, 4, 1, 2]),
    ],
)
def test_a_new_item_keeps_the_quota_of_its_category(alike, cap, expected):
    items = no_rules()
    items["group"][alike, CATEGORY], items["cap"][alike, CATEGORY] = 5, cap
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, items) == expected


def test_neither_empty_places_nor_the_new_item_itself_use_up_its_quota():
    items = no_rules()
    items["group"][6, CATEGORY], items["cap"][6, CATEGORY] = 5, 1
    assert explored([0, 1, 4, 3], [0, 1, 2, 3, 6], 1, items) == [0, 4, 1, 3]
    items["group"][[0, 6], CATEGORY], items["cap"][[0, 6], CATEGORY] = 5, 2
    assert explored([0, 2, 1, -1], [1, 6, 0], 1, items) == [0, 1, 2, -1]


def test_a_new_item_moves_no_pinned_item():
    items = no_rules()
    items["zone"][2] = 2 - BLOCKED  # is pinned to slot 2
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, items) == [0, 4, 2, 1]
    items["zone"][3] = 3 - BLOCKED
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, items) == [0, 4, 2, 3]
    items["zone"][6] = 3 - BLOCKED  # a new item that is pinned itself
    assert explored([0, 1, 2, 4], [0, 1, 2, 3, 6], 1, items) == [0, 1, 2, 4]
    items = no_rules()
    items["zone"][0] = 2 - BLOCKED  # the best candidate
    assert explored([1, 2, 0, 3], [0, 1, 2, 3, 6], 1, items) == [1, 4, 0, 2]


@pytest.mark.parametrize(
    ("favoured", "expected"),
    [
        ([1, 3], [0, 1, 2, 3]),  # the second place would hold none of them
        ([0, 2], [0, 4, 1, 2]),
        ([0, 3], [0, 1, 2, 3]),  # and here the fourth one would drop out
        ([0, 3, 6], [0, 4, 1, 2]),
    ],
)
def test_a_new_item_leaves_the_favoured_providers_their_share(favoured, expected):
    items = no_rules()
    items["in_floor_group"][favoured] = True
    assert explored([0, 1, 2, 3], [0, 1, 2, 3, 6], 1, items, floor=0.5) == expected


def test_about_the_asked_share_of_lists_explores_and_all_new_items_get_their_chance():
    users = np.arange(4_000)
    columns = np.tile(np.arange(4), (len(users), 1))
    positions = np.tile(np.array([0, 1, 2, 3, 6, 7]), (len(users), 1))
    propensities = certain(columns)
    explore_newcomers(columns, propensities, positions, 6, 8, no_rules(), 0.0, users, SEED, 0.25, 3)
    assert (propensities[:, :3] == 1.0).all()
    assert (propensities[:, 3] == np.where(columns[:, 3] >= 4, 0.25 / 2, 0.75)).all()
    shown = np.bincount(columns[:, 3], minlength=6)
    assert shown[3] == pytest.approx(3_000, abs=120)
    assert shown[4] == pytest.approx(500, abs=80)
    again = np.tile(np.arange(4), (len(users), 1))
    explore_newcomers(again, certain(again), positions, 6, 8, no_rules(), 0.0, users, SEED, 0.25, 3)
    assert again.tolist() == columns.tolist()


def test_the_items_most_alike_share_the_rarest_words(tmp_path):
    items: list[dict[str, object]] = [
        {"title": "red glass lamp", "category": "light", "tags": ["a"]},
        {"title": "blue glass vase", "category": "vase", "tags": ["a", "b"]},
        {"title": "red paper lamp", "category": "light", "tags": []},
        {"title": "Paper bag", "category": None},
    ]
    Content.of(items).save(tmp_path)
    content = Content.load(tmp_path)
    assert content.find_most_alike(compute_tokens({"title": "paper lamp, RED", "category": "light"}), 4).tolist() == [2, 0, 3]
    assert content.find_most_alike(compute_tokens({"tags": ["b"]}), 4).tolist() == [1]
    assert content.find_most_alike(compute_tokens({"title": "unheard of", "price": 3.0}), 2).tolist() == [0, 3]
    assert content.map_groups(0, np.array([5, 6, 5, 0, 0])) == {"light": 5, "vase": 6}
    assert content.map_groups(1, np.zeros(5, np.int32)) == {}


def test_items_without_a_word_are_all_alike():
    assert Content.of([{"price": 1.0}, {"price": 2.0}]).find_most_alike(compute_tokens({"title": "new"}), 2).tolist() == [0, 1]
