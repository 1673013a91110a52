"""What python -m experiments.tiers says of its figures: met, missed, and its exit code. No timings."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments.tiers import __main__ as command
from experiments.tiers.bounds import OF_PART, figures_of
from experiments.tiers.native_device import BLOCK_BYTES, NativeDevice
from perf.report.tables import figure_table
from serving.contract.errors import ArtifactError, ConfigError

GROWN = [
    {"rows": rows, "memory_hit_rate": in_memory, "ratio": ratio, "device_ratio": ratio}
    for rows, in_memory, ratio in ((1_000, 0.95, 1.0), (5_000, 0.944, 1.1), (50_000, 0.96, 1.4))
]
CASES = [
    {"case": case, "ram_share": share, "memory_hit_rate": 0.95, "p99_ratio": ratio}
    for case, share, ratio in (
        ("all in RAM", 1.06, 1.0),
        ("10 % in RAM, waits for misses", 0.099, 2.1),
        ("10 % in RAM, threshold 0.7", 0.08, 9.0),
    )
]
BY_ROUND = {"updated / unread": [1.0, 1.1, 3.0], "updated / quiet": [1.1, 1.3, 1.2], "unread / quiet": [5.0, 5.0, 5.0]}
RESULTS = {
    "hits": [{"kind": "L1", "batch": batch, "of_take": of, "of_take_into": 0.5} for batch, of in ((256, 0.49), (1_024, 0.6))],
    "misses": [{"misses": n, "ratio": ratio, "native_ratio": ratio + 0.5} for n, ratio in ((1, 1.9), (13, 9.0), (64, 3.4))],
    "growth": GROWN,
    "big": CASES,
    "updates": {"visible_p99_ms": 99.0, "rows_per_s_by_round": [9_990, 9_980, 8_000], "p99_ratio_by_round": [1.0, 1.3, 1.1]},
    "kernel": [
        case | {"memory_hit_rate": 0.97, "request_p99_ratio": case["p99_ratio"] - 0.5, "rank_p99_ratio": case["p99_ratio"]}
        for case in CASES
    ]
    + [{"case": "all in RAM, and raw reads", "request_p99_ratio": 1.4, "rank_p99_ratio": 3.3}],
    "large": [
        case | {"ram_share": share, "one_p99_ratio": [1.9, 2.5, 1.0], "half_p99_ratio": [2.1, 1.0, 2.2]}
        for case, share in zip(CASES, (1.06, 0.102, 0.1), strict=True)
    ],
    "served": {
        "visible_p99_ms": 101.0,
        "p99_ratio_by_round": BY_ROUND,
        "errors": {"quiet": 0, "updated": 2},
        "rows_per_s_by_round": {"updated": [9_900.0, 0.0, 0.0]},
    },
}
NAMES = {  # of each part: the figures that are missed, and those that have no bound
    "hits": (
        ["hits: L1, 256 keys, of numpy.take"],
        [f"hits: L1, {keys} keys, of numpy.take into an array that is there" for keys in ("256", "1,024")],
    ),
    "misses": (
        ["misses: time that 1 of the SSD add, over raw reads by native threads"],
        [f"misses: time that 13 of the SSD add, over raw reads by {kind} threads" for kind in ("Python", "native")],
    ),
    "growth": (
        ["growth: 5,000 rows: rows from memory", "growth: look-up, 50,000 rows over 1,000, 95 % hits"],
        [f"growth: raw reads of the missing rows, {rows} rows over 1,000, 95 % hits" for rows in ("5,000", "50,000")],
    ),
    "big": (
        [],
        [
            "big: 10 % in RAM, waits for misses: p99 of a bare look-up over all in RAM",
            "big: 10 % in RAM, threshold 0.7: rows from memory",
            "big: 10 % in RAM, threshold 0.7: p99 of a bare look-up over all in RAM",
        ],
    ),
    "updates": ([], ["updates: p99 of a look-up over that without"]),
    "kernel": (
        [
            "kernel: 10 % in RAM, waits for misses: rows from memory",
        ],
        [
            "kernel: 10 % in RAM, waits for misses: p99 of the rank stage over all in RAM",
            "kernel: 10 % in RAM, threshold 0.7: rows from memory",
            "kernel: 10 % in RAM, threshold 0.7: p99 of a request over all in RAM",
            "kernel: 10 % in RAM, threshold 0.7: p99 of the rank stage over all in RAM",
            "kernel: all in RAM, and raw reads: p99 of a request over all in RAM",
            "kernel: all in RAM, and raw reads: p99 of the rank stage over all in RAM",
        ],
    ),
    "large": (
        [
            "large: 10 % in RAM, waits for misses: RAM, of the rows' bytes",
            "large: 10 % in RAM, waits for misses: p99 of recommend, half of peak, over all in RAM",
        ],
        [
            "large: 10 % in RAM, threshold 0.7: rows from memory",
            "large: 10 % in RAM, threshold 0.7: p99 of recommend, one client, over all in RAM",
            "large: 10 % in RAM, threshold 0.7: p99 of recommend, half of peak, over all in RAM",
        ],
    ),
    "served": (
        ["served: rows updated a second", "served: visible in an answer of rank, p99 ms", "served: failed requests"],
        ["served: p99 of recommend, updated / unread", "served: p99 of recommend, unread / quiet"],
    ),
}


@pytest.mark.parametrize("part", command.PARTS)
def test_every_part_has_its_bounds(part):
    figures = figures_of(part, RESULTS[part])
    missed, unbound = ([figure.name for figure in figures if figure.met is met] for met in (False, None))
    assert (missed, unbound) == NAMES[part]
    assert any(figure.met for figure in figures)


def test_every_part_that_can_be_asked_for_is_judged():
    assert set(OF_PART) == set(command.PARTS)


def test_rounds_are_judged_by_their_median():
    ratio = {figure.name: figure for figure in figures_of("served", RESULTS["served"])}[
        "served: p99 of recommend, updated / quiet"
    ]
    assert (ratio.values, ratio.median, ratio.met) == ([1.1, 1.3, 1.2], 1.2, True)


def test_the_table_has_the_bound_beside_the_figure():
    rows = {
        row.cells[0]: row
        for row in figure_table("x", figures_of("hits", RESULTS["hits"]) + figures_of("served", RESULTS["served"])).rows
    }
    missed = rows["hits: L1, 256 keys, of numpy.take"]
    assert (missed.cells[1:], missed.kept) == (("0.49", "", "at least 0.5", "MISSED"), False)
    met = rows["served: p99 of recommend, updated / quiet"]
    assert (met.cells[1:], met.kept) == (("1.2", "1.1 … 1.3", "at most 1.2", "met"), True)


@pytest.mark.parametrize(("parts", "missed"), [(["updates"], []), (["updates", "hits"], NAMES["hits"][0])])
def test_a_missed_bound_is_the_exit_code(monkeypatch, parts, missed):
    monkeypatch.setattr(command, "measure", lambda part, *_: RESULTS[part])
    done = CliRunner().invoke(command.app, parts)
    assert done.exit_code == bool(missed), done.output
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["missed"] == missed
    assert [document[part] for part in parts] == [RESULTS[part] for part in parts]
    assert ("MISSED" in done.stdout) == bool(missed)


def test_a_repository_that_is_not_there_is_refused_before_anything_is_measured(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(command, "measure", lambda part, *_: asked.append(part))
    done = CliRunner().invoke(command.app, ["hits", "kernel", "--repo", str(tmp_path)])
    assert isinstance(done.exception, ArtifactError)
    assert asked == []


@pytest.mark.parametrize("part", command.OVER_RAM)
def test_a_table_too_small_for_its_share_is_refused_before_anything_is_measured(monkeypatch, part):
    asked = []
    monkeypatch.setattr(command, "measure", lambda part, *_: asked.append(part))
    monkeypatch.setattr(command, "pinned_generation", lambda repo: 1)
    done = CliRunner().invoke(command.app, ["hits", part])
    assert isinstance(done.exception, ConfigError)
    assert asked == []


def test_native_threads_read_the_blocks_they_are_told_to(tmp_path):
    """Each thread keeps the last block that it read."""
    blocks = np.random.default_rng(0).integers(0, 256, (40, BLOCK_BYTES), np.uint8)
    blocks.tofile(tmp_path / "file")
    device = NativeDevice(str(tmp_path / "file"))
    buffers = device._buffers.reshape(-1, BLOCK_BYTES)
    wanted = np.arange(40)[::-1].copy()
    device.read(wanted)
    n_threads = len(buffers)
    last = [share[-1] for share in (wanted[thread::n_threads] for thread in range(n_threads))]
    np.testing.assert_array_equal(buffers, blocks[last])
    device.read(np.array([47]))  # of a file of 40
    np.testing.assert_array_equal(buffers[0], blocks[7])
    device.close()


def test_blocks_that_cannot_be_read_are_an_error(tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 * BLOCK_BYTES))
    device = NativeDevice(str(tmp_path / "file"))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="1 of the raw reads failed"):
        device.read(np.array([1]))
    device.close()
