"""Recommendations within a category or named items: exact with all that live events add, and as `upsert` names categories."""

from __future__ import annotations

from dataclasses import replace

import faiss
import numpy as np
import pytest

from serving.contract.tensors import NARROWED, PAD_ID, Degraded
from serving.pipeline import Pipeline
from serving.stages.features.ids import ItemIndex
from serving.stages.live.catalogue import candidates
from serving.stages.live.catalogue.candidates import SearchedItems
from serving.stages.live.counts.sales import LiveSales
from serving.stages.retrieve import Retrieve
from serving.stages.search.search import Blocked, Neighbours, Search
from tests.present import present
from tests.unit.live.answers import event_inputs, last_event_ms, upserted
from tests.unit.live.shops import KINDS, N_ITEMS
from training.retrieval.index import make_index_vectors

C = 6  # candidates: fewer than a category has, so that pairs and new items replace the last ones


def answer(pipeline: Pipeline, users: list[int], category: str) -> dict[str, np.ndarray]:
    return pipeline({"user_id": np.array(users)[:, None], "category": np.full((len(users), 1), category.encode(), object)})


def list_shown(pipeline: Pipeline, category: str) -> set[int]:
    """Return the items that thirty known users and two unknown ones are shown in a category."""
    return set(answer(pipeline, [*range(1, 31), 99, -5], category)["item_ids"].ravel().tolist()) - {PAD_ID}


def load_retrieve(repository, reader, indexed: bool = False) -> Retrieve:
    """Return the stage with a live store, with lists of C candidates."""
    stage = Pipeline.load(repository, live=reader).stages["retrieve"]
    search, outputs = stage.search, stage.outputs
    if indexed:
        positions = np.flatnonzero(search.servable[:-1])
        search.index = faiss.IndexIDMap(faiss.IndexFlatL2(search.item_vectors.shape[1] + 1))
        search.index.add_with_ids(make_index_vectors(search.item_vectors[positions]), positions)
    return replace(stage, outputs=replace(outputs, axes=replace(outputs.axes, candidates=C)))


@pytest.mark.parametrize("indexed", [False, True], ids=["whole catalogue", "by index"])
def test_answers_within_a_choice_are_those_of_a_shop_where_all_else_is_unavailable(
    repository, reader, observe, upsert, indexed
):
    rng, at_ms = np.random.default_rng(0), last_event_ms(repository)
    visits = {"user_id": np.repeat(np.arange(1_000, 1_040), 3).tolist(), "item_id": rng.integers(1, N_ITEMS + 1, 120).tolist()}
    observe(event_inputs(**visits, timestamp_ms=[at_ms + 60_000 * place for place in range(120)]))
    stage = load_retrieve(repository, reader, indexed)
    for item, kind in ((1_000, "game"), (1_001, "toy"), (1_002, "toy"), (3, "toy"), (5, None)):
        upserted(upsert, item, title=f"number {item}", category=kind)
    upserted(upsert, 8, available=False)
    named = (*range(3, 33, 3), 8, 1_000, 1_001, 999)
    choices = [*((kind, ()) for kind in (*KINDS, "", "toy", "unheard of")), ("", named), ("book", named), ("", (8, 999))] * 4
    users = [1, 7, 99, 1_003, 1_010, 12] * 6
    exclude = np.full((len(users), 64), PAD_ID)
    exclude[:, :4] = rng.integers(1, N_ITEMS + 1, (len(users), 4))
    trace = Pipeline.load(repository, live=reader).trace({"user_id": np.array(users)[:, None], "exclude": exclude})
    inputs = {name: trace[name] for name in ("user_id", "user_categorical", "user_continuous", "history_ids", "lineage")}
    inputs |= {"history_age_days": trace["history_age_days"], "exclude": exclude}
    inputs["category"] = np.array([[category.encode()] for category, _ in choices], object)
    inputs["among"] = np.array([[*among, *[PAD_ID] * (16 - len(among))] for _, among in choices])
    got = stage(inputs)
    kinds = {item: KINDS[item % 3] for item in range(1, N_ITEMS + 1)} | {1_000: "game", 1_001: "toy", 1_002: "toy", 3: "toy"}
    kinds.pop(5)
    for choice in dict.fromkeys(choices):
        category, among = choice
        is_narrow = choice != ("", ())
        twin = load_retrieve(repository, reader, indexed and not is_narrow)  # an index may choose others of equal items
        if among:
            twin = replace(twin, outputs=replace(twin.outputs, filter_seen=False))
        outside = [item for item in (*range(1, N_ITEMS + 1), 1_000, 1_001, 1_002) if category not in ("", kinds.get(item))]
        outside += [item for item in (*range(1, N_ITEMS + 1), 1_000, 1_001, 1_002) if among and item not in among]
        for position in twin.items.find_positions(np.array(outside, np.int64)):
            twin.search.set_available(position, False)
        rows = [row for row, other in enumerate(choices) if other == choice]
        whole = {"category": np.full((len(rows), 1), b"", object), "among": np.full((len(rows), 16), PAD_ID)}
        expected = twin({name: values[rows] for name, values in inputs.items()} | whole)
        if is_narrow:  # a short list of a choice lacks nothing
            expected["lineage"][:, 1] = expected["lineage"][:, 1] & ~Degraded.RETRIEVE | NARROWED
        for name in ("candidate_ids", "candidate_sources", "lineage"):
            np.testing.assert_array_equal(got[name][rows], expected[name], err_msg=f"{name} of {choice}")
        np.testing.assert_allclose(got["retrieval_scores"][rows], expected["retrieval_scores"], rtol=1e-6)
    for row in range(len(users)):
        alone = stage({name: values[row : row + 1] for name, values in inputs.items()})
        np.testing.assert_array_equal(alone["candidate_ids"][0], got["candidate_ids"][row])
    found = dict(zip(choices, (got["candidate_ids"] != PAD_ID).sum(axis=1).tolist(), strict=True))
    assert (found["game", ()], found["", named], found["unheard of", ()], found["", (8, 999)]) == (C, C, 0, 0)
    live_items = present(stage.outputs.live_items)
    assert present(live_items.pairs).pairs.n_slots > 0
    assert len(live_items.arrays.lifted) > 0


