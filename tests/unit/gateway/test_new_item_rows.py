"""Callers are told when an export has no row left for a further new item."""

from __future__ import annotations

import json

import numpy as np
import pytest

from gateway import schema
from serving.contract.tensors import UPSERT
from serving.stages.live.models import Upsert
from tests.repositories import copy_lean_repository, copy_to_change
from tests.unit.gateway.conftest import Gateway
from tests.unit.live.shops import repository_with_kinds

N_ROWS, FIRST = 8, 1_000  # rows of the repository, and the first new item
WARNING = (
    "Generation 1 has no row left for a new item ([live] new_items), so it cannot recommend {!r}. The change is stored: the "
    "next export adds the item."
)


def add_items(repo, items: range) -> None:
    """Add items as the model `upsert` does."""
    stage = Upsert.load(repo / UPSERT / "1")
    columns = json.dumps({"price": 3.0})
    inputs = {"kind": np.full((len(items), 1), b"item", object), "id": np.array(items)[:, None]}
    stage(inputs | {"columns": np.full((len(items), 1), columns, object)})
    stage.close()


@pytest.fixture
def door(tmp_path) -> Gateway:
    """A gateway of a shop with N_ROWS rows for new items."""
    return Gateway(copy_to_change(repository_with_kinds(), tmp_path / "repository"))


def test_a_default_export_has_a_row_for_each_of_a_thousand_new_items(tmp_path):
    repo = copy_lean_repository(tmp_path / "repository")
    add_items(repo, range(FIRST, 2 * FIRST))
    assert "does not know the item" not in explain(Gateway(repo), 2 * FIRST - 1)
    assert "warning" not in Gateway(repo).ask("PUT", f"/v1/items/{2 * FIRST}", json={"price": 3.0}).json()


def explain(door: Gateway, item: int) -> str:
    return door.ask("GET", "/v1/explain", params={"user": 7, "item": item}).json()["why"]


def test_a_change_of_a_new_item_without_a_row_has_a_warning(door):
    add_items(door.repo, range(FIRST, FIRST + N_ROWS - 1))
    assert "warning" not in door.ask("PUT", f"/v1/items/{FIRST + N_ROWS - 1}", json={"price": 3.0}).json()
    add_items(door.repo, range(FIRST + N_ROWS - 1, FIRST + N_ROWS))
    answer = door.ask("PUT", f"/v1/items/{FIRST + N_ROWS}", json={"price": 3.0})
    schema.Changed.model_validate(answer.json(), strict=True)
    assert (answer.status_code, answer.json()) == (200, {"sequence": 2, "warning": WARNING.format("1008")})


def test_a_list_of_changes_warns_of_the_items_without_a_row_alone(door):
    add_items(door.repo, range(FIRST, FIRST + N_ROWS + 1))
    items: list[int | str] = [7, FIRST, f"{FIRST + N_ROWS}", "no number", FIRST + N_ROWS + 1]
    answer = door.ask("POST", "/v1/items", json=[{"id": item, "columns": {"price": 3.0}} for item in items])
    schema.ChangeResults.model_validate(answer.json(), strict=True)
    warnings = [result.get("warning") for result in answer.json()["results"]]
    assert warnings == [None, None, WARNING.format("1008"), None, WARNING.format(1009)]
    users = door.ask("POST", "/v1/users", json=[{"id": FIRST + N_ROWS, "columns": {"country": "DE"}}])
    assert users.json() == {"results": [{"sequence": 5}]}


def test_an_item_without_a_row_is_explained_as_such(door):
    unknown = "Generation 1 does not know the item"
    assert explain(door, FIRST) == f"{unknown}; an upsert, or the next export, adds it."
    add_items(door.repo, range(FIRST, FIRST + N_ROWS + 1))
    assert unknown not in explain(door, FIRST)
    no_row = f"{unknown} and has no row left for a new one ([live] new_items); after an upsert, the next export adds it."
    assert explain(door, FIRST + N_ROWS) == no_row
