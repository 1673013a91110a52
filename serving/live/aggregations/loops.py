"""Compiled loops over events and records. One record holds the state of one entity, laid out by `layout.py`.

A record is a row of 8-byte words, seen through three views of the same memory:

    whole  int64 [R, W]      real  float64 [R, W]      short  int32 [R, 2 W]

Word 0 of a record is the time of its newest event. Cells follow, one per value and span; `cells` int64
[n_cells, CELL_WIDTH] describes them. A record of zeros is empty.

    RING      newest bucket | RING counts (int32) | RING sums, if wanted
    DECAY     time of the sums | decayed number of events | decayed sum of values
    SESSION   first event | latest event | number of events | sum of values
    LAST      how many are held | times, newest first | values
    SKETCH    for each of SLOTS slots (int32): 1 + the newest bucket in which an id of that slot was met, 0 = never
"""

from __future__ import annotations

import numpy as np

from serving.loops.compiled import compiled

RING_CELL, DECAY_CELL, SESSION_CELL, LAST_CELL, SKETCH_CELL = range(5)
KIND, VALUE, EVENTS, SPAN_MS, AT, SUMS_AT, LENGTH = range(7)  # columns of `cells`
CELL_WIDTH = 7
CELL, FUNCTION, PLACE = range(3)  # columns of `reads`
COUNT, SUM, MEAN, LAST, DISTINCT = range(5)  # functions, as in spec.FUNCTIONS
WEIGHT, AMOUNT, PRICE, OTHER = range(4)  # values, as in spec.VALUES

RING = 60  # buckets of a window
SLOTS = 256
LATEST_MS = 1 << 44  # in the year 2527; buckets of ten seconds and longer fit int32
ALLOWED_LATENESS_MS = 86_400_000  # an event that is older than the entity's newest one by more is not aggregated
DAY_MS = 86_400_000.0


@compiled
def update_records(whole, real, short, rows, time_ms, event, values, other, cells):
    """Add a batch of events to the records, in the order of the batch.

    rows    int64 [N] record of each event; events with a row outside of 0 … R - 1 are skipped
    time_ms, event, other   int64 [N]
    values  float64 [3, N] WEIGHT, AMOUNT and PRICE, NaN = missing
    """
    for number in range(len(rows)):
        if 0 <= rows[number] < len(whole):
            add_event(whole, real, short, rows[number], number, time_ms, event, values, other, cells)


@compiled
def read_records(whole, real, short, as_of_ms, cells, reads, features):
    """Write the features of each record, float32 [R, F]. as_of_ms: int64 [R] or [1]"""
    for row in range(len(whole)):
        read_record(whole, real, short, row, as_of_ms[row % len(as_of_ms)], cells, reads, features[row])


@compiled
def replay_events(
    order, groups, whole, real, short, belongs, time_ms, event, values, other, as_of_ms, cells, reads, features
):  # fmt: skip
    """Write the features at each instant, float32 [M, F], by adding events to one record, entity after entity.

    order   int64 [N + M], by entity, then sequence: numbers of events (below N) and N + numbers of instants
    groups  int64 [N + M] entity of each entry of `order`; belongs: bool [N] whether the event belongs to an entity
    whole, real, short   one record
    """
    n_events = len(time_ms)
    for place in range(len(order)):
        if place == 0 or groups[place] != groups[place - 1]:
            whole[:] = 0
        number = order[place]
        if number >= n_events:
            instant = number - n_events
            read_record(whole, real, short, 0, as_of_ms[instant], cells, reads, features[instant])
        elif belongs[number]:
            add_event(whole, real, short, 0, number, time_ms, event, values, other, cells)


@compiled
def add_event(whole, real, short, row, number, time_ms, event, values, other, cells):
    """Add event `number` of the arrays to record `row`, unless its time is unusable or it is too late."""
    now = time_ms[number]
    if not 0 <= now < LATEST_MS or now < whole[row, 0] - ALLOWED_LATENESS_MS:
        return
    whole[row, 0] = max(whole[row, 0], now)
    for cell in cells:
        if not (cell[EVENTS] >> (event[number] & 63)) & 1:
            continue
        if cell[KIND] == SKETCH_CELL:
            add_to_sketch(short[row], cell, now, other[number])
            continue
        value = values[cell[VALUE], number]
        if np.isnan(value):
            continue
        if cell[KIND] == RING_CELL:
            add_to_ring(whole[row], real[row], short[row], cell, now, value)
        elif cell[KIND] == DECAY_CELL:
            add_to_decay(whole[row], real[row], cell, now, value)
        elif cell[KIND] == SESSION_CELL:
            add_to_session(whole[row], real[row], cell, now, value)
        else:
            add_to_last(whole[row], real[row], cell, now, value)


@compiled
def read_record(whole, real, short, row, as_of_ms, cells, reads, features):
    """Write the features of record `row`, float32 [F]."""
    now = max(as_of_ms, whole[row, 0])
    for number in range(len(reads)):
        cell, function, place = cells[reads[number, CELL]], reads[number, FUNCTION], reads[number, PLACE]
        if function == DISTINCT:
            features[number] = read_sketch(short[row], cell, now)
        elif function == LAST:
            features[number] = read_last(whole[row], real[row], cell, now, place)
        else:
            if cell[KIND] == RING_CELL:
                count, total, factor = read_ring(whole[row], real[row], short[row], cell, now)
            elif cell[KIND] == DECAY_CELL:
                count, total, factor = read_decay(whole[row], real[row], cell, now)
            else:
                count, total, factor = read_session(whole[row], real[row], cell, now)
            if function == COUNT:
                features[number] = count * factor
            elif function == SUM:
                features[number] = total * factor
            else:
                features[number] = total / count if count > 0 and factor > 0 else np.nan


