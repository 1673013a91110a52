"""Judging a generation by live events that came without the context columns of the data set, as most shops send them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.continuous.prequential import answer_frozen, answer_live, make_event_inputs
from tests.repositories import FOLLOWED_SETTINGS
from tests.unit.small_shops import CONTEXT, export, shop
from training.dataset import Dataset, load_dataset

KNOWN = 40  # events with a device; the others have none


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Return the folder of a data set with a context column of texts, which its last events lack."""
    folder = tmp_path_factory.mktemp("shop") / "data"
    shop(folder, users=12, items=30, events=60, more=CONTEXT)
    header, *rows = (folder / "events.csv").read_text().splitlines()
    rows[:KNOWN] = [row.removesuffix(",,") + ",téléphone," for row in rows[:KNOWN]]
    (folder / "events.csv").write_text("\n".join([header, *rows, ""]))
    return folder


@pytest.fixture(scope="module")
def dataset(data) -> Dataset:
    return load_dataset(data)


def test_events_without_a_text_of_the_context_are_observed_and_asked_for(data, dataset, tmp_path):
    asked = np.array([KNOWN - 1, KNOWN + 8, KNOWN + 16])
    repository = export(tmp_path, dataset, "fused", **FOLLOWED_SETTINGS)
    frozen = answer_frozen(repository, dataset, asked)
    live = answer_live(repository, dataset, asked, KNOWN - 10, tmp_path / "store")
    assert (frozen.items[:, 0] > 0).all()
    assert (live.items[:, 0] > 0).all()


def test_a_text_of_the_context_is_sent_as_bytes_and_a_missing_one_as_the_empty_text(dataset):
    sent = make_event_inputs(dataset, np.array([KNOWN - 1, KNOWN]))["device"]
    assert sent.tolist() == [["téléphone".encode()], [b""]]
