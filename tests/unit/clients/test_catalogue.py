"""What the repository publishes for people."""

from __future__ import annotations

from clients import Catalogue


def test_a_generation_or_the_one_that_answers(repo):
    assert Catalogue.load(repo, 2).title(10) == "item 10 [red] café"
    assert Catalogue.load(repo).title(10) == "new item 10 [red] café"
    assert Catalogue.load(repo, 2).title(11) is None
    (repo / "recommend" / "config.pbtxt").write_text("version_policy { specific { versions: 2 } }")  # moved back
    assert Catalogue.load(repo).title(10) == "item 10 [red] café"
    (repo / "recommend" / "config.pbtxt").write_text("version_policy { specific { versions: 3 } }")
    assert Catalogue.load(repo) is None


def test_names_both_ways(repo):
    catalogue = Catalogue.load(repo)
    assert catalogue.item_names["ten"] == 10
    assert catalogue.item_name(10) == "ten"
    assert catalogue.item_name(30) is None
    assert Catalogue.load(repo, 2).item_name(10) is None  # that generation's ids are numbers


def test_what_is_not_published_is_not_known(repo, tmp_path):
    assert Catalogue.load(repo, 3) is None
    assert Catalogue.load(tmp_path / "nowhere") is None
    (repo / "recommend" / "10" / "item_titles.json").unlink()
    assert Catalogue.load(repo).title(10) is None