@compiled
def add_to_ring(whole, real, short, cell, now, value):
    """Add a value to its bucket. A bucket that has left the ring is ignored: no window to come reaches back to it."""
    bucket, newest, counts_at, sums_at = now // cell[SPAN_MS], whole[cell[AT]], 2 * (cell[AT] + 1), cell[SUMS_AT]
    if bucket <= newest - RING:
        return
    if bucket > newest:
        for step in range(1, min(bucket - newest, RING) + 1):
            slot = (newest + step) % RING
            short[counts_at + slot] = 0
            if sums_at >= 0:
                real[sums_at + slot] = 0.0
        whole[cell[AT]] = bucket
    slot = bucket % RING
    short[counts_at + slot] += 1
    if sums_at >= 0:
        real[sums_at + slot] += value


@compiled
def read_ring(whole, real, short, cell, now):
    """Return the number of values in the window, their sum, and 1."""
    newest, counts_at, sums_at = whole[cell[AT]], 2 * (cell[AT] + 1), cell[SUMS_AT]
    oldest = max(now // cell[SPAN_MS], newest) - RING + 1
    count, total = 0, 0.0
    for bucket in range(max(oldest, 0), newest + 1):
        slot = bucket % RING
        count += short[counts_at + slot]
        if sums_at >= 0:
            total += real[sums_at + slot]
    return float(count), total, 1.0


@compiled
def add_to_decay(whole, real, cell, now, value):
    """Add a value to the decayed count and sum, and move their time forward if the value is newer."""
    start = cell[AT]
    moment = whole[start]
    if now >= moment:
        faded = decay(now - moment, cell[SPAN_MS])
        real[start + 1] = real[start + 1] * faded + 1.0
        real[start + 2] = real[start + 2] * faded + value
        whole[start] = now
    else:
        faded = decay(moment - now, cell[SPAN_MS])
        real[start + 1] += faded
        real[start + 2] += faded * value


@compiled
def read_decay(whole, real, cell, now):
    """Return the decayed number of values, their decayed sum, both at the time of the latest value, and their decay since.

    A mean divides the first two: they decay alike, and after a long time both would be 0.
    """
    start = cell[AT]
    return real[start + 1], real[start + 2], max(decay(now - whole[start], cell[SPAN_MS]), np.finfo(np.float64).tiny)


@compiled
def decay(elapsed_ms, half_life_ms):
    """Return the factor by which a value decays."""
    return 2.0 ** (-elapsed_ms / half_life_ms)


@compiled
def add_to_session(whole, real, cell, now, value):
    """Add a value to the session, or start a new session with it after a pause."""
    first, latest, count, total = cell[AT], cell[AT] + 1, cell[AT] + 2, cell[AT] + 3
    if whole[count] == 0 or now > whole[latest] + cell[SPAN_MS]:
        whole[first], whole[latest], whole[count], real[total] = now, now, 1, value
    elif now >= whole[first]:
        whole[latest] = max(whole[latest], now)
        whole[count] += 1
        real[total] += value


@compiled
def read_session(whole, real, cell, now):
    """Return the number of values in the session, their sum, and 1, or 0 if the session is over."""
    start = cell[AT]
    over = now > whole[start + 1] + cell[SPAN_MS]
    return float(whole[start + 2]), real[start + 3], 0.0 if over else 1.0


@compiled
def add_to_last(whole, real, cell, now, value):
    """Insert a value by time. Of two events with the same time, the later one in the log counts as newer."""
    n_held, times, values = min(whole[cell[AT]], cell[LENGTH]), cell[AT] + 1, cell[AT] + 1 + cell[LENGTH]
    place = 0
    while place < n_held and whole[times + place] > now:
        place += 1
    if place == cell[LENGTH]:
        return
    n_held = min(n_held + 1, cell[LENGTH])
    for other in range(n_held - 1, place, -1):
        whole[times + other] = whole[times + other - 1]
        real[values + other] = real[values + other - 1]
    whole[times + place], real[values + place], whole[cell[AT]] = now, value, n_held


@compiled
def read_last(whole, real, cell, now, place):
    """Return the value of the event at a place, 0 = newest, or its age in days for WEIGHT; NaN where there is none."""
    if place >= whole[cell[AT]]:
        return np.nan
    time = whole[cell[AT] + 1 + place]
    if cell[SPAN_MS] > 0 and time // cell[SPAN_MS] <= now // cell[SPAN_MS] - RING:
        return np.nan
    if cell[VALUE] == WEIGHT:
        return (now - time) / DAY_MS
    return real[cell[AT] + 1 + cell[LENGTH] + place]


@compiled
def add_to_sketch(short, cell, now, other):
    """Mark the slot of an id as met in the bucket of `now`."""
    slot = 2 * cell[AT] + hash_to_slot(other)
    short[slot] = max(short[slot], now // cell[SPAN_MS] + 1)


@compiled
def read_sketch(short, cell, now):
    """Return the estimated number of distinct ids in the window."""
    oldest = now // cell[SPAN_MS] - RING + 1
    n_hit = 0
    for slot in range(2 * cell[AT], 2 * cell[AT] + SLOTS):
        n_hit += short[slot] > 0 and short[slot] - 1 >= oldest
    return np.rint(-SLOTS * np.log(1.0 - min(n_hit, SLOTS - 1) / SLOTS))


@compiled
def hash_to_slot(number):
    """Return the slot of an id, 0 to SLOTS - 1, by splitmix64."""
    mixed = np.uint64(number) + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.int64((mixed ^ (mixed >> np.uint64(31))) % np.uint64(SLOTS))
