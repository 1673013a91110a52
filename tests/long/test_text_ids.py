"""A shop whose ids are text: answers name its items and users as it does, also those that came after the export."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from export.continuous.continued import continue_log
from serving.contract.ids import stable_id
from serving.contract.tensors import OBSERVE, UPSERT
from serving.live.store import find_live_folder
from serving.stages.live.models import Observe, Upsert
from tests.repositories import FOLLOWED_SETTINGS
from tests.unit.gateway.conftest import Gateway
from tests.unit.small_shops import export
from training.dataset import Dataset, load_dataset

TOML = """
name = "texts"
[interactions]
path = "events.csv"
user_id = "customer"
item_id = "sku"
timestamp = "time"
"""
NEW = "SKU-NEW"


@pytest.fixture(scope="module")
def dataset(tmp_path_factory) -> Dataset:
    folder = tmp_path_factory.mktemp("texts")
    rng = np.random.default_rng(0)
    bought = zip(rng.integers(1, 9, 60), rng.integers(1, 21, 60), strict=True)
    rows = [f"cust-{user},SKU-{item},{1_600_000_000 + 3_600 * hour}" for hour, (user, item) in enumerate(bought)]
    (folder / "events.csv").write_text("\n".join(["customer,sku,time", *rows, ""]))
    (folder / "dataset.toml").write_text(TOML)
    return load_dataset(folder)


@pytest.fixture(scope="module")
def repo(dataset, tmp_path_factory) -> Path:
    return export(tmp_path_factory.mktemp("exported"), dataset, "ensemble", **FOLLOWED_SETTINGS)


@pytest.fixture
def door(repo) -> Gateway:
    """A gateway whose server recommends the new item, and takes changes as the model `upsert` does."""
    return Gateway(repo, lambda query: [stable_id(NEW)])


def take_changes(door: Gateway) -> None:
    """Write the changes that reached the fake server as the model `upsert` does."""
    stage = Upsert.load(door.repo / UPSERT / "1")
    for kind, identifier, columns in door.shop.upserts:
        texts = np.array([[kind.encode()]], object), np.array([[json.dumps(columns).encode()]], object)
        inputs = {"kind": texts[0], "id": np.array([[identifier]]), "columns": texts[1]}
        assert stage.find_faults(inputs) == {}
        stage(inputs)
    stage.close()


def take_events(door: Gateway) -> None:
    """Write the events that reached the fake server as the model `observe` does."""
    stage = Observe.load(door.repo / OBSERVE / "1")
    rows = [(event.user_id, event.item_id, event.timestamp_ms) for event in door.shop.events]
    inputs = dict(zip(("user_id", "item_id", "timestamp_ms"), np.array(rows).T[..., np.newaxis], strict=True))
    texts = dict.fromkeys(("event", "event_id", "request_id"), np.full((len(rows), 1), b"", object))
    inputs |= texts | {"value": np.full((len(rows), 1), np.nan, np.float32)}
    assert stage.find_faults(inputs) == {}
    stage(inputs)
    stage.close()


def test_an_item_added_over_rest_is_recommended_by_its_own_id(door, dataset):
    assert door.ask("PUT", f"/v1/items/{NEW}", json={"title": "Tea pot"}).status_code == 200
    assert door.ask("PUT", "/v1/items/SKU-1", json={"available": True}).status_code == 200
    assert [columns for _, _, columns in door.shop.upserts] == [{"item_id": NEW, "title": "Tea pot"}, {"available": True}]
    take_changes(door)
    (item,) = door.recommend(user="cust-1")["items"]
    assert (item["id"], item["title"]) == (NEW, "Tea pot")
    assert door.ask("POST", "/v1/events", json={"user": "cust-1", "item": item["id"]}).status_code == 200
    assert door.shop.events[-1].item_id == stable_id(NEW)

    continued = continue_log(dataset, find_live_folder(door.repo))
    assert continued.item_names is not None
    assert dataset.item_names is not None
    names = dict(zip(continued.item_names["name"], continued.item_names["id"], strict=True))
    assert names == dict(zip(dataset.item_names["name"], dataset.item_names["id"], strict=True)) | {NEW: stable_id(NEW)}
    assert continued.item_names["id"].tolist() == continued.items["item_id"].tolist()


def test_an_event_of_an_item_that_nobody_added_is_kept_for_an_export_after_it_was_added(door, dataset):
    events = [{"user": "cust-1", "item": item, "timestamp": "2021-01-01"} for item in ("SKU-1", "SKU-LATE", "SKU-TYPO")]
    results = door.ask("POST", "/v1/events", json=events).json()["results"]
    assert "warning" not in results[0]
    assert results[1]["warning"].startswith("Item 'SKU-LATE' is not in the catalogue. Correct the id, or add the item by PUT")
    assert "gateway_unknown_item_events_total 2.0" in door.ask("GET", "/metrics").text
    take_events(door)
    continued = continue_log(dataset, find_live_folder(door.repo))
    assert len(continued.interactions) == len(dataset.interactions) + 1
    assert continued.item_names is not None
    assert continued.learned_sales is not None
    assert continued.item_names["id"].tolist() == continued.items["item_id"].tolist()
    assert continued.report.notes[-2].startswith("live events left out: 2, of items: 2. Their ids")
    assert continued.learned_sales["item_id"].tolist() == [stable_id("SKU-1")]

    assert door.ask("PUT", "/v1/items/SKU-LATE", json={"title": "Tea cosy"}).status_code == 200
    take_changes(door)
    assert "warning" not in door.ask("POST", "/v1/events", json=events[1]).json()
    continued = continue_log(dataset, find_live_folder(door.repo))
    assert continued.interactions["item_id"].tolist()[-2:] == [stable_id("SKU-1"), stable_id("SKU-LATE")]
    assert continued.report.notes[-2].startswith("live events left out: 1, of items: 1. Their ids")


def test_a_name_that_does_not_give_the_id_is_refused(repo):
    stage = Upsert.load(repo / UPSERT / "1")
    kind, columns = np.array([[b"item"]], object), np.array([[b'{"item_id": "SKU-OTHER"}']], object)
    faults = stage.find_faults({"kind": kind, "id": np.array([[stable_id(NEW)]]), "columns": columns})
    stage.close()
    assert "item_id is 'SKU-OTHER', which is not the text of the id" in faults[0]


def test_ids_that_nobody_knows_come_back_as_they_were_written(door):
    told = door.ask("GET", "/v1/explain", params={"user": "stranger", "item": "SKU-?"}).json()
    assert (told["user"], told["item"]["id"], told["known"]) == ("stranger", "SKU-?", False)
    assert door.ask("GET", "/v1/items/SKU-?/similar".replace("?", "%3F")).json()["item"]["id"] == "SKU-?"
    assert door.ask("GET", "/v1/users/stranger").json()["user"] == "stranger"
    assert door.ask("GET", "/v1/users/cust-1").json()["user"] == "cust-1"
