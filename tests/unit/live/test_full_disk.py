"""A full disk refuses events with a coded error; what was acknowledged stays, and goes on when there is room again."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from serving.contract.errors import DependencyError
from serving.live.layout import Layout
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS, events


@pytest.fixture
def fill_disk():
    """fill_disk(folder): files of this process may not grow beyond the largest one there. The limit is lifted afterwards."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(folder: Path) -> None:
        largest = max(path.stat().st_size for path in folder.iterdir())
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, hard))

    yield fill
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_refuses_events_and_loses_none(tmp_path, fill_disk):
    folder, rng, acknowledged = tmp_path / "shop.live", np.random.default_rng(0), []
    writer = Writer(folder, Layout(), KINDS.names)

    def append() -> None:
        batch = events(rng, 200, users=2_000, ids=True)
        acknowledged.append((batch, writer.append(batch)))

    def append_for_ever() -> None:
        while True:
            append()

    append()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    fill_disk(folder)
    with pytest.raises(DependencyError, match="cannot be written"):
        append_for_ever()
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    append()
    writer.close()
    writer = Writer(folder, Layout(), KINDS.names)
    for batch, sequences in acknowledged:  # sent again, each has the sequence that was acknowledged
        np.testing.assert_array_equal(writer.append(batch), sequences)
    writer.close()
