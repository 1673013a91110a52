"""Items that are similar to one."""

from __future__ import annotations

import numpy as np
import pytest

from gateway import schema
from serving.contract.artifacts import find_stage_folder


def test_similar_items_are_those_bought_together_then_those_alike(gateway):
    answer = gateway().ask("GET", "/v1/items/3/similar", params={"k": 8}).json()
    schema.Similar.model_validate(answer)
    assert answer["item"]["id"] == 3
    assert answer["known"] is True
    sources = [item["source"] for item in answer["items"]]
    assert len(sources) == 8
    assert sources == sorted(sources)  # bought_together first
    assert 3 not in [item["id"] for item in answer["items"]]
    for source in set(sources):
        scores = [item["score"] for item in answer["items"] if item["source"] == source]
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ("n=5", "There is no parameter 'n'. The parameters are k."),
        ("k=3&exclude=1", "There is no parameter 'exclude'. The parameters are k."),
        ("k=3&k=4", "k is given more than once; expected one value."),
    ],
)
def test_a_parameter_without_effect_is_refused(gateway, query, message):
    response = gateway().ask("GET", f"/v1/items/3/similar?{query}")
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


def test_alike_are_the_items_with_the_nearest_vectors(gateway, repo):
    """Without the last dimension, which is popularity."""
    folder, door = find_stage_folder(repo, "retrieve", 1), gateway()
    ids = np.load(folder / "item_ids.npy")
    vectors = np.load(folder / "item_vectors.npy")[: len(ids), :-1].astype(np.float64)[ids > 0]
    ids = ids[ids > 0]
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = dict(zip(ids.tolist(), unit @ unit[np.searchsorted(ids, 3)], strict=True))
    for _ in range(2):
        items = door.ask("GET", "/v1/items/3/similar", params={"k": 40}).json()["items"]
        alike = {item["id"]: item["score"] for item in items if item["source"] == "similar_vectors"}
        assert alike == pytest.approx({item: cosines[item] for item in alike}, abs=1e-5)
        others = [cosines[item] for item in cosines.keys() - {item["id"] for item in items} - {3}]
        assert min(alike.values()) > max(others, default=-1.0) - 1e-5


def test_nothing_is_similar_to_an_unknown_item(gateway):
    answer = gateway().ask("GET", "/v1/items/999/similar").json()
    assert (answer["known"], answer["items"]) == (False, [])
