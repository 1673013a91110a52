"""What a look-up that hits does, in one pass: where the row of each key lies, and its values decoded into the answer.

The memory may be written meanwhile. Then what comes out is wrong, but no place outside the arrays is touched, and a pass that
looked at the table's epoch before and after says so (slots.py has the protocol).

Passes keep the interpreter: they take microseconds, but where shared memory has no room and rows lie in a file, and another
thread that gets it in between may hold it for milliseconds.

Stored rows are passed as `RowCodec.plain` gives them: float32 (fp32), uint16 (fp16), uint8 (int8 and int4).
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
    memory_at,
    read_four,
    read_in_order,
    read_once,
    scale_eight,
    scale_eight_halves,
)
from serving.tables.store.row_formats import SCALE_BYTES

EPOCH, HOLES = 0, 1  # words of a table's header
HEADER_WORDS = 8
HEADER, READS, ROWS, PLACES, USES, WORDS = 0, 1, 2, 5, 7, 9  # of `table_words`
ALL_THERE, SOME_MISSING, UNSETTLED = 0, 1, -1  # unsettled: somebody writes, or wrote meanwhile
ASKED = 1024  # rows that are asked of memory before the first of them is decoded: 64 KiB of a core's own cache
AHEAD = 16  # rows between the one that is asked of memory and the one that is decoded
WIDE, NARROW = 2 * LANES, LANES // 2  # widths of rows that the ranker has: without a loop they take half the time
WAYS = LANES  # slots of a set
NO_KEY = -1  # HPS reserves it, so no row has it
MOST_USES = 255
# Uses matter where rows come and go: so many reads count after one that missed a row, then one in so many.
# experiments/cache_policy.py: up to 7 points of hit rate above LRU on Zipf traces and real logs; below it when all
# popularity changes at once.
COUNTED_AFTER_MISS = 8
COUNTED_EVERY = 8
MIX = np.uint64(0x9E3779B97F4A7C15)
THIRTY_TWO = np.uint64(32)
held = partial(compiled, nogil=False)
FP16_TO_FP32 = np.float32(2.0**112)  # the exponents count from 127 - 15 further down


@held
def read_complete(header, rows, keys, vectors):
    """Rows 0 … len(rows) - 1 -> 0 when all that are asked for are there and nobody wrote; else `vectors` hold anything.

    header: int64 [HEADER_WORDS] of the table; vectors: float32 [N, D], written
    """
    epoch = read_in_order(header, EPOCH)
    if epoch & 1:
        return UNSETTLED
    if header[HOLES] != 0:
        return SOME_MISSING
    for at in range(len(keys)):
        if np.uint64(keys[at]) >= np.uint64(len(rows)):  # negative ones are huge
            return SOME_MISSING
        _ask(rows, keys[min(at + AHEAD, len(keys) - 1)])
        decode_row(rows, keys[at], vectors, at)
    return ALL_THERE if read_in_order(header, EPOCH) == epoch else UNSETTLED


@held
def read_hashed(header, owner, uses, counted, rows, keys, vectors):
    """`find_hashed`, the rows, and where `counted` `count_uses`: -> as `read_complete`.

    vectors: float32 [N, D], written where there is a row
    """
    epoch = read_in_order(header, EPOCH)
    if epoch & 1:
        return UNSETTLED
    slots, missing = np.empty(len(keys), np.int64), 0
    for start in range(0, len(keys), ASKED):
        some = slice(start, start + ASKED)
        lacking = find_hashed(owner, rows, keys[some], slots[some])
        _decode_found(rows, slots[some], vectors[some], lacking)
        missing += lacking
    if counted:
        count_uses(uses, slots)
    return _state(header, epoch, missing)


@held
def read_indexed(header, slot_of_key, uses, counted, rows, keys, vectors):
    """The same with `find_indexed`."""
    epoch = read_in_order(header, EPOCH)
    if epoch & 1:
        return UNSETTLED
    slots, missing = np.empty(len(keys), np.int64), 0
    for start in range(0, len(keys), ASKED):
        some = slice(start, start + ASKED)
        lacking = find_indexed(slot_of_key, rows, keys[some], slots[some])
        _decode_found(rows, slots[some], vectors[some], lacking)
        missing += lacking
    if counted:
        count_uses(uses, slots)
    return _state(header, epoch, missing)


@held
def read_complete_at(table, dtype, keys, vectors):
    """`read_complete` of the table that `table_words` describe. table: their address; dtype: of the rows"""
    return read_complete(_header(table), _rows(table, dtype), keys, vectors)


@held
def read_hashed_at(table, dtype, keys, vectors):
    """The same of `read_hashed`, which counts uses as often as COUNTED_AFTER_MISS and COUNTED_EVERY say."""
    counted, owner = _next_counts(table), _array(table, PLACES, np.int64)
    return _noted(table, read_hashed(_header(table), owner, _uses(table), counted, _rows(table, dtype), keys, vectors))


@held
def read_indexed_at(table, dtype, keys, vectors):
    """The same of `read_indexed`."""
    counted, slot_of_key = _next_counts(table), _array(table, PLACES, np.int32)
    return _noted(table, read_indexed(_header(table), slot_of_key, _uses(table), counted, _rows(table, dtype), keys, vectors))


def table_words(header, rows, *parts):
    """What every read of a table is of, as int64 words: the address of `header`; reads since one missed a row; address, length
    and columns of the stored rows; then address and length of `parts`: the places (int64 owners or int32 slots by key) and the
    uses (uint8).

    For each array of a call, numba asks the interpreter what it is, and holds it: that takes as long as 20 rows. Whoever
    passes the words' address keeps them and the arrays.
    """
    words = np.zeros(WORDS, np.int64)
    words[[HEADER, ROWS, ROWS + 1, ROWS + 2]] = header.ctypes.data, rows.ctypes.data, *rows.shape
    for at, part in zip((PLACES, USES), parts, strict=False):  # a complete table has neither
        words[at : at + 2] = part.ctypes.data, len(part)
    return words


@register_jitable
def _next_counts(table):
    """One read more -> whether its uses are counted."""
    words = _words(table)
    words[READS] += 1
    return words[READS] % COUNTED_EVERY == 0 or words[READS] <= COUNTED_AFTER_MISS


@register_jitable
def _noted(table, state):
    if state == SOME_MISSING:
        _words(table)[READS] = 0
    return state


@register_jitable
def _header(table):
    return carray(memory_at(_words(table)[HEADER]), (HEADER_WORDS,), np.int64)


@register_jitable
def _rows(table, dtype):
    words = _words(table)
    return carray(memory_at(words[ROWS]), (words[ROWS + 1], words[ROWS + 2]), dtype)


@register_jitable
def _uses(table):
    return _array(table, USES, np.uint8)


@register_jitable
def _array(table, at, dtype):
    words = _words(table)
    return carray(memory_at(words[at]), (words[at + 1],), dtype)


@register_jitable
def _words(table):
    return carray(memory_at(table), (WORDS,), np.int64)


@register_jitable
def _state(header, epoch, missing):
    if read_in_order(header, EPOCH) != epoch:
        return UNSETTLED
    return SOME_MISSING if missing else ALL_THERE


@compiled
def find_hashed(owner, rows, keys, slots):
    """int64 [capacity] owners of slots, int64 [N] keys -> how many are missing. slots: int64 [N], written; -1 where missing.

    Those of `rows` (stored, [capacity, columns]) are asked of memory: whoever wants them has them sooner.
    """
    missing, n_sets = 0, np.uint64(len(owner) // WAYS)
    for at in range(len(keys)):
        hashed = (np.uint64(keys[at]) * MIX) >> THIRTY_TWO
        first = np.int64((hashed * n_sets) >> THIRTY_TWO) * WAYS
        slots[at] = first + find_in_eight(owner, first, keys[at])
        _ask(rows, slots[at])
        if slots[at] == first + WAYS or keys[at] == NO_KEY:  # rare: a branch takes a tenth less
            slots[at] = -1
            missing += 1
    return missing


@compiled
def find_indexed(slot_of_key, rows, keys, slots):
    """int32 [rows] slots of the keys 0 … rows - 1, -1 where there is none -> as `find_hashed`."""
    missing = 0
    for at in range(len(keys)):
        slots[at] = -1
        if np.uint64(keys[at]) < np.uint64(len(slot_of_key)):
            slots[at] = read_once(slot_of_key, keys[at])
        _ask(rows, slots[at])
        missing += slots[at] < 0
    return missing


@register_jitable
def _decode_found(rows, slots, vectors, missing):
    """`decode_rows` of rows that were asked for; `missing` of the slots are -1."""
    for at in range(len(slots)):
        if missing == 0 or slots[at] >= 0:
            decode_row(rows, slots[at], vectors, at)


@compiled
def count_uses(uses, slots):
    """One use more of each row that was read, once for all the times that it was. uses: uint8 [capacity]; slots: int64 [N]"""
    before = np.empty(len(slots), np.uint8)
    for at in range(len(slots)):
        before[at] = uses[slots[at]] if slots[at] >= 0 else MOST_USES
    for at in range(len(slots)):
        if before[at] < MOST_USES:
            uses[slots[at]] = before[at] + 1


@compiled
def decode_rows(rows, slots, vectors):
    """Row `slots[n]` -> vectors[n]; nothing where the slot is -1. slots: int64 [N]; vectors: float32 [N, D], written"""
    for at in range(len(slots)):
        _ask(rows, slots[min(at + AHEAD, len(slots) - 1)])
        if slots[at] >= 0:
            decode_row(rows, slots[at], vectors, at)


@register_jitable(inline="always")
def _ask(rows, row):
    """For the first line of a row. Of one that is not there it does nothing: asking for any address is harmless."""
    prefetch(rows, row * rows.shape[1] * rows.itemsize)


def decode_row(rows, row, vectors, at):
    """Values of a stored row -> vectors[at]: by the type of `rows`, one of those below."""
    raise NotImplementedError


@overload(decode_row, inline="always")  # a call would push sixteen words of array headers a row
def _decoder(rows, row, vectors, at):
    return {types.float32: _fp32, types.uint16: _fp16, types.uint8: _codes}[rows.dtype]


def _fp32(rows, row, vectors, at):
    width, column = vectors.shape[1], 0
    if width == WIDE:
        copy_eight(rows, row * WIDE, vectors, at * WIDE)
        copy_eight(rows, row * WIDE + LANES, vectors, at * WIDE + LANES)
        return
    if width == NARROW:
        copy_four(rows, row * NARROW, vectors, at * NARROW)
        return
    while column + LANES <= width:  # as a range with a step, the loop takes twice as long
        copy_eight(rows, row * width + column, vectors, at * width + column)
        column += LANES
    while column < width:
        vectors[at, column] = rows[row, column]
        column += 1


def _fp16(rows, row, vectors, at):
    for column in range(vectors.shape[1]):
        vectors[at, column] = _half(rows[row, column])


def _codes(rows, row, vectors, at):
    width, columns = vectors.shape[1], rows.shape[1]
    codes = columns - SCALE_BYTES
    scales = read_four(rows, row * columns + codes)
    scale, offset = _half(scales), _half(scales >> 16)
    if codes == width:  # int8; also int4 of one column, whose other half is 0
        _bytes(rows, row * columns, vectors, at * width, width, scale, offset)
    else:
        _halves(rows, row * columns, vectors, at * width, width, scale, offset)


@register_jitable(inline="always")
def _bytes(rows, place, vectors, at, width, scale, offset):
    if width == WIDE:
        scale_eight(rows, place, vectors, at, scale, offset)
        scale_eight(rows, place + LANES, vectors, at + LANES, scale, offset)
        return
    column = 0
    while column + LANES <= width:
        scale_eight(rows, place + column, vectors, at + column, scale, offset)
        column += LANES
    while column < width:
        vectors.reshape(-1)[at + column] = np.float32(rows.reshape(-1)[place + column]) * scale + offset
        column += 1


@register_jitable(inline="always")
def _halves(rows, place, vectors, at, width, scale, offset):
    if width == WIDE:
        scale_eight_halves(rows, place, vectors, at, scale, offset)
        scale_eight_halves(rows, place + LANES // 2, vectors, at + LANES, scale, offset)
        return
    column = 0
    while column + LANES <= width:
        scale_eight_halves(rows, place + (column >> 1), vectors, at + column, scale, offset)
        column += LANES
    while column < width:
        code = rows.reshape(-1)[place + (column >> 1)] >> (4 * (column & 1)) & 15
        vectors.reshape(-1)[at + column] = np.float32(code) * scale + offset
        column += 1


@compiled
def _half(bits):
    """The bits of a finite float16 -> float32."""
    bits = np.int32(bits)
    return np.int32((bits & 0x7FFF) << 13 | (bits & 0x8000) << 16).view(np.float32) * FP16_TO_FP32
