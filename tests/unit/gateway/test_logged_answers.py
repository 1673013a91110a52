"""The exposure log has the propensities and sources that the server states, and none where it states none."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from live.exposures import read_exposures
from repository.experiments import find_experiment_folder
from tests.repositories import copy_lean_repository
from tests.unit.gateway.conftest import Gateway
from triton_recommender import InvalidRequest, Recommendations, Sources, Unavailable
from triton_recommender.tensors import RECOMMEND

STATED = (1.0, 0.25, None, 1.0)
SOURCES = (Sources.TWO_TOWER, Sources.NONE, Sources.TWO_TOWER | Sources.BOUGHT_TOGETHER, Sources.NEW_ITEMS)


def draw(_query) -> Recommendations:
    return Recommendations((3, 1, 2, 4), (4.0, 3.0, 2.0, 1.0), generation=1, propensities=STATED, sources=SOURCES)


def logged(door: Gateway, column: str = "propensities", **params) -> list[float | None] | None:
    async def ask_and_stop() -> None:
        async with door.app.router.lifespan_context(door.app):
            await door.ask_async("GET", "/v1/recommendations", params={"user": "1"} | params)

    asyncio.run(ask_and_stop())
    [row] = read_exposures(find_experiment_folder(door.repo)).to_pylist()
    return row[column]


@pytest.fixture
def door(tmp_path) -> Gateway:
    return Gateway(copy_lean_repository(tmp_path / "repository"), draw, exposure_share=1.0)


def test_propensities_are_logged_as_the_server_states_them(door):
    assert logged(door) == list(STATED)


def test_a_shorter_answer_has_those_of_its_items(door):
    assert logged(door, k=2) == [1.0, 0.25]


def test_sources_are_logged_as_bits(door):
    assert logged(door, "sources", k=3) == [4, 0, 12]


@pytest.mark.parametrize("column", ["propensities", "sources"])
def test_a_repository_of_an_older_version_states_none(door, column):
    model = door.shop.server.models[RECOMMEND]
    outputs = {name: tensor for name, tensor in model.outputs.items() if name != column}
    door.shop.server.models[RECOMMEND] = replace(model, outputs=outputs)
    assert logged(door, column) is None


@pytest.mark.parametrize(("column", "expected"), [("propensities", [1.0] * 3), ("sources", [Sources.POPULAR] * 3)])
def test_popular_items_are_certain(tmp_path, column, expected):
    def fail(_query):
        raise Unavailable("away")

    door = Gateway(copy_lean_repository(tmp_path / "repository"), fail, exposure_share=1.0)
    assert logged(door, column, k=3) == expected


def test_exclusions_that_only_the_client_can_heed_leave_draws_unknown(door):
    """The list was drawn without them, so nobody knows how often an item would have moved up to a drawn place."""
    most = door.shop.server.models[RECOMMEND].inputs["exclude"][1]
    assert logged(door, exclude=",".join(map(str, range(100, 100 + most)))) == list(STATED)


def test_one_exclusion_more_leaves_draws_unknown(door):
    most = door.shop.server.models[RECOMMEND].inputs["exclude"][1]
    assert logged(door, exclude=",".join(map(str, range(100, 101 + most)))) == [1.0, None, None, None]


def test_answers_that_find_no_room_in_memory_are_counted_as_lost(door, monkeypatch):
    monkeypatch.setattr("live.exposures.MOST_WAITING", 1)
    for _ in range(3):
        door.ask("GET", "/v1/recommendations", params={"user": "1"})
    assert "gateway_lost_exposures_total 2.0" in door.ask("GET", "/metrics").text


def test_a_gateway_that_cannot_write_the_rest_still_closes_its_client(door, caplog):
    folder = find_experiment_folder(door.repo)
    folder.mkdir(mode=0o700)
    (folder / "exposures").write_text("a file where the folder should be")

    async def ask_and_stop() -> None:
        async with door.app.router.lifespan_context(door.app):
            await door.ask_async("GET", "/v1/recommendations", params={"user": "1"})

    asyncio.run(ask_and_stop())
    assert "1 exposures cannot be written and are lost" in caplog.text
    with pytest.raises(InvalidRequest, match="The client is closed"):
        asyncio.run(door.shop.recommend(1))
