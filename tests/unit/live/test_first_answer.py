"""The first answer after a change is as complete as the next one."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from serving.contract.tensors import PAD_ID
from serving.live.events import ITEM_CHANGED
from serving.live.reader import Reader
from serving.stages.features.ids import ItemIndex
from serving.stages.live.catalogue.candidates import SearchedItems
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.content import Content
from serving.stages.search.search import Neighbours, Search
from tests.unit.live.answers import answer, event_inputs, last_event_ms, upserted
from tests.unit.live.batches import change


@pytest.mark.parametrize("has_bought", [False, True], ids=["in a session", "by a user"])
def test_who_took_a_new_item_gets_the_same_candidates_at_once_and_later(pipeline, upsert, observe, repository, has_bought):
    upserted(upsert, 1_000, title="game number 7", kind="game", category="game", price=3.0)
    if has_bought:
        observe(event_inputs(user_id=[-5], item_id=[1_000], timestamp_ms=[last_event_ms(repository)]))
    session = {} if has_bought else {"history": [[1_000, *[-1] * 63]]}
    first, second = (answer(pipeline, [-5], **session) for _ in range(2))
    assert 1_000 not in first["item_ids"]
    for name in ("item_ids", "scores", "sources"):
        assert first[name].tolist() == second[name].tolist()


def test_a_new_item_is_likened_by_all_that_is_known_of_it_in_however_many_parts_that_came(writer, folder):
    """Without a content tower it gets the vectors of items like it."""
    content = Content.of([{"title": f"{kind} {number}"} for kind in ("red lamp", "blue chair") for number in range(10)])
    vectors = np.repeat(np.eye(2, dtype=np.float32), 10, axis=0)

    def follow() -> LiveItems[SearchedItems]:
        rows = [np.append(array, np.zeros_like(array[:1]), axis=0) for array in (vectors, vectors[:, :1])]
        none = Neighbours(np.full((22, 1), 21, np.int32), np.zeros((22, 1), np.float32))
        search = Search(rows[0], none, np.append(np.ones(20, bool), False))
        history = np.append(rows[1], np.zeros((1, 1), np.float32), axis=0)
        return LiveItems(reader, ItemIndex(np.append(np.arange(20), PAD_ID)), content, SearchedItems(search, history))

    with closing(Reader(folder)) as reader:
        followed = follow()
        for columns in ({"price": 3.0}, {"title": "chair 3, blue"}):
            writer.append(change(ITEM_CHANGED, 1_000, **columns))
            assert followed.refresh()
        started_later = follow()
        assert started_later.refresh()
        for each in (followed, started_later):
            assert each.arrays.search.item_vectors[20].tolist() == [0.0, 1.0]
            assert each.arrays.history[20].tolist() == [0.0]
