"""A live store that is moved or removed while it is open acknowledges nothing more."""

from __future__ import annotations

import shutil

import pytest

from serving.contract.errors import DependencyError
from serving.stages.live.measurements import measure_store
from tests.unit.live.batches import START_MS, purchase


@pytest.mark.parametrize("as_another_begins", [False, True])
def test_no_event_is_acknowledged_once_the_store_is_moved_or_removed(writer, folder, as_another_begins):
    """A restarted server would not find it, even if another store was begun in the place of the moved one."""
    writer.append(purchase(7, 1))
    moved = folder.rename(folder.with_name("moved"))
    if as_another_begins:
        shutil.copytree(moved, folder)
    with pytest.raises(DependencyError, match=r"was removed or moved while it was open.* Put it back"):
        writer.append(purchase(7, 2))
    shutil.rmtree(folder, ignore_errors=True)
    moved.rename(folder)
    assert writer.append(purchase(7, 2)).tolist() == [2]
    shutil.rmtree(folder)
    with pytest.raises(DependencyError, match="was removed or moved while it was open"):
        writer.append(purchase(7, 3))


def test_a_removed_store_is_still_measured(writer, folder):
    """Otherwise the metrics of `observe` would end with it, and its log fill with tracebacks."""
    writer.append(purchase(7, 1))
    before = list(measure_store(writer.store, START_MS, 1, ()))
    shutil.rmtree(folder)
    assert list(measure_store(writer.store, START_MS, 1, ())) == before
