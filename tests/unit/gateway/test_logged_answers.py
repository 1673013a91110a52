"""The exposure log has the propensities and sources that the server states, and none where it states none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from live.exposures import read_exposures
from repository.experiments import find_experiment_folder
from tests.unit.gateway.conftest import Gateway, failing
from triton_recommender import InvalidRequest, Recommendations, Sources
from triton_recommender.tensors import RECOMMEND

STATED = (1.0, 0.25, None, 1.0)
SOURCES = (Sources.TWO_TOWER, Sources.NONE, Sources.TWO_TOWER | Sources.BOUGHT_TOGETHER, Sources.NEW_ITEMS)


def draw(_query) -> Recommendations:
    return Recommendations((3, 1, 2, 4), (4.0, 3.0, 2.0, 1.0), generation=1, propensities=STATED, sources=SOURCES)


def logged(door: Gateway, column: str = "propensities", **params) -> list[float | None] | None:
    door.recommend_and_stop(user=1, **params)
    [row] = read_exposures(find_experiment_folder(door.repo)).to_pylist()
    return row[column]


@pytest.fixture
def door(own_repo) -> Gateway:
    return Gateway(own_repo, draw, exposure_share=1.0)


@pytest.mark.parametrize(
    ("column", "k", "expected"),
    [("propensities", 4, list(STATED)), ("propensities", 2, [1.0, 0.25]), ("sources", 3, [4, 0, 12])],
)
def test_propensities_and_sources_are_logged_as_the_server_states_them(door, column, k, expected):
    assert logged(door, column, k=k) == expected


@pytest.mark.parametrize("column", ["propensities", "sources"])
def test_a_repository_of_an_older_version_states_none(door, column):
    model = door.shop.server.models[RECOMMEND]
    outputs = {name: tensor for name, tensor in model.outputs.items() if name != column}
    door.shop.server.models[RECOMMEND] = replace(model, outputs=outputs)
    assert logged(door, column) is None


@pytest.mark.parametrize(("column", "expected"), [("propensities", [1.0] * 3), ("sources", [Sources.POPULAR] * 3)])
def test_popular_items_are_certain(own_repo, column, expected):
    door = Gateway(own_repo, failing(), exposure_share=1.0)
    assert logged(door, column, k=3) == expected


@pytest.mark.parametrize(("more", "expected"), [(0, list(STATED)), (1, [1.0, None, None, None])])
def test_exclusions_that_only_the_client_can_heed_leave_draws_unknown(door, more, expected):
    """The list was drawn without them, so nobody knows how often an item would have moved up to a drawn place."""
    most = door.shop.server.models[RECOMMEND].inputs["exclude"][1]
    assert logged(door, exclude=",".join(map(str, range(100, 100 + most + more)))) == expected


def test_answers_that_find_no_room_in_memory_are_counted_as_lost(door, monkeypatch):
    monkeypatch.setattr("live.exposures.MOST_WAITING", 1)
    for _ in range(3):
        door.ask("GET", "/v1/recommendations", params={"user": "1"})
    assert door.read_metric("gateway_lost_exposures_total") == {"": 2}


def test_a_gateway_that_cannot_write_the_rest_still_closes_its_client(door, caplog):
    folder = find_experiment_folder(door.repo)
    folder.mkdir(mode=0o700)
    (folder / "exposures").write_text("a file where the folder should be")
    door.recommend_and_stop(user=1)
    assert "1 exposures cannot be written and are lost" in caplog.text
    with pytest.raises(InvalidRequest, match="The client is closed"):
        asyncio.run(door.shop.recommend(1))
