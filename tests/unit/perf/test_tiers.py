"""perf.tiers: what it measures is what it says: keys, budgets, rates."""

from __future__ import annotations

import itertools
import threading
import time

import numpy as np
import pytest

from perf.tiers import feed
from perf.tiers.big import RAM_SHARE, cases_of, shares
from perf.tiers.kernel import ItemRows
from perf.tiers.traffic import TABLE, WIDTH, resident_keys, seconds_per_call, tiers_over, write_table, zipf_keys
from stages.embeddings.config import TableConfig
from stages.embeddings.metrics import TableCounts
from stages.embeddings.table import l1_sections, l2_sections


def test_keys_follow_zipfs_law():
    keys = zipf_keys(1_000, 1.0, (400, 1_000), np.random.default_rng(0))
    counts = np.bincount(keys.ravel(), minlength=1_000)
    assert counts[0] / counts[9] == pytest.approx(10, rel=0.1)
    assert (counts > 0).all()


@pytest.mark.parametrize("rows", [50_000, 50_000_000])
def test_no_case_takes_more_than_its_share_of_memory(rows):
    whole, *partial = (levels for _, levels in cases_of(rows, WIDTH).values())
    assert whole["l2_rows"] == rows
    for levels in partial:
        table = TableConfig(TABLE, rows, WIDTH, **levels)
        nbytes = bool(table.l1_rows) * l1_sections(table).nbytes + bool(table.l2_rows) * l2_sections(table).nbytes
        assert 0.7 * RAM_SHARE < nbytes / (rows * 4 * WIDTH) <= RAM_SHARE


def test_shares_are_of_the_rows_between_two_snapshots():
    before, after = TableCounts(100, 50, 20, 30), TableCounts(200, 100, 60, 33, late=7)
    assert shares(before, after) == {"memory_hit_rate": 0.9, "late": 0.07}


def test_the_tables_rows_are_served_and_those_in_memory_known(tmp_path):
    source = write_table(tmp_path, 2_000, np.random.default_rng(0))
    rows = np.load(f"{source}/{TABLE}.npy")
    with tiers_over(2_000, source, l2_rows=500) as tiers:
        resident = resident_keys(tiers, 2_000)
        before = tiers.metrics().tables[TABLE].counts
        np.testing.assert_array_equal(tiers.lookup(TABLE, resident), rows[resident])
        after = tiers.metrics().tables[TABLE].counts
    assert 250 < len(resident) <= 500
    assert after.l2_hits - before.l2_hits == len(resident)


def test_every_request_of_the_larger_catalogue_has_its_own_keys():
    rows, keys = np.arange(12).reshape(4, 3), np.array([[900, 901], [902, 903]])
    item_rows, candidates = ItemRows(rows, keys), np.array([[3, 1]])
    for expected in itertools.islice(itertools.cycle(keys), 3):
        np.testing.assert_array_equal(item_rows[candidates], [[[expected[0], 10, 11], [expected[1], 4, 5]]])


def test_ways_are_called_with_every_request():
    seen = {"one": [], "other": []}
    ways = {name: calls.append for name, calls in seen.items()}
    assert seconds_per_call(ways, np.arange(6).reshape(2, 3), repeats=2).keys() == seen.keys()
    assert [len(calls) for calls in seen.values()] == [4, 4]


def test_ticks_wait_for_the_word_and_end_with_it():
    go, stop, ticked = threading.Event(), threading.Event(), []
    ticking = threading.Thread(target=lambda: ticked.extend(feed.ticks(go, stop)))
    ticking.start()
    time.sleep(3 / feed.PARTS_PER_S)
    assert ticked == []
    go.set()
    time.sleep(5 / feed.PARTS_PER_S)
    stop.set()
    ticking.join(5)
    assert ticked == list(range(1, len(ticked) + 1))
    assert ticked
