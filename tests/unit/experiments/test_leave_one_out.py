"""Leave one out refuses logs that leave nothing to find."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from experiments.leave_one_out import Measured, measure
from serving.contract.errors import DataError
from training.dataset import load_dataset


def test_a_log_with_one_event_per_user_is_refused(tmp_path):
    dataset = load_dataset("synthetic:tiny")
    once = dataset.interactions.drop_duplicates("user_id", ignore_index=True)
    with pytest.raises(DataError, match=r"no user has 3 events.* Leave one out needs users with at least 3 events"):
        measure(replace(dataset, interactions=once), [0], Measured(tmp_path / "measured.json"), Console(quiet=True))
