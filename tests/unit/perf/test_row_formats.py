"""What `python -m experiments.quality.row_formats` compares, and when it says that a bound is missed."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from rich.console import Console

from experiments.quality.drops import Drop
from experiments.quality.row_formats import (
    Aucs,
    in_format,
    memory_bytes,
    quality_table,
    row_bytes,
    size_table,
    verdict_of,
    with_rows,
)
from serving.pipeline import Pipeline
from serving.tables.config import TableConfig
from serving.tables.opening import in_memory
from serving.tables.store.row_formats import RowCodec

TABLES = (TableConfig("a", 100, 16), TableConfig("b", 50, 16))


def aucs(rank, pipeline):
    """Of three users, one of whom has nothing to find."""
    return Aucs(np.array([rank - 0.05, np.nan, rank + 0.05]), np.array([pipeline, np.nan, pipeline]))


EXACT = aucs(0.8, 0.9)


def verdict(row_format, *means):
    return verdict_of(TABLES, row_format, aucs(*means), 0.2, EXACT)


def test_bytes_are_those_of_the_stored_rows():
    assert [row_bytes(TABLES, row_format) for row_format in ("fp32", "fp16", "int8", "int4")] == [9600, 4800, 3000, 1800]
    assert verdict("int8", 0.8, 0.8).bytes_share == 0.3125


def test_a_table_in_memory_takes_more_than_its_rows():
    found = verdict("int8", 0.8, 0.8)
    assert found.memory_bytes == memory_bytes(TABLES, "int8") > found.row_bytes
    assert found.memory_share == memory_bytes(TABLES, "int8") / memory_bytes(TABLES, "fp32") > found.bytes_share
    marks = 4 / 8 + 1 / 8  # a sequence number for eight rows, a bit for each
    per_row = {"whole": marks, "hashed": marks + 8 + 1}  # the key and a count of use
    for width, row in {16: 20, 128: 132}.items():
        shares = {"whole": found.whole_share_by_width[width], "hashed": found.hashed_share_by_width[width]}
        for kind, beside in per_row.items():
            assert shares[kind] == pytest.approx((row + beside) / (4 * width + beside), rel=1e-4)


def test_all_kinds_of_bytes_are_shown(capsys):
    Console(width=150).print(size_table([verdict("int8", 0.8, 0.8)]))
    shown = capsys.readouterr().out
    for share in ("31.2%", "at most 32%", "31.9%", "40.2%", "25.8%", "at most 27%"):
        assert share in shown


def test_quality_is_named_after_the_width_of_the_repositorys_tables(capsys):
    narrow = (TableConfig("a", 100, 4), TableConfig("b", 50, 4))
    for tables, widths, told in ((narrow, (4,), "width 4"), (narrow + TABLES, (4, 16), "width 4 and 16")):
        found = verdict_of(tables, "int8", EXACT, 0.2, EXACT)
        assert found.table_widths == widths
        Console(width=200).print(quality_table([found], "a log"))
        shown = capsys.readouterr().out
        assert f"tables, of {told}, evaluation" in shown
        assert f"AUC drop, {told} " in shown


@pytest.mark.parametrize(
    ("row_format", "drop", "met"),
    [("fp32", 0.0, True), ("int8", 0.0005, True), ("int8", 0.0006, False), ("int4", 0.0009, True), ("int4", 0.0011, False)],
)
def test_the_larger_drop_counts(row_format, drop, met):
    for means in ((0.8 - drop, 0.9), (0.81, 0.9 - drop)):
        found = verdict(row_format, *means)
        assert (found.auc_drop.mean, found.auc_drop.low, found.auc_drop.high) == pytest.approx((drop, drop, drop))
        assert replace(found, auc_drop=Drop(round(found.auc_drop.mean, 9), 0.0, 0.0)).met == met


def test_a_format_that_saves_too_little_misses_its_bound():
    found = verdict("int8", 0.8, 0.9)
    assert not replace(found, whole_share_by_width={16: 0.33, 128: 0.26}).met


@dataclass(frozen=True)
class Kernel:
    tables: object


def test_the_ranker_reads_rows_of_that_format(tmp_path):
    rows = np.random.default_rng(0).standard_normal((40, 16), dtype=np.float32)
    np.save(tmp_path / "a.npy", rows)
    pipeline = Pipeline(None, {"rank": Kernel(None)}, {})
    with with_rows(pipeline, in_format(in_memory(tmp_path, "rank"), "int4")) as served:
        got = served.stages["rank"].tables.lookup("a", np.arange(40))
    np.testing.assert_array_equal(got, RowCodec("int4", 16).roundtrip(rows))
