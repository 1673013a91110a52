"""A log that lost most of its events, or whose ids are of another kind, replaces no generation."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from export.build import build_repository
from export.settings import Settings
from export.steps.lost_log import describe_other_shop, refuse_lost_log, refuse_other_ids
from repository.generations import list_published_generations
from repository.publish import Staging
from serving.contract.errors import ExportError
from serving.contract.tensors import ENSEMBLE
from tests.repositories import copy_small_repository
from tests.unit.small_shops import CONTEXT, shop
from training.dataset import load_dataset


@pytest.fixture
def repository(tmp_path):
    return copy_small_repository(tmp_path / "repository")


@pytest.fixture
def dataset(tmp_path):
    """As tests/repositories.py exports it."""
    return shop(tmp_path / "data", users=12, items=30, events=60, more=CONTEXT)


def cut_off(dataset, events):
    return replace(dataset, interactions=dataset.interactions.head(events))


def test_the_export_is_refused_before_it_trains(repository, dataset):
    learned = len(dataset.interactions)
    said = rf"has {learned // 2 - 1} events; generation 1 of .* learned from {learned}, and at least 50% .*make export REPO="
    with pytest.raises(ExportError, match=said):
        build_repository(cut_off(dataset, learned // 2 - 1), repository, Settings(), Console(quiet=True))
    assert list_published_generations(repository) == (1,)


def test_half_of_the_log_another_log_or_a_new_repository_may_be_exported(repository, dataset, tmp_path):
    refuse_lost_log(cut_off(dataset, -(-len(dataset.interactions) // 2)), repository)
    one = cut_off(dataset, 1)
    refuse_lost_log(one, tmp_path / "new")
    refuse_lost_log(replace(one, description=dataset.description.model_copy(update={"name": "other"})), repository)


def test_a_damaged_generation_is_no_reason_to_refuse_what_mends_it(repository, dataset):
    (repository / ENSEMBLE / "1" / "manifest.json").write_text("{")
    refuse_lost_log(cut_off(dataset, 1), repository)


def test_an_export_over_another_shops_generation_warns_before_it_trains(repository, dataset):
    other = replace(dataset, description=dataset.description.model_copy(update={"name": "other"}))
    warning = describe_other_shop(other, repository)
    assert "generation 1 of" in warning
    assert "of the data set 'small'. The new one will be of 'other'" in warning
    assert describe_other_shop(dataset, repository) == describe_other_shop(other, repository.parent / "new") == ""
    said = StringIO()
    with Staging(repository), pytest.raises(ExportError, match="Another export is writing"):  # so that nothing is trained
        build_repository(other, repository, Settings(), Console(file=said, width=400))
    assert f"warning: {warning}" in said.getvalue()


def load_with(folder, user, item):
    """Return the shop with one more event."""
    with (folder / "data" / "events.csv").open("a") as log:
        log.write(f"{user},{item},1600000000,,\n")
    return load_dataset(folder / "data")


@pytest.mark.parametrize(("user", "item", "fact"), [("1", "15B", "item ids .* '15B'"), ("C-1", "1", "user ids .* 'C-1'")])
def test_one_mistyped_id_that_would_change_all_of_them_is_refused(repository, dataset, tmp_path, user, item, fact):
    with pytest.raises(ExportError, match=rf"The {fact}, and were integers in generation 1 of .*make export REPO="):
        build_repository(load_with(tmp_path, user, item), repository, Settings(), Console(quiet=True))
    assert list_published_generations(repository) == (1,)


def test_text_ids_that_became_integers_are_refused(repository, dataset):
    (repository / ENSEMBLE / "1" / "item_names.json").write_text('{"15B": 1}')
    with pytest.raises(ExportError, match=r"item ids of small are integers now, and were text in generation 1"):
        refuse_other_ids(dataset, repository)


def test_text_ids_of_another_shop_or_in_a_new_repository_may_be_exported(repository, dataset, tmp_path):
    texts = load_with(tmp_path, "C-1", "15B")
    refuse_other_ids(texts, tmp_path / "new")
    refuse_other_ids(replace(texts, description=texts.description.model_copy(update={"name": "other"})), repository)
    refuse_other_ids(dataset, repository)
