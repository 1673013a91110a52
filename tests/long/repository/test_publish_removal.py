"""Generations that a publication removes, and those that it leaves."""

import json

import pytest

from repository.generations import pin
from repository.publish import Staging, list_versions
from repository.registry import RECORD_FILE, read_acts, record_act, record_publication
from serving.contract.artifacts import (
    MANIFEST_FILE,
)
from serving.contract.errors import ConfigError
from serving.contract.tensors import (
    ENSEMBLE,
    make_stage_specs,
)
from tests.repositories import copy_to_change
from tests.unit.repository.publishing import AXES, publish_once


@pytest.fixture(scope="module")
def first_generation(tmp_path_factory):
    """Return a repository with one generation, to be copied."""
    repository = tmp_path_factory.mktemp("first") / "repo"
    publish_once(repository)
    return repository


@pytest.fixture
def repository(first_generation, tmp_path):
    return copy_to_change(first_generation, tmp_path / "repo")


def test_what_a_running_server_holds_stays(repository):
    for _ in range(3):
        publish_once(repository, find_held=lambda _: {1})
    assert list_versions(repository) == {1, 3, 4}
    publish_once(repository, find_held=lambda _: None)  # a server does not answer
    assert list_versions(repository) == {1, 3, 4, 5}
    publish_once(repository)
    assert list_versions(repository) == {5, 6}


def test_as_many_of_the_newest_generations_stay_as_are_asked_for(repository):
    """Servers on other machines, which this one does not know, need time to move."""
    for _ in range(4):
        publish_once(repository, keep=3)
    assert list_versions(repository) == {3, 4, 5}
    pin(repository, 3)
    (repository / ENSEMBLE / "6").mkdir()  # left by a publication that was killed: no generation
    publish_once(repository, keep=2)
    assert list_versions(repository) == {3, 5, 7}


def test_a_generation_with_a_tag_stays_until_the_tag_is_removed(repository):
    record_act(repository, "tagged", 1, "safe")
    record_act(repository, "tagged", 1, "champion")
    for _ in range(3):
        publish_once(repository)
    assert list_versions(repository) == {1, 3, 4}
    record_act(repository, "untagged", 1, "champion")
    publish_once(repository)
    assert list_versions(repository) == {1, 4, 5}
    record_act(repository, "tagged", 4, "safe")  # a tag that moves releases the generation that had it
    publish_once(repository)
    publish_once(repository)
    assert list_versions(repository) == {4, 6, 7}


def test_what_a_generation_was_is_recorded_when_it_is_removed_if_it_was_not_before(repository):
    """A process that is killed between a publication and its record leaves none."""
    path = repository / ENSEMBLE / "1" / MANIFEST_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sealed_s": 1_700_000_000}))
    publish_once(repository)
    record_publication(repository, 2, "exported from a log")
    publish_once(repository)
    assert list_versions(repository) == {2, 3}
    late = read_acts(repository)[-1]
    assert (late.action, late.generation, late.time_s) == ("published", 1, 1_700_000_000)
    assert late.reason == "recorded late: the publication ended before its record"
    assert late.facts["dataset"] == "none"
    publish_once(repository)
    assert list_versions(repository) == {3, 4}
    assert [act.generation for act in read_acts(repository)] == [2, 1]


def test_a_generation_stays_whose_record_cannot_be_written(repository, caplog):
    publish_once(repository)
    (repository / RECORD_FILE).symlink_to("/dev/full")
    publish_once(repository)
    assert list_versions(repository) == {1, 2, 3}
    assert "older generations stay" in caplog.text
    (repository / RECORD_FILE).unlink()
    publish_once(repository)
    assert list_versions(repository) == {3, 4}


def test_a_record_that_cannot_be_read_is_refused_before_training_and_nothing_is_removed(repository):
    (repository / RECORD_FILE).write_text("{broken\n")
    with Staging(repository) as staging, pytest.raises(ConfigError, match="line 1 is no record"):
        staging.check_contract(make_stage_specs(AXES))
    with pytest.raises(ConfigError, match="line 1 is no record"):
        publish_once(repository)
    assert list_versions(repository) == {1}
