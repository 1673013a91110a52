"""Compiled loops for look-ups that hit: find the row of each key and decode its values into the answer.

Writers may change the memory meanwhile. Then the result is wrong, but the loop stays within its arrays, and it reports the
change by comparing the table's epoch before and after (slots.py has the protocol).

These loops keep the GIL: they take microseconds, and a thread that got it in between might keep it for milliseconds.

Stored rows are passed as `RowCodec.view_plain` gives them: float32 (fp32), uint16 (fp16), uint8 (int8 and int4).
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import carray, types
from numba.extending import overload, register_jitable

from serving.loops.compiled import compiled
from serving.loops.read_ahead import prefetch
from serving.tables.store.lanes import (
    LANES,
    copy_eight,
    copy_four,
    find_in_eight,
    make_pointer,
    read_four,
    read_in_order,
    scale_eight,
    scale_eight_halves,
)
from serving.tables.store.row_formats import SCALE_BYTES

EPOCH, HOLES = 0, 1  # words of a table's header
HEADER_WORDS = 8
HEADER, READS, ROWS, OWNERS, USES, WORDS = 0, 1, 2, 5, 7, 9  # of `describe_table`
ALL_THERE, SOME_MISSING, UNSETTLED = 0, 1, -1  # UNSETTLED: a writer was active
PREFETCHED_ROWS = 1024  # before the first of them is decoded: 64 KiB of a core's cache
ROWS_AHEAD = 16  # from the row that is decoded to the row that is prefetched
WIDE, NARROW = 2 * LANES, LANES // 2  # row widths of the ranker: unrolled, they take half the time
WAYS = LANES  # slots of a set
NO_KEY = -1  # reserved by HPS, so no row has it
MOST_USES = 255
# LFU counts: COUNTED_AFTER_MISS reads count after one that missed a row, then one in COUNTED_EVERY.
# Up to 7 points of hit rate above LRU on Zipf traces and real logs; below it when all
# popularity changes at once.
COUNTED_AFTER_MISS = 8
COUNTED_EVERY = 8
MIX = np.uint64(0x9E3779B97F4A7C15)
THIRTY_TWO = np.uint64(32)
compiled_with_gil = partial(compiled, nogil=False)
FP16_TO_FP32 = np.float32(2.0**112)  # difference of the exponent biases, 127 - 15


@compiled_with_gil
def read_complete(header, rows, keys, vectors):
    """Read a complete table. Return ALL_THERE, SOME_MISSING or UNSETTLED; unless ALL_THERE, `vectors` are undefined.

    header: int64 [HEADER_WORDS] of the table; vectors: float32 [N, D], written
    """
    epoch = read_in_order(header, EPOCH)
    if epoch & 1:
        return UNSETTLED
    if header[HOLES] != 0:
        return SOME_MISSING
    for n in range(len(keys)):
        if np.uint64(keys[n]) >= np.uint64(len(rows)):  # negative keys wrap to huge ones
            return SOME_MISSING
        _prefetch_row(rows, keys[min(n + ROWS_AHEAD, len(keys) - 1)])
        decode_row(rows, keys[n], vectors, n)
    return ALL_THERE if read_in_order(header, EPOCH) == epoch else UNSETTLED


@compiled_with_gil
def read_cached(header, owner, uses, counted, rows, keys, vectors):
    """Read a cached table: `find_cached`, decode, and `count_uses` if `counted`. Return as `read_complete`.

    vectors: float32 [N, D], written where a row exists
    """
    epoch = read_in_order(header, EPOCH)
    if epoch & 1:
        return UNSETTLED
    slots, missing = np.empty(len(keys), np.int64), 0
    for start in range(0, len(keys), PREFETCHED_ROWS):
        some = slice(start, start + PREFETCHED_ROWS)
        n_missing = find_cached(owner, rows, keys[some], slots[some])
        _decode_found(rows, slots[some], vectors[some], n_missing)
        missing += n_missing
    if counted:
        count_uses(uses, slots)
    return _check_state(header, epoch, missing)


@compiled_with_gil
def read_complete_at(table, dtype, keys, vectors):
    """Run `read_complete` on a table. table: address of its `describe_table`; dtype: of the stored rows"""
    return read_complete(_view_header(table), _view_rows(table, dtype), keys, vectors)


@compiled_with_gil
def read_cached_at(table, dtype, keys, vectors):
    """Run `read_cached` on the table at an address. Count uses by COUNTED_AFTER_MISS and COUNTED_EVERY."""
    counted, owner = _count_read(table), _view_array(table, OWNERS, np.int64)
    return _note_misses(
        table, read_cached(_view_header(table), owner, _view_uses(table), counted, _view_rows(table, dtype), keys, vectors)
    )


def describe_table(header, rows, *parts):
    """Return a description of a table, int64 [WORDS].

    Its words are the address of `header`; the reads since the last miss; address, length and columns of the stored rows; then
    address and length of each of `parts`: the owners (int64) and the uses (uint8) of the slots.

    Passing one address instead of arrays saves numba's unboxing, which costs as much as 20 rows per array. The caller must
    keep the words and the arrays alive.
    """
    words = np.zeros(WORDS, np.int64)
    words[[HEADER, ROWS, ROWS + 1, ROWS + 2]] = header.ctypes.data, rows.ctypes.data, *rows.shape
    for n, part in zip((OWNERS, USES), parts, strict=False):  # a complete table has no parts
        words[n : n + 2] = part.ctypes.data, len(part)
    return words


@register_jitable
def _count_read(table):
    """Count a read and return whether its uses are counted."""
    words = _view_words(table)
    words[READS] += 1
    return words[READS] % COUNTED_EVERY == 0 or words[READS] <= COUNTED_AFTER_MISS


@register_jitable
def _note_misses(table, state):
    """Start the count of reads since the last miss again, if a row was missing. Return `state`."""
    if state == SOME_MISSING:
        _view_words(table)[READS] = 0
    return state


@register_jitable
def _view_header(table):
    return carray(make_pointer(_view_words(table)[HEADER]), (HEADER_WORDS,), np.int64)


@register_jitable
def _view_rows(table, dtype):
    words = _view_words(table)
    return carray(make_pointer(words[ROWS]), (words[ROWS + 1], words[ROWS + 2]), dtype)


@register_jitable
def _view_uses(table):
    return _view_array(table, USES, np.uint8)


@register_jitable
def _view_array(table, n, dtype):
    words = _view_words(table)
    return carray(make_pointer(words[n]), (words[n + 1],), dtype)


@register_jitable
def _view_words(table):
    return carray(make_pointer(table), (WORDS,), np.int64)


@register_jitable
def _check_state(header, epoch, missing):
    """Return the state of a finished read. epoch: that of its begin"""
    if read_in_order(header, EPOCH) != epoch:
        return UNSETTLED
    return SOME_MISSING if missing else ALL_THERE


@compiled
def find_cached(owner, rows, keys, slots):
    """Write the slots of keys, int64 [N], -1 where missing, and return how many are missing. Prefetch the found rows.

    owner: int64 [capacity] key of each slot; rows: stored, [capacity, columns]
    """
    missing, n_sets = 0, np.uint64(len(owner) // WAYS)
    for n in range(len(keys)):
        hashed = (np.uint64(keys[n]) * MIX) >> THIRTY_TWO
        first = np.int64((hashed * n_sets) >> THIRTY_TWO) * WAYS
        slots[n] = first + find_in_eight(owner, first, keys[n])
        _prefetch_row(rows, slots[n])
        if slots[n] == first + WAYS or keys[n] == NO_KEY:  # rare, so a branch is a tenth faster
            slots[n] = -1
            missing += 1
    return missing


@register_jitable
def _decode_found(rows, slots, vectors, missing):
    """Run `decode_rows` on prefetched rows; `missing` of the slots are -1."""
    for n in range(len(slots)):
        if missing == 0 or slots[n] >= 0:
            decode_row(rows, slots[n], vectors, n)


@compiled
def count_uses(uses, slots):
    """Count one use of each distinct row that was read. uses: uint8 [capacity]; slots: int64 [N]."""
    before = np.empty(len(slots), np.uint8)
    for n in range(len(slots)):
        before[n] = uses[slots[n]] if slots[n] >= 0 else MOST_USES
    for n in range(len(slots)):
        if before[n] < MOST_USES:
            uses[slots[n]] = before[n] + 1


@compiled
def decode_rows(rows, slots, vectors):
    """Decode row `slots[n]` into vectors[n], float32 [N, D]; skip slots of -1. slots: int64 [N]."""
    for n in range(len(slots)):
        _prefetch_row(rows, slots[min(n + ROWS_AHEAD, len(slots) - 1)])
        if slots[n] >= 0:
            decode_row(rows, slots[n], vectors, n)


@register_jitable(inline="always")
def _prefetch_row(rows, row):
    """Prefetch the first cache line of a row. Prefetching a missing row is harmless."""
    prefetch(rows, row * rows.shape[1] * rows.itemsize)


def decode_row(rows, row, vectors, n):
    """Decode a stored row into vectors[n], by the dtype of `rows` (one of the functions below)."""
    raise NotImplementedError


@overload(decode_row, inline="always")  # a call would push sixteen words of array headers per row
def _choose_decoder(rows, row, vectors, n):
    return {types.float32: _decode_fp32, types.uint16: _decode_fp16, types.uint8: _decode_codes}[rows.dtype]


def _decode_fp32(rows, row, vectors, n):
    width, column = vectors.shape[1], 0
    if width == WIDE:
        copy_eight(rows, row * WIDE, vectors, n * WIDE)
        copy_eight(rows, row * WIDE + LANES, vectors, n * WIDE + LANES)
        return
    if width == NARROW:
        copy_four(rows, row * NARROW, vectors, n * NARROW)
        return
    while column + LANES <= width:  # twice as fast as a range with a step
        copy_eight(rows, row * width + column, vectors, n * width + column)
        column += LANES
    while column < width:
        vectors[n, column] = rows[row, column]
        column += 1


def _decode_fp16(rows, row, vectors, n):
    for column in range(vectors.shape[1]):
        vectors[n, column] = _widen_half(rows[row, column])


def _decode_codes(rows, row, vectors, n):
    width, columns = vectors.shape[1], rows.shape[1]
    codes = columns - SCALE_BYTES
    scales = read_four(rows, row * columns + codes)
    scale, offset = _widen_half(scales), _widen_half(scales >> 16)
    if codes == width:  # int8; also int4 of one column, whose high half is 0
        _decode_bytes(rows, row * columns, vectors, n * width, width, scale, offset)
    else:
        _decode_halves(rows, row * columns, vectors, n * width, width, scale, offset)


@register_jitable(inline="always")
def _decode_bytes(rows, place, vectors, n, width, scale, offset):
    if width == WIDE:
        scale_eight(rows, place, vectors, n, scale, offset)
        scale_eight(rows, place + LANES, vectors, n + LANES, scale, offset)
        return
    column = 0
    while column + LANES <= width:
        scale_eight(rows, place + column, vectors, n + column, scale, offset)
        column += LANES
    while column < width:
        vectors.reshape(-1)[n + column] = np.float32(rows.reshape(-1)[place + column]) * scale + offset
        column += 1


@register_jitable(inline="always")
def _decode_halves(rows, place, vectors, n, width, scale, offset):
    if width == WIDE:
        scale_eight_halves(rows, place, vectors, n, scale, offset)
        scale_eight_halves(rows, place + LANES // 2, vectors, n + LANES, scale, offset)
        return
    column = 0
    while column + LANES <= width:
        scale_eight_halves(rows, place + (column >> 1), vectors, n + column, scale, offset)
        column += LANES
    while column < width:
        code = rows.reshape(-1)[place + (column >> 1)] >> (4 * (column & 1)) & 15
        vectors.reshape(-1)[n + column] = np.float32(code) * scale + offset
        column += 1


@compiled
def _widen_half(bits):
    """Return the float32 of the bits of a finite float16."""
    bits = np.int32(bits)
    return np.int32((bits & 0x7FFF) << 13 | (bits & 0x8000) << 16).view(np.float32) * FP16_TO_FP32