def test_of_many_lifted_items_those_of_the_category_are_scored(monkeypatch):
    """Although all those that sell best in the shop are of other categories."""
    monkeypatch.setattr(candidates, "MOST_LIFTED", 5)
    vectors, n_items = np.zeros((40, 2), np.float32), 40
    vectors[:20, 1] = 5.0
    neighbours = Neighbours(np.full((n_items + 1, 1), n_items, np.int32), np.zeros((n_items + 1, 1), np.float32))
    items = SearchedItems(Search(vectors, neighbours, np.ones(n_items, bool)), vectors, np.zeros(n_items + 1, np.float32))
    sales = LiveSales(ItemIndex(np.arange(n_items)), 1_000_000)
    sales.counts[:20], sales.decayed[:20], sales.last_s[:20] = 9, 9.0, 1_000_000
    sales.counts[39], sales.decayed[39], sales.last_s[39] = 1, 1.0, 1_000_000
    items.update_sales(sales, None)
    assert 39 not in items.lifted
    members, nothing = np.arange(n_items + 1) >= 20, Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
    members[n_items] = False
    requests = (np.array([[0.0, 1.0]], np.float32), np.full((1, 2), n_items), nothing)
    positions, scores = items.search.search_within(members, *requests, 3)
    items.lift_popular(*requests, positions, scores, members)
    assert positions.tolist() == [[39, 20, 21]]


def test_an_item_is_found_in_the_category_that_upsert_gave_it_and_in_no_other(pipeline, upsert):
    before = {kind: list_shown(pipeline, kind) for kind in KINDS}
    assert all(items and {KINDS[item % 3] for item in items} == {kind} for kind, items in before.items())
    item = min(before["book"])
    upserted(upsert, item, kind="garden tools")
    assert list_shown(pipeline, "garden tools") == {item}
    assert item not in list_shown(pipeline, "book")
    upserted(upsert, 1_000, kind="garden tools", price=3.0)
    assert list_shown(pipeline, "garden tools") == {item, 1_000}
    upserted(upsert, item, kind=None)
    assert list_shown(pipeline, "garden tools") == {1_000}
    upserted(upsert, item, kind="book")
    assert {kind: list_shown(pipeline, kind) for kind in KINDS} == before


def test_named_items_alone_are_shown_whether_the_export_or_upsert_has_them(pipeline, upsert):
    upserted(upsert, 1_000, kind="book", price=3.0)
    upserted(upsert, 4, available=False)
    among = np.full((2, pipeline.info.axes.candidates), PAD_ID)
    among[:, [0, 2, 3, 9]] = 1_000, 4, 6, 777
    shown = pipeline({"user_id": np.array([[99], [-5]]), "among": among})
    assert [sorted(items)[-2:] for items in shown["item_ids"].tolist()] == [[6, 1_000]] * 2
    assert (shown["item_ids"] != PAD_ID).sum() == 4
    assert shown["degraded"].tolist() == [[Degraded.NONE]] * 2
    excluded = pipeline({"user_id": np.array([[99], [-5]]), "among": among, "exclude": np.where(among[:, :64] == 6, 6, PAD_ID)})
    assert set(excluded["item_ids"].ravel().tolist()) == {1_000, PAD_ID}


def test_a_category_that_nobody_has_is_an_empty_list_and_no_fallback(pipeline):
    for name in ("unheard of", "Book", "boo", " "):
        nothing = answer(pipeline, [7, 99], name)
        assert (nothing["item_ids"] == PAD_ID).all()
        assert nothing["degraded"].tolist() == [[Degraded.NONE]] * 2


def test_categories_that_upsert_gave_are_there_after_a_restart(pipeline, upsert, repository, reader):
    upserted(upsert, 4, category="garden tools")
    assert list_shown(Pipeline.load(repository, live=reader), "garden tools") == list_shown(pipeline, "garden tools") == {4}
