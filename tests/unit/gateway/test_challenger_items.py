"""Items that only the challenger's catalogue has are named as the shop knows them, while the experiment runs."""

import json

import numpy as np
import pytest

from repository.experiments import end_experiment, start_experiment
from serving.contract.ids import stable_id
from serving.live.experiment import Experiment, Mode, State
from tests.repositories import copy_generation
from tests.unit.gateway.conftest import Gateway

NEW, OLD = stable_id("new"), 4


@pytest.fixture(params=["ab", "interleave"])
def mode(request) -> Mode:
    return request.param


@pytest.fixture
def door(own_repo, mode) -> Gateway:
    """Generation 2 is that of a later log, with an item more; ids are text."""
    copy_generation(own_repo)
    for generation in (1, 2):
        folder = own_repo / "recommend" / str(generation)
        ids, titles = np.load(folder / "item_ids.npy"), json.loads((folder / "item_titles.json").read_text())
        names = {f"sku-{item_id}": item_id for item_id in ids.tolist()}
        if generation == 2:
            names["new"] = NEW
            np.save(folder / "item_ids.npy", np.append(ids, NEW))
            (folder / "item_titles.json").write_text(json.dumps([*titles, "New Lamp"]))
        (folder / "item_names.json").write_text(json.dumps(names))
    door = Gateway(own_repo, lambda query: [1, 2])
    door.shop.server.challengers[2] = lambda query: [NEW, OLD]
    start_experiment(own_repo, Experiment("spring", 1, 2, 0.99, mode))
    return door


def post_new(door: Gateway, **fields: object) -> dict:
    response = door.ask("POST", "/v1/events", json={"user": "7", "item": "new"} | fields)
    assert response.status_code == 200, response.text
    return response.json()


def list_titles(door: Gateway) -> dict[str, str | None]:
    return {item["id"]: item["title"] for item in door.recommend(user=7)["items"]}


def test_an_item_of_the_challenger_has_its_own_id_and_title(door):
    answer = door.recommend(user=7)
    items = {item["id"]: item["title"] for item in answer["items"]}
    assert items["new"] == "New Lamp"
    assert items.keys() <= {"new", f"sku-{OLD}", "sku-1"}
    posted = post_new(door, request_id=answer["request_id"])
    assert posted["sequence"] > 0
    assert "warning" not in posted


@pytest.mark.parametrize("state", ["stopped", "rolled back"])
def test_after_the_experiment_its_items_are_unknown_again(door, state: State):
    assert "new" in list_titles(door)
    assert "warning" not in post_new(door)
    end_experiment(door.repo, "enough", state)
    assert list_titles(door).keys() == {"sku-1", "sku-2"}
    assert "warning" in post_new(door)


def test_items_of_a_promoted_challenger_stay_known(door):
    assert "new" in list_titles(door)
    end_experiment(door.repo, "it is better", "promoted")
    list_titles(door)
    assert "warning" not in post_new(door)  # the server has not moved yet
    door.shop.server.served_generation, door.shop.server.handler = 2, lambda query: [NEW, OLD]
    assert list_titles(door)["new"] == "New Lamp"
    assert "warning" not in post_new(door)
