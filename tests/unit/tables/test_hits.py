"""The compiled pass of a look-up against numpy, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import TypingError

from serving.tables.store import hits
from serving.tables.store.row_formats import RowCodec
from tests.present import present
from tests.unit.tables import hits_oracle
from tests.unit.tables.slot_tables import Table, make_table

FORMATS = ("fp32", "fp16", "int8", "int4")
WIDTHS = (1, 2, 4, 5, 7, 8, 9, 12, 16, 19, 32)
N_ROWS = 200
SOME = np.ones((8, 8), np.float32)
QUIET = np.zeros(hits.HEADER_WORDS, np.int64)  # a header: nobody writes, no row is missing


def some_rows(codec: RowCodec, n_rows: int, rng: np.random.Generator) -> np.ndarray:
    """Stored rows: large and subnormal values, rows of one value, negative and zero."""
    vectors = rng.standard_normal((n_rows, codec.width)).astype(np.float32)
    vectors *= (10.0 ** rng.integers(-8, 4, n_rows)).astype(np.float32)[:, None]
    vectors[0], vectors[1], vectors[2] = 0, -0.0, vectors[2, :1]
    return codec.encode(vectors)


def bits(vectors: np.ndarray) -> np.ndarray:
    return vectors.view(np.uint32)


@pytest.mark.parametrize("row_format", FORMATS)
def test_rows_are_decoded_as_by_numpy(row_format):
    for width in WIDTHS:
        codec, rng = RowCodec(row_format, width), np.random.default_rng(width)
        stored = some_rows(codec, N_ROWS, rng)
        slots = rng.integers(-1, N_ROWS, 500)
        vectors = np.full((len(slots), width), 7, np.float32)
        expected = hits_oracle.decode_rows(codec, stored, slots, vectors)
        hits.decode_rows(codec.view_plain(stored), slots, vectors)
        np.testing.assert_array_equal(bits(vectors), bits(expected), err_msg=f"width {width}")


def test_every_finite_float16():
    halves = np.arange(1 << 16).astype(np.uint16).view(np.float16)
    halves = halves[np.isfinite(halves)][:, None]
    vectors = np.empty(halves.shape, np.float32)
    assert hits.read_complete(QUIET, halves.view(np.uint16), np.arange(len(halves)), vectors) == hits.ALL_THERE
    np.testing.assert_array_equal(bits(vectors), bits(halves.astype(np.float32)))


@pytest.mark.parametrize("row_format", FORMATS)
def test_a_complete_table_refuses_keys_outside(row_format):
    codec = RowCodec(row_format, 16)
    stored = some_rows(codec, N_ROWS, np.random.default_rng(0))
    for asked in ([], [0, N_ROWS - 1], [N_ROWS], [3, -1], [-(2**63)], [2**63 - 1]):
        keys = np.array(asked, np.int64)
        vectors = np.zeros((len(keys), 16), np.float32)
        there = bool(((keys >= 0) & (keys < N_ROWS)).all())
        state = hits.read_complete(QUIET, codec.view_plain(stored), keys, vectors)
        assert state == (hits.ALL_THERE if there else hits.SOME_MISSING)
        if there:
            np.testing.assert_array_equal(bits(vectors), bits(codec.decode(stored[keys])))


def filled(kind: str, codec: RowCodec, size: int, keys: np.ndarray) -> tuple[Table, dict[str, np.ndarray]]:
    """Return a table that was asked to hold `keys`, and the arrays of its memory by name."""
    table, memory = make_table(kind, codec, size)
    with table.writing():
        table.insert(keys, some_rows(codec, len(keys), np.random.default_rng(1)))
    return table, memory


keys_asked = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 130), max_size=60)


@pytest.mark.parametrize("row_format", FORMATS)
@given(held=st.lists(st.integers(0, 125), min_size=3, max_size=100, unique=True), asked=keys_asked)
def test_a_cached_table_reads_what_numpy_reads(row_format, held, asked):
    codec = RowCodec(row_format, 11)
    (table, memory), keys = filled("cached", codec, 64, np.array(held, np.int64)), np.array(asked, np.int64)
    owner, uses = memory["owner"], memory["uses"]
    expected = hits_oracle.find_cached(owner, keys)
    np.testing.assert_array_equal(np.isin(keys, owner[owner != hits.NO_KEY]), expected >= 0)
    decoded = hits_oracle.decode_rows(codec, memory["rows"], expected, np.zeros((len(keys), 11), np.float32))
    for _ in range(2):  # the first reads count as uses
        counted = hits_oracle.count_uses(uses, expected)
        vectors, missing = table.read(keys)
        np.testing.assert_array_equal(np.zeros(len(keys), bool) if missing is None else missing, expected < 0)
        np.testing.assert_array_equal(bits(vectors[expected >= 0]), bits(decoded[expected >= 0]))
    np.testing.assert_array_equal(uses, counted)


def test_a_read_of_many_keys_is_that_of_its_parts():
    """More than are asked of memory at once, in one part of them all there, in another some missing."""
    codec, rng = RowCodec("fp32", 16), np.random.default_rng(7)
    table, _ = filled("cached", codec, 4096, np.arange(2000))
    inserted = np.arange(2000)
    _, gone = table.read(inserted)  # thrown out by those of their set that came later
    held = inserted if gone is None else inserted[~gone]
    keys = np.concatenate([rng.choice(held, hits.PREFETCHED_ROWS), rng.integers(0, 5000, 2 * hits.PREFETCHED_ROWS - 11)])
    vectors, missing = table.read(keys)
    parts = [table.read(keys[at : at + 7]) for at in range(0, len(keys), 7)]
    lacking = np.concatenate([np.zeros(len(rows), bool) if part is None else part for rows, part in parts])
    np.testing.assert_array_equal(present(missing), lacking)
    assert not lacking[: hits.PREFETCHED_ROWS].any()
    assert lacking.any()
    np.testing.assert_array_equal(bits(vectors[~lacking]), bits(np.concatenate([rows for rows, _ in parts])[~lacking]))


def states(header: np.ndarray, vectors: np.ndarray) -> list[int]:
    """Return the results of both passes for the row in slot 3, each under the present header."""
    rows, keys, uses, before = np.ones((8, 16), np.float32), np.array([3]), np.zeros(8, np.uint8), header.copy()
    said, reads = [], 5
    for read, *parts in (
        (hits.read_complete_at,),
        (hits.read_cached_at, np.arange(8), uses),
    ):
        header[:] = before
        words = hits.describe_table(header, rows, *parts)
        words[hits.READS] = reads
        said.append(read(words.ctypes.data, rows.dtype, keys, vectors))
        assert words[hits.READS] == (reads + 1 if parts else reads)  # nothing was missed
    return said


def test_what_is_read_while_somebody_writes_is_not_believed():
    header, vectors = QUIET.copy(), np.empty((1, 16), np.float32)
    assert states(header, vectors) == [hits.ALL_THERE] * 2
    header[hits.EPOCH] = 7
    assert states(header, vectors) == [hits.UNSETTLED] * 2


def test_what_was_written_while_it_was_read_is_not_believed():
    header = QUIET.copy()
    header_as_answer = header.view(np.float32).reshape(1, 16)  # the pass itself changes the epoch, between its two looks
    assert states(header, header_as_answer) == [hits.UNSETTLED] * 2


def test_a_complete_table_with_a_hole_is_not_read_blindly():
    header = QUIET.copy()
    header[hits.HOLES] = 1
    assert hits.read_complete(header, SOME, np.array([3]), np.empty((1, 8), np.float32)) == hits.SOME_MISSING


def test_reads_count_as_uses_after_a_miss_and_now_and_then():
    table, memory = filled("cached", RowCodec("fp32", 16), 64, np.arange(8))
    held = memory["owner"][memory["owner"] != hits.NO_KEY]
    asked, slot = held[:1].copy(), int(np.flatnonzero(memory["owner"] == held[0])[0])

    def counted(reads: int) -> int:
        before = int(memory["uses"][slot])
        for _ in range(reads):
            table.read(asked)
        return int(memory["uses"][slot]) - before

    assert counted(hits.COUNTED_AFTER_MISS) == hits.COUNTED_AFTER_MISS  # of a table's first reads
    assert counted(3 * hits.COUNTED_EVERY) == 3
    table.read(np.array([110]))
    assert counted(hits.COUNTED_AFTER_MISS) == hits.COUNTED_AFTER_MISS
    assert counted(2 * hits.COUNTED_EVERY) == 2


def test_uses_count_once_a_read_and_end_at_the_most():
    uses = np.array([0, 254, 255, 9], np.uint8)
    hits.count_uses(uses, np.array([0, 1, 0, 2, -1, 1, 0]))
    assert uses.tolist() == [1, 255, 255, 9]


@pytest.mark.parametrize("row_format", FORMATS)
@pytest.mark.parametrize("kind", ["complete", "cached"])
def test_a_read_while_somebody_writes_gives_the_same_values(row_format, kind):
    """The slow way, slot by slot, that a read goes when the table's epoch is odd."""
    table, _ = filled(kind, RowCodec(row_format, 16), 64 if kind == "cached" else 50, np.arange(40))
    asked = np.array([3, 3, 39, 45, 0, -7, 99])
    vectors, missing = table.read(asked)
    with table.writing():
        slow, slow_missing = table.read(asked)
    is_missing = present(missing)
    np.testing.assert_array_equal(is_missing, present(slow_missing))
    np.testing.assert_array_equal(bits(vectors[~is_missing]), bits(slow[~is_missing]))
    assert is_missing.tolist()[3:] == [True, False, True, True]


@pytest.mark.parametrize(
    ("read", "array"),
    [
        (lambda array: hits.find_cached(array, SOME, np.array([1]), np.empty(1, np.int64)), np.arange(8, dtype=np.int32)),
        (lambda array: hits.decode_rows(np.ones((1, 8), np.float32), np.array([0]), array), np.empty((1, 8))),
        (
            lambda array: hits.decode_rows(array, np.array([0]), np.empty((1, 8), np.float32)),
            np.ones((8, 8), np.float32, order="F"),
        ),
    ],
    ids=["owners of int32", "vectors of float64", "rows by column"],
)
def test_arrays_that_lanes_cannot_read_are_refused(read, array):
    with pytest.raises(TypingError, match="lanes cannot read"):
        read(array)
