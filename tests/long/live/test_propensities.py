"""Twin of the propensities: over many users, how often the stages show an item at its place is what they say it is."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

import numpy as np
import pytest

from repository.applied_rules import apply_rules
from serving.contract.tensors import Axes
from serving.pipeline import Pipeline
from serving.stages.rules.propensities import UNKNOWN
from tests.unit.live.answers import answer, upserted

USERS, BATCH = 1_500, 500  # frequencies are compared over all users; what holds for every list is seen in one batch
LENGTH, PLACE, SHARE = Axes().items_returned, 9, 0.4
NEW = (901, 902, 903)
DEVIATIONS = 4.5  # standard errors that chance may explain: of a thousand comparisons, one in 150 runs is beyond


def ask_strangers(repository, reader, upsert, share: float, rules: dict, users: int = USERS) -> tuple[np.ndarray, np.ndarray]:
    """Return the lists and propensities, [users, LENGTH], of strangers with the same history. Three items are new."""
    for item in NEW:
        upserted(upsert, item, title=f"game number {item}", kind="game", category="game", price=3.0)
    apply_rules(repository, rules)
    pipeline = Pipeline.load(repository, live=reader)
    rerank = pipeline.stages["rerank"]
    outputs = replace(rerank.outputs, settings=replace(rerank.outputs.settings, newcomer_share=share))
    pipeline = replace(pipeline, stages=pipeline.stages | {"rerank": replace(rerank, outputs=outputs)})
    history = [3, 5, 8, *[-1] * (Axes().history - 3)]
    parts = [
        answer(pipeline, list(range(10_000 + start, 10_000 + start + BATCH)), history=[history] * BATCH)
        for start in range(0, users, BATCH)
    ]
    return tuple(np.concatenate([part[name] for part in parts]) for name in ("item_ids", "propensities"))


def compare(item_ids: np.ndarray, propensities: np.ndarray) -> int:
    """Check every place: after the same items, an item comes as often as its propensity says. Return how many were drawn.

    Lists that begin alike must agree on the propensity of an item that follows.
    """
    beginnings: dict[tuple, list[tuple[int, float]]] = defaultdict(list)
    for items, row in zip(item_ids.tolist(), propensities.tolist(), strict=True):
        for place, (item, propensity) in enumerate(zip(items, row, strict=True)):
            beginnings[tuple(items[:place])].append((item, propensity))
    drawn = 0
    for beginning, followers in beginnings.items():
        counts = Counter(item for item, _ in followers)
        stated: dict[int, float] = {}
        for item, propensity in followers:
            assert propensity == stated.setdefault(item, propensity) or propensity == UNKNOWN, (len(beginning), item)
        for item, propensity in stated.items():
            if propensity == UNKNOWN:
                continue
            drawn += propensity < 1.0
            expected = propensity * len(followers)
            error = max(np.sqrt(expected * (1.0 - propensity)), 1.0) if propensity < 1.0 else 0.0  # rare: not normal
            assert abs(counts[item] - expected) <= DEVIATIONS * error, (len(beginning), item, counts[item], expected)
    return drawn


def test_a_place_of_new_items_is_drawn_as_often_as_it_says(repository, reader, upsert):
    item_ids, propensities = ask_strangers(repository, reader, upsert, SHARE, {})
    assert (np.delete(propensities, PLACE, axis=1) == 1.0).all()
    is_new = np.isin(item_ids[:, PLACE], NEW)
    assert set(item_ids[is_new, PLACE]) == set(NEW)
    np.testing.assert_allclose(propensities[is_new, PLACE], SHARE / len(NEW), rtol=1e-6)
    np.testing.assert_allclose(propensities[~is_new, PLACE], 1.0 - SHARE, rtol=1e-6)
    assert compare(item_ids, propensities) == len(NEW) + 1


@pytest.mark.parametrize(
    "rules",
    [
        {"exploration": {"slots": 2, "pool": 5, "novelty": 2.0}},
        {"exploration": {"slots": 2, "pool": 5, "novelty": 2.0}, "diversity": 0.3},
        {"exploration": {"slots": 2, "pool": 4, "novelty": -3.0}, "pinned": [{"item_id": 7, "slot": 19}]},
    ],
    ids=["slots", "after diversity", "a pin moves them up"],
)
def test_what_exploration_draws_is_drawn_as_often_as_it_says(repository, reader, upsert, rules):
    item_ids, propensities = ask_strangers(repository, reader, upsert, 0.0, rules)
    assert (propensities > 0).all()
    assert (propensities[:, : LENGTH - 3] == 1.0).all()
    assert compare(item_ids, propensities) > 5


def test_both_draws_together_are_right_where_they_are_known(repository, reader, upsert):
    rules = {"exploration": {"slots": 2, "pool": 5, "novelty": 2.0}}
    item_ids, propensities = ask_strangers(repository, reader, upsert, SHARE, rules)
    is_new = np.isin(item_ids[:, PLACE], NEW)
    assert (propensities[~is_new] > 0).all()
    assert (propensities[is_new][:, -1] == UNKNOWN).all()  # the new item has moved what exploration drew
    assert compare(item_ids, propensities) > 5


def test_exploration_at_the_place_of_new_items_leaves_the_rest_of_the_list_unknown(repository, reader, upsert):
    rules = {"exploration": {"slots": 15, "pool": 17}}
    _, propensities = ask_strangers(repository, reader, upsert, SHARE, rules, BATCH)
    assert (propensities[:, :PLACE] > 0).all()
    assert (propensities[:, PLACE:] == UNKNOWN).all()


@pytest.mark.parametrize("rule", [{"price_cap": 50.0}, {"max_per_category": 9}])
def test_rules_that_move_drawn_items_up_leave_the_whole_list_unknown(repository, reader, upsert, rule):
    rules = {"exploration": {"slots": 2, "pool": 5}, **rule}
    _, propensities = ask_strangers(repository, reader, upsert, SHARE, rules, BATCH)
    assert (propensities == UNKNOWN).all()
    apply_rules(repository, rule)  # without exploration, rules draw nothing
    assert (answer(Pipeline.load(repository, live=reader), [7])["propensities"][:, :PLACE] == 1.0).all()
