"""The shop's data set, with and without its live events, and repositories of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.repositories import FOLLOWED_DATA, followed_shop
from tests.unit.small_shops import few_resamples
from training.dataset import Dataset, load_dataset


@pytest.fixture(autouse=True, scope="module")
def rough_bounds() -> Iterator[None]:
    with few_resamples():
        yield


@pytest.fixture(scope="module")
def past() -> Dataset:
    return load_dataset(followed_shop() / "data")


@pytest.fixture(scope="module")
def whole(past) -> Dataset:
    """Return the data set with the last third of the log, which the tests send as live events."""
    return replace(past, interactions=load_dataset(FOLLOWED_DATA).interactions[past.interactions.columns])


@pytest.fixture(scope="module")
def exported() -> Path:
    return followed_shop() / "repository"


@pytest.fixture
def repo(exported, tmp_path) -> Path:
    return Path(shutil.copytree(exported, tmp_path / "model_repository"))
