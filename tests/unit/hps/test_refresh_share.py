"""The share of a cache that HPS refreshes at a time, against HPS's own arithmetic (embedding_cache.cpp of HugeCTR 24.06)."""

from __future__ import annotations

import ctypes

import pytest

from hps_config.description import read_description
from hps_config.planning import plan_levels
from hps_config.ps_writer import build_ps_document

SET_ROWS = 64
DESCRIPTION = """
model = "rank"
[budget]
l1 = "{l1}"
l2 = "64 GiB"
l3 = 0
[serving]
refresh_share = {share}
[[tables]]
name = "items"
rows = {rows}
width = 4
[[tables]]
name = "few"
rows = 70
width = 4
"""


def single(value: float) -> float:
    """-> the value as HPS stores it, a float of 32 bits."""
    return ctypes.c_float(value).value


def count_sets(rows: int, share: float) -> int:
    kept = max(int(single(share) * rows), SET_ROWS)
    return (kept + SET_ROWS - 1) // SET_ROWS


def measure_buffers(sets: int, share: float) -> tuple[int, int, int]:
    """-> rows that the buffers of a refresh hold, and the most that a refresh and the first fill write into them."""
    holds = int(max(float(SET_ROWS), single(single(share) * single(SET_ROWS * sets))))
    refreshed = (holds + SET_ROWS - 1) // SET_ROWS
    filled = max(1, int(single(single(share) * single(sets))))
    return holds, min(refreshed, sets) * SET_ROWS, filled * SET_ROWS


@pytest.mark.parametrize("share", [0.01, 0.2, 0.5, 0.99])
@pytest.mark.parametrize("rows", [1, 65, 200, 1_000, 7_754, 300_001, 20_000_003])
@pytest.mark.parametrize("l1", ["64 MiB", "16 GiB"])
def test_a_refresh_stays_within_its_buffers(tmp_path, rows, share, l1):
    path = tmp_path / "tables.toml"
    path.write_text(DESCRIPTION.format(rows=rows, share=share, l1=l1))
    description = read_description(path)
    (model,) = build_ps_document(description, plan_levels(description.tables, description.budgets))["models"]
    written, cached = model["cache_refresh_percentage_per_iteration"], model["gpucacheper"]
    sets = max(count_sets(table.rows, cached) for table in description.tables)
    holds, refreshed, filled = measure_buffers(sets, written)
    assert max(refreshed, filled) <= holds
    assert 0 < written < 1
    assert abs(written - share) <= max(1 / sets, 0.005)


def test_a_share_of_no_whole_sets_would_overflow():
    """The test above excludes this fault: 20 % of 122 sets are 1,561 rows, and a refresh writes 25 sets."""
    assert measure_buffers(122, 0.2)[:2] == (1_561, 1_600)
