"""The exposure log has the probability of each shown item: known ones are right, the others are null."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from live.exposures import read_exposures
from repository.applied_rules import add_version, switch_to
from repository.experiments import experiment_folder
from serving.contract.artifacts import read_stage, stage_folder
from serving.contract.tensors import UPSERT
from serving.stages.live.models import Upsert
from serving.stages.rules.config import Exploration, Pin, RulesConfig
from serving.stages.rules.rules import Rules
from tests.unit.gateway.conftest import Gateway
from tests.unit.live.shops import repository_with_kinds

LENGTH = 20  # items that a list has
SHOWN = list(range(1, LENGTH + 1))


@pytest.fixture
def repo(tmp_path) -> Path:
    """New items are given a chance in every list of this shop, at place 9 counted from 0."""
    return Path(shutil.copytree(repository_with_kinds(), tmp_path / "repository"))


def apply_rules(repo: Path, **rules) -> None:
    folder = experiment_folder(repo) / "rules"
    folder.mkdir(parents=True, exist_ok=True)
    switch_to(folder, add_version(repo, folder, 1, rules, "").number)


def propensities(repo: Path, while_asked=lambda: None, shown=SHOWN) -> list[float | None]:
    def answer(_query) -> list[int]:
        while_asked()
        return shown

    door = Gateway(repo, answer, exposure_share=1.0)

    async def ask_and_stop() -> None:
        async with door.app.router.lifespan_context(door.app):
            await door.ask_async("GET", "/v1/recommendations", params={"user": "1"})

    asyncio.run(ask_and_stop())
    return read_exposures(experiment_folder(repo)).to_pylist()[-1]["propensities"]


def certain(count: int) -> list[float | None]:
    return [1.0] * count + [None] * (LENGTH - count)


def test_where_nothing_is_drawn_every_item_had_to_be_shown(repo):
    assert propensities(repo) == certain(LENGTH)


@pytest.mark.parametrize(
    ("rules", "known"),
    [
        ({"exploration": {"slots": 4, "pool": 10}}, LENGTH - 4),
        ({"exploration": {"slots": 4, "pool": 10}, "pinned": [{"item_id": 1, "slot": 19}]}, LENGTH - 5),
        ({"exploration": {"slots": 4, "pool": 10}, "max_per_category": 3}, 0),
        ({"exploration": {"slots": 4, "pool": 10}, "diversity": 0.5}, LENGTH - 4),
        ({"max_per_category": 3, "diversity": 0.5}, LENGTH),
    ],
)
def test_what_exploration_may_have_changed_is_null(repo, rules, known):
    apply_rules(repo, **rules)
    assert propensities(repo) == certain(known)


def test_rules_of_the_export_explore_as_well(repo):
    path = stage_folder(repo, "rerank", 1) / "rules.json"
    facts = json.loads(path.read_text()) | {"price_cap": None, "exploration": {"slots": 3}}
    path.chmod(0o644)
    path.write_text(json.dumps(facts))
    assert propensities(repo) == certain(LENGTH - 3)
    apply_rules(repo, diversity=0.1)  # in their place
    assert propensities(repo) == certain(LENGTH)


def test_rules_that_are_applied_during_a_request_leave_it_unknown(repo):
    assert propensities(repo, lambda: apply_rules(repo, diversity=0.1)) == certain(0)


def test_rules_that_cannot_be_read_leave_it_unknown(repo):
    (stage_folder(repo, "rerank", 1) / "rules.json").unlink()
    assert propensities(repo) == certain(0)


def upsert_item(repo: Path, item_id: int) -> None:
    upsert = Upsert.load(repo / UPSERT / "1")
    given = {"kind": b"item", "id": item_id, "columns": b'{"title": "new"}'}
    upsert({t.name: np.array([[given[t.name]]], t.numpy_dtype) for t in upsert.info.spec.inputs if t.name in given})
    upsert.close()


def test_a_new_item_may_be_at_its_place_or_behind_a_short_list(repo):
    upsert_item(repo, 5)  # changes an item that the generation knows
    assert propensities(repo) == certain(LENGTH)
    upsert_item(repo, 500)
    assert propensities(repo) == certain(9)
    assert propensities(repo, shown=SHOWN[:4]) == [1.0, 1.0, 1.0, None]


@pytest.mark.parametrize("pinned", [(), (Pin(40, 0), Pin(41, LENGTH - 1))])
def test_certain_places_show_the_same_items_whatever_is_drawn(repo, pinned):
    """The stage's own rules, over many seeds: a place that is said to be certain never changes."""
    folder = stage_folder(repo, "rerank", 1)
    n_items = Rules.load(folder).n_items
    assert read_stage(folder).axes.items_returned == LENGTH
    apply_rules(repo, exploration={"slots": 4, "pool": 10}, pinned=[vars(pin) for pin in pinned])
    compiled = experiment_folder(repo) / "rules" / "1" / "1"
    positions = np.arange(50, dtype=np.int64)[None] % n_items
    scores = -np.arange(50, dtype=np.float32)[None]
    lists = []
    for seed in range(200):
        config = RulesConfig(exploration=Exploration(4, 10, seed=seed), pinned=pinned)
        lists.append(Rules(config, Rules.load(compiled).items).apply(positions, scores, np.zeros(1, np.int64), LENGTH)[0])
    always_same = (np.array(lists) == lists[0]).all(axis=0)
    known = np.array([chance is not None for chance in propensities(repo)])
    assert always_same[known].all()
    assert known.sum() == LENGTH - 4 - len(pinned)
