"""Shops of a few dozen events, exported whole in a second or two each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from export.build import build_repository
from export.settings import Settings
from tests.present import present
from training.dataset import Dataset, load_dataset
from trials import drift

SETTINGS = {"pipeline": {"recorded_requests": 64}, "training": {"teachers": "one"}}
TOML = """
name = "small"
[interactions]
path = "events.csv"
user_id = "customer"
item_id = "sku"
timestamp = "time"
[items]
path = "items.csv"
item_id = "sku"
continuous = ["unit_price"]
"""
PRICE = 'price = "unit_price"\n'  # item i costs i
CONTEXT = """
[context]
categorical = ["device"]
continuous = ["temperature"]
"""


def shop(folder: Path, users: int, items: int, events: int, more: str = "") -> Dataset:
    """Random purchases, one an hour, of the first half of the items by the first `users` ids; context columns are empty.

    more: further lines of dataset.toml, PRICE or CONTEXT
    """
    rng = np.random.default_rng(0)
    bought = zip(rng.integers(1, users + 1, events), rng.integers(1, max(items // 2, 1) + 1, events), strict=True)
    rows = [f"{user},{item},{1_600_000_000 + 3_600 * hour},," for hour, (user, item) in enumerate(bought)]
    folder.mkdir(parents=True)
    (folder / "events.csv").write_text("\n".join(["customer,sku,time,device,temperature", *rows, ""]))
    (folder / "items.csv").write_text("\n".join(["sku,unit_price", *(f"{item},{item}" for item in range(1, items + 1)), ""]))
    (folder / "dataset.toml").write_text(TOML + more)
    return load_dataset(folder)


def keep_few_columns(dataset: Dataset) -> Dataset:
    """Return a synthetic data set with half of its feature columns, because fitting takes time by the column."""
    described, users, items = dataset.description, present(dataset.description.users), present(dataset.description.items)
    users = users.model_copy(update={"categorical": users.categorical[:1], "continuous": users.continuous[:1]})
    items = items.model_copy(update={"categorical": ["department", "shelf", "brand"], "continuous": ["price"]})
    return replace(dataset, description=described.model_copy(update={"users": users, "items": items}))


@contextmanager
def few_resamples() -> Iterator[None]:
    """Export with rough bounds of drift: exact ones take a third of a small export, and only tests of drift read them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drift, "RESAMPLES", 2_500)
        yield


def export(folder: Path, dataset: Dataset, layout: str = "ensemble", **settings: dict) -> Path:
    """Return a repository in `folder`."""
    repository = folder / "repository"
    with few_resamples():
        build_repository(dataset, repository, Settings.model_validate(SETTINGS | settings), Console(quiet=True), layout)
    return repository
