"""Recommendations within a category or among named items: what the server is asked, popular items.

Also what is said of a category that no item has.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from live.exposures import read_exposures
from repository.applied_rules import apply_rules
from serving.contract.artifacts import find_stage_folder, load_manifest, write_manifest
from serving.contract.tensors import UPSERT
from serving.live.store import find_live_folder
from serving.stages.live.content import Content
from serving.stages.live.models import Upsert
from tests.repositories import copy_lean_repository
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.tried import USERS, Tried
from triton_recommender import Unavailable
from triton_recommender.tensors import RECOMMEND

N_ITEMS = 30
CATEGORIES = ["mugs" if item % 2 else "bags" for item in range(1, N_ITEMS + 1)]
UNAVAILABLE = 9
EMPTY = "category is {!r}, which no item has, so the list is empty. Correct the name."


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    """A shop of mugs, with odd ids, and bags; the last items sell best."""
    repo = copy_lean_repository(tmp_path_factory.mktemp("categories") / "repository")
    folder = find_stage_folder(repo, "retrieve", 1)
    Content.of([{"category": category} for category in CATEGORIES]).save(folder)
    for name, values in (
        ("recent_popularity", np.arange(1, N_ITEMS + 1)),
        ("available", np.arange(1, N_ITEMS + 1) != UNAVAILABLE),
    ):
        array = np.load(folder / f"{name}.npy")
        array[:N_ITEMS] = values
        np.save(folder / f"{name}.npy", array)
    write_manifest(folder, **{name: fact for name, fact in load_manifest(folder).items() if name not in ("schema", "files")})
    return repo


@pytest.fixture
def change(repo) -> Iterator[Callable[..., None]]:
    """change(item, **columns): as the model `upsert` does; undone afterwards."""
    stage, changed = Upsert.load(repo / UPSERT / "1"), set[int]()

    def upsert(item: int, **columns) -> None:
        changed.add(item)
        texts = {"kind": b"item", "columns": json.dumps(columns).encode()}
        stage({name: np.array([[text]], object) for name, text in texts.items()} | {"id": np.array([[item]])})

    yield upsert
    for item in changed:
        upsert(item, category=CATEGORIES[item - 1] if item <= N_ITEMS else None, available=True)
    stage.close()


def fail(query):
    raise Unavailable("gone")


def list_popular(door: Gateway, category: str, **params) -> list[int]:
    answer = door.recommend(user=7, category=category, **params)
    assert (answer["degraded"], answer["warnings"]) == (["gateway_fallback"], [])
    return [item["id"] for item in answer["items"]]


def test_popular_items_are_those_of_the_category_and_leave_out_what_left_it_or_is_hidden(repo, change):
    door, mugs = Gateway(repo, fail), list(range(29, 0, -2))
    mugs.remove(UNAVAILABLE)
    assert list_popular(door, "mugs") == mugs
    assert list_popular(door, " bags ", k=3, exclude="28") == [30, 26, 24]
    change(29, category="bags")
    change(27, available=False)
    apply_rules(repo, {"blocked_items": [25]})
    assert list_popular(door, "mugs") == mugs[3:]
    apply_rules(repo, {})
    change(29, category=None)
    assert list_popular(door, "mugs", k=2) == [25, 23]


def test_popular_items_are_those_that_the_request_names_and_new_ones_come_last(repo, change):
    def ask(among: str, **params) -> list[int]:
        answer = door.recommend(user=7, among=among, **params)
        assert (answer["degraded"], answer["warnings"]) == (["gateway_fallback"], [])
        return [item["id"] for item in answer["items"]]

    door = Gateway(repo, fail)
    change(998, category="mugs")
    change(997, title="A new bag")
    assert ask(f"998,1,4,997,{UNAVAILABLE},30,4") == [30, 4, 1, 998, 997]
    assert ask("998,1,4,997,30", k=2, exclude=30) == [4, 1]
    assert ask("998,1,4,997,30", history="30,4") == [30, 4, 1, 998, 997]
    assert ask("998,1,4,997,30,29", category="mugs") == [29, 1, 998]
    change(29, category="bags")
    change(998, available=False)
    assert ask("998,1,4,997,30,29", category="mugs") == [1]
    assert ask("9") == []
    change(998, available=True)
    apply_rules(repo, {"blocked_items": [4, 998]})
    assert ask("998,1,4,997,30") == [30, 1, 997]
    apply_rules(repo, {})
    assert ask("998,1,4,997,30") == [30, 4, 1, 998, 997]


@pytest.mark.parametrize("handler", [lambda query: [], fail], ids=["served", "popular items"])
def test_a_category_that_no_item_has_is_an_empty_list_with_a_warning(repo, change, handler):
    door = Gateway(repo, handler)
    answer = door.recommend(user=7, category="hats")
    assert (answer["items"], answer["warnings"]) == ([], [EMPTY.format("hats")])
    change(999, category="hats")
    assert door.recommend(user=7, category="hats")["warnings"] == []
    change(999, category="caps")
    assert door.recommend(user=7, category="hats")["warnings"] == [EMPTY.format("hats")]


def test_who_asks_too_often_is_not_told_that_nothing_has_a_new_category(repo, change):
    door = Gateway(repo, lambda query: [], requests_per_s=0.001, burst=1)
    assert door.recommend(user=7, category="hats")["degraded"] == []
    change(999, category="hats")
    answer = door.recommend(user=7, category="hats")
    assert (answer["degraded"], answer["warnings"]) == (["gateway_fallback"], [])


def test_a_category_whose_items_all_left_it_has_none(repo, change):
    door = Gateway(repo, lambda query: [])
    for item in range(1, N_ITEMS + 1, 2):
        assert door.recommend(user=7, category="mugs")["warnings"] == []
        change(item, category="bags")
    assert door.recommend(user=7, category="mugs")["warnings"] == [EMPTY.format("mugs")]


def test_an_answer_within_a_choice_has_reasons_and_is_logged(repo):
    door = Gateway(repo, lambda query: [3, 1] if query.category == "mugs" and query.among else [2], exposure_share=1.0)

    async def ask_and_stop() -> dict:
        async with door.app.router.lifespan_context(door.app):
            params = {"user": 7, "category": "mugs", "among": "1,2,3,4", "reasons": "true"}
            return (await door.ask_async("GET", "/v1/recommendations", params=params)).json()

    answer = asyncio.run(ask_and_stop())
    assert [item["id"] for item in answer["items"]] == [3, 1]
    assert all(item["reasons"] is not None for item in answer["items"])
    rows = [row for row in read_exposures(find_live_folder(repo)).to_pylist() if row["request_id"] == answer["request_id"]]
    assert [row["item_ids"] for row in rows] == [[3, 1]]


def test_a_repository_of_an_older_version_refuses_only_a_category(repo):
    door = Gateway(repo)
    models = door.shop.server.models
    inputs = {name: tensor for name, tensor in models[RECOMMEND].inputs.items() if name != "category"}
    models[RECOMMEND] = replace(models[RECOMMEND], inputs=inputs)
    assert door.recommend(user=7)["degraded"] == []
    refused = door.ask("GET", "/v1/recommendations", params={"user": 7, "category": "mugs"})
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["code"] == "INVALID_ARGUMENT"
    assert "category is set, but this server's `recommend` has no such input" in error["message"]
    assert "Leave `category` out, or export again." in error["message"]
    assert [query.category for query in door.shop.queries] == [None]


@pytest.mark.parametrize(("mode", "n_asked"), [("ab", 3), ("interleave", 6), ("shadow", 6)])
def test_each_generation_that_is_asked_is_asked_for_the_choice(tmp_path, mode, n_asked):
    tried = Tried(copy_lean_repository(tmp_path / "shop"))
    tried.start(mode=mode, share=1.0)
    tried.ask(USERS[:3], category="mugs", among="3,5")
    asked = [(query.category, query.among) for query in tried.door.shop.queries if query.user_id is not None]
    assert asked == [("mugs", [3, 5])] * n_asked


@pytest.mark.parametrize("name", ["category", "among"])
def test_what_explains_takes_no_choice(repo, name):
    door = Gateway(repo)
    refused = door.ask("GET", "/v1/explain", params={"user": 7, "item": 3, name: "mugs"})
    assert (refused.status_code, f"There is no parameter '{name}'" in refused.text) == (400, True)
    paths = door.ask("GET", "/openapi.json").json()["paths"]
    taken = {path: [one["name"] for one in paths[path]["get"]["parameters"]] for path in ("/v1/recommendations", "/v1/explain")}
    assert {path: name in names for path, names in taken.items()} == {"/v1/recommendations": True, "/v1/explain": False}
