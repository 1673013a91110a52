"""Explanations say what items newer than the export do to a list: one may be shown by chance, and others give way to them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from repository.applied_rules import apply_rules
from serving.contract.tensors import UPSERT
from serving.stages.live.models import Upsert
from tests.unit.gateway.conftest import Gateway
from tests.unit.small_shops import export, shop

N_ITEMS, N_CANDIDATES, K = 60, 40, 20
FIRST, N_NEW = 1_000, 60  # new items
USER = 7


def add_new_items(repo: Path) -> None:
    """Add items as the model `upsert` does."""
    stage = Upsert.load(repo / UPSERT / "1")
    columns = np.full((N_NEW, 1), json.dumps({"unit_price": 3.0}), object)
    stage({"kind": np.full((N_NEW, 1), b"item", object), "id": FIRST + np.arange(N_NEW)[:, None], "columns": columns})
    stage.close()


@pytest.fixture(scope="module")
def door(tmp_path_factory) -> Iterator[Gateway]:
    """The gateway of a shop whose lists all show a new item at the top."""
    folder = tmp_path_factory.mktemp("shop")
    dataset = shop(folder / "data", users=12, items=N_ITEMS, events=60)
    pipeline: dict[str, Any] = {"recorded_requests": 64, "candidates": N_CANDIDATES}
    live: dict[str, Any] = {"new_item_share": 1.0, "new_item_place": 0}
    repo = export(folder, dataset, pipeline=pipeline, live=live)
    add_new_items(repo)
    door = Gateway(repo)
    yield door
    Gateway.opened.remove(door)
    door.close()


def explain_all(door: Gateway) -> dict[int, dict]:
    items = [*range(1, N_ITEMS + 1), *range(FIRST, FIRST + N_NEW)]
    return {item: door.ask("GET", "/v1/explain", params={"user": USER, "item": item}).json() for item in items}


@pytest.fixture(scope="module")
def explained(door) -> dict[int, dict]:
    """The explanation of every item, by its id."""
    return explain_all(door)


def test_the_moves_of_an_item_end_where_it_is_shown(explained):
    shown = [told for told in explained.values() if told["shown"]]
    assert len(shown) == K
    for told in shown:
        *_, reranked, last = told["places"]
        ranks = [reranked["rank"], *(move["rank_after"] for move in told["rules"])]
        assert ranks[-1] == last["rank"]
        assert ("moved by the rules: new_items" in told["why"]) == (ranks[0] != ranks[-1])
    (first,) = [told for told in shown if told["places"][-1]["rank"] == 1]
    assert first["item"]["id"] >= FIRST
    assert first["why"] == "It is shown at place 1; moved by the rules: new_items."


def test_an_item_is_told_that_new_ones_are_candidates_whatever_their_scores(explained):
    missing = {item: told["why"] for item, told in explained.items() if "candidates" in told["why"]}
    n_new = sum(item >= FIRST and told["places"][0]["rank"] is not None for item, told in explained.items())
    assert {why for item, why in missing.items() if item < FIRST} == {
        f"It is not among the {N_CANDIDATES} candidates: their retrieval scores are higher, except those of {n_new} new items, "
        "which have places of their own."
    }
    new = [why for item, why in missing.items() if item >= FIRST]
    assert len(new) == N_NEW - n_new > 0
    assert set(new) == {
        f"It is not among the {n_new} new items that are candidates: the latest ones, and those with the best scores."
    }


def test_an_item_is_told_that_pinned_ones_are_candidates_whatever_their_scores(door, explained):
    pinned = min(item for item, told in explained.items() if "candidates:" in told["why"])
    apply_rules(door.repo, {"pinned": [{"item_id": pinned, "slot": 1}]})
    again = explain_all(door)
    assert again[pinned]["places"][-1]["rank"] == 2
    missing = {told["why"] for item, told in again.items() if "candidates:" in told["why"] and item < FIRST}
    n_new = sum(item >= FIRST and told["places"][0]["rank"] is not None for item, told in again.items())
    assert missing == {
        f"It is not among the {N_CANDIDATES} candidates: their retrieval scores are higher, except those of {n_new} new and "
        "1 pinned items, which have places of their own."
    }
