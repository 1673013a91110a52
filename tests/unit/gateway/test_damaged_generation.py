"""A gateway whose pinned generation is damaged, on a volume that no server can pin anew: as a pod starts after a reboot."""

from __future__ import annotations

import json

import pytest

from serving.contract.errors import ArtifactError
from tests.repositories import copy_generation
from tests.unit.gateway.conftest import Gateway, failing

POPULAR = [5, 4, 3]
DAMAGED = (
    "recommend/1/popular.json",
    "recommend/1/manifest.json",
    "recommend/1/item_ids.npy",
    "preprocess/1/store/user_ids.npy",
)


@pytest.fixture
def two_generations(own_repo):
    """Return a repository that is pinned to generation 1, and whose generation 2 has popular items of its own."""
    copy_generation(own_repo)
    popular = own_repo / "recommend" / "2" / "popular.json"
    popular.unlink()
    popular.write_text(json.dumps(POPULAR))
    return own_repo


def cut_short(path):
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize("name", DAMAGED)
def test_it_answers_with_the_newest_generation_that_it_can_read(two_generations, name):
    cut_short(two_generations / name)
    answer = Gateway(two_generations, failing()).recommend(user=7, k=3)
    assert [item["id"] for item in answer["items"]] == POPULAR
    assert answer["degraded"] == ["gateway_fallback"]


def test_without_another_one_it_says_what_is_damaged(own_repo):
    cut_short(own_repo / "recommend" / "1" / "popular.json")
    with pytest.raises(ArtifactError, match=r"recommend/1/popular\.json"):
        Gateway(own_repo, failing())
