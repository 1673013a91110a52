"""A log that lost most of its events replaces no generation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from export.build import build_repository
from export.settings import Settings
from export.steps.lost_log import refuse_lost_log
from repository.generations import list_published_generations
from serving.contract.errors import ExportError
from serving.contract.tensors import ENSEMBLE
from tests.repositories import copy_small_repository
from tests.unit.small_shops import CONTEXT, shop


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
