"""A request that names items which nobody knows is told so: a mistyped id in `exclude` would let the item be shown."""

from __future__ import annotations

import json

import pytest

from gateway import schema
from tests.unit.gateway.conftest import Gateway, failing


@pytest.mark.parametrize("handler", [lambda query: [3, 1, 2], failing()], ids=["served", "popular items"])
def test_unknown_items_of_each_list_are_named(repo, handler):
    answer = Gateway(repo, handler).recommend(user=7, history="4,999", exclude="1,998,5,997", among="3,996")
    schema.Recommendations.model_validate(answer)
    assert answer["warnings"] == [
        "history names items that are not in the catalogue and have no effect: '999'. Correct the ids.",
        "exclude names items that are not in the catalogue and have no effect: '998', '997'. Correct the ids.",
        "among names items that are not in the catalogue and have no effect: '996'. Correct the ids.",
    ]


def test_known_items_need_no_warning(gateway):
    assert gateway().recommend(user=7, history="4", exclude="1,2")["warnings"] == []
    assert gateway().recommend(user=7)["warnings"] == []


def test_unknown_text_ids_are_named_as_they_were_written(own_repo):
    names = {f"mug {item}": item for item in range(1, 31)}
    (own_repo / "recommend" / "1" / "item_names.json").write_text(json.dumps(names))
    [warning] = Gateway(own_repo).recommend(user=7, exclude="mug 1,UNKNOWN")["warnings"]
    assert "have no effect: 'UNKNOWN'." in warning
