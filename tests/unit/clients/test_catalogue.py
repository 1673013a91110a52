"""Names and titles that a repository publishes, and the users that `list_users` finds in it."""

from __future__ import annotations

import pytest

from tests.unit.clients.conftest import write_store
from triton_recommender import Catalogue, CatalogueError, CatalogueMissing
from triton_recommender.folder import list_users


def test_the_catalogue_is_that_of_a_named_generation_or_of_the_pinned_one(repo):
    assert Catalogue.load(repo, 2).title(10) == "item 10 [red] café"
    assert Catalogue.load(repo).title(10) == "new item 10 [red] café"
    assert Catalogue.load(repo, 2).title(11) is None
    (repo / "recommend" / "config.pbtxt").write_text("version_policy { specific { versions: 2 } }")  # rolled back
    assert Catalogue.load(repo).title(10) == "item 10 [red] café"
    (repo / "recommend" / "config.pbtxt").write_text("version_policy { specific { versions: 3 } }")
    with pytest.raises(CatalogueMissing):
        Catalogue.load(repo)


def test_names_both_ways(repo):
    catalogue = Catalogue.load(repo)
    assert catalogue.item_names["ten"] == 10
    assert catalogue.item_name(10) == "ten"
    assert catalogue.item_name(30) is None
    assert Catalogue.load(repo, 2).item_name(10) is None  # that generation's ids are numbers


def test_what_is_not_published_is_not_known(repo, tmp_path):
    for load in (lambda: Catalogue.load(repo, 3), lambda: Catalogue.load(tmp_path / "nowhere")):
        with pytest.raises(CatalogueMissing):
            load()
    (repo / "recommend" / "10" / "item_titles.json").unlink()
    assert Catalogue.load(repo).title(10) is None


@pytest.mark.parametrize("place", ["preprocess/10", "recommend/10/preprocess", "preprocess_features/10"])
def test_list_users_go_from_the_most_to_the_least_active(repo, place):
    """This holds in every layout. Only user 7 has a published name."""
    write_store(repo / place, [3, 5, 7, 8, 9], [10, 2, 50, 1, 4])
    assert list_users(repo, 3) == ["ann", "9", "8"]
    assert list_users(repo, 99) == ["ann", "3", "9", "5", "8"]


def test_users_of_no_repository_are_refused(repo, tmp_path):
    with pytest.raises(CatalogueError, match=r"user_ids\.npy cannot be opened"):
        list_users(repo, 3)
    with pytest.raises(CatalogueError):
        list_users(tmp_path / "nowhere", 3)


@pytest.mark.parametrize(
    ("user_ids", "events", "message"),
    [
        ([], [], r"store holds no user; expected one or more\. Export the repository again"),
        ([3, 5], [10], r"event_count\.npy has shape \(2,\); expected \(3,\)\. Export the repository again"),
    ],
)
def test_a_store_that_is_empty_or_cut_short_is_refused(repo, user_ids, events, message):
    write_store(repo / "preprocess" / "10", user_ids, events)
    with pytest.raises(CatalogueError, match=message):
        list_users(repo, 3)


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b'{"ann": 7', "cannot be read: .*delimiter"),
        (b'{"\xe9": 7}', "cannot be read: .*utf-8"),
        (b'["ann"]', r"does not say which id each name has; expected \{name: id\}\."),
        (b'{"ann": [7]}', r"does not say which id each name has; expected \{name: id\}\."),
    ],
)
def test_broken_names_are_refused(repo, written, message):
    write_store(repo / "preprocess" / "10", [3, 7], [10, 2])
    (repo / "recommend" / "10" / "user_names.json").write_bytes(written)
    for read in (lambda: list_users(repo, 3), lambda: Catalogue.load(repo)):
        with pytest.raises(CatalogueError, match=rf"user_names\.json {message}.*Export the repository again"):
            read()


def test_a_document_says_its_generation_as_a_number(repo):
    document = Catalogue.load(repo).as_document()
    assert Catalogue.from_document(document | {"generation": "3"}).generation == 3
    with pytest.raises(CatalogueError, match="the document is no catalogue"):
        Catalogue.from_document(document | {"generation": "third"})
