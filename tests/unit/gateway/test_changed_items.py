"""Popular items and explanations reflect at once what `upsert` or rules have changed since the export."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from repository.applied_rules import apply_rules
from serving.contract.tensors import UPSERT
from serving.stages.live.models import Upsert
from tests.repositories import copy_small_repository
from tests.unit.gateway.conftest import Gateway
from triton_recommender import Unavailable

USER = 7


def fail(_query):
    raise Unavailable("gone")


@pytest.fixture
def door(tmp_path) -> Gateway:
    """A gateway of a repository of its own, whose server is gone."""
    return Gateway(copy_small_repository(tmp_path / "repository"), fail)


@pytest.fixture
def change(door) -> Iterator[Callable[..., None]]:
    """change(item, **columns): as the model `upsert` does."""
    stage = Upsert.load(door.repo / UPSERT / "1")

    def upsert(item: int, **columns) -> None:
        stage(
            {
                "kind": np.array([[b"item"]], object),
                "id": np.array([[item]]),
                "columns": np.array([[json.dumps(columns).encode()]], object),
            }
        )

    yield upsert
    stage.close()


def list_popular(door: Gateway) -> dict[int, str | None]:
    return {item["id"]: item["title"] for item in door.recommend(user=USER)["items"]}


def explain(door: Gateway, item: int) -> dict:
    return door.ask("GET", "/v1/explain", params={"user": USER, "item": item}).json()


def test_an_unavailable_item_is_not_popular_until_it_is_back(door, change):
    before = list_popular(door)
    item = next(iter(before))
    change(item, available=False)
    assert item not in list_popular(door)
    change(item, available=True, title="Mug")
    assert list_popular(door) == before | {item: "Mug"}


def test_an_unavailable_item_is_explained_as_such(door, change):
    item = next(item for item in range(1, 31) if explain(door, item)["shown"])
    change(item, available=False)
    told = explain(door, item)
    assert (told["shown"], told["why"]) == (False, "It is unavailable.")


def test_the_rule_that_drops_an_item_is_named(door):
    item = next(item for item in range(1, 31) if explain(door, item)["shown"])
    apply_rules(door.repo, {"blocked_items": [item]})
    told = explain(door, item)
    assert (told["shown"], told["why"]) == (False, "A rule drops it: blocked_items.")
    (move,) = told["rules"]
    assert (move["rule"], move["rank_after"]) == ("blocked_items", None)
    assert move["rank_before"] >= 1
