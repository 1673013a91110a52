"""The passes of `serving/stages/rules/rules.py`, as compiled loops over one list at a time.

A list holds the columns of its items in their current order, pinned ones first by ascending slot, without blocked items. A
place is an index into the list, 0 … count - 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from serving.loops.compiled import compiled
from serving.loops.ordering import compute_rank, sort_stably
from serving.stages.rules.config import ABOVE_PRICE_CAP, BLOCKED, CATEGORY, KEPT, OVER_CAP, PROVIDER
from serving.stages.rules.propensities import UNKNOWN, compute_propensities

ROUNDING = 1e-9  # tolerance of share * count against a whole number


class Passes(NamedTuple):
    """The settings of the passes; 0 turns one off."""

    diversity: float
    explored_slots: int
    pool: int
    seed: np.uint64  # of the draws
    capped: bool
    floor_share: float


class WorkingList(NamedTuple):
    """One list, and the scratch memory of its passes. All arrays but the first and the last are [M]."""

    items: np.ndarray  # ITEM_RULES [n_items + 1]
    positions: np.ndarray  # int64, by column
    order: np.ndarray  # int64: the list, as columns
    ranks: np.ndarray  # int64
    costs: np.ndarray  # float64
    spare_order: np.ndarray
    spare_ranks: np.ndarray
    spare_costs: np.ndarray
    in_group: np.ndarray  # int32 [2, n_groups]: counts by category and provider; zeros before and after a pass
    propensities: np.ndarray  # float32, by column: probability of the item at its place, given those before it


@compiled
def serve(
    diversity, explored_slots, pool, seed, capped, floor_share,  # Passes
    items, positions, scores, user_ids, in_group, columns, propensities,
):  # fmt: skip
    """Write the served columns to `columns`, int64 [B, k], best first, -1 after the last, and `propensities`, float32 [B, k].

    items: ITEM_RULES [n_items + 1]; in_group: int32 [2, n_groups] zeros
    positions: int64 [B, M]; scores: float32 [B, M]; user_ids: int64 [B]
    Raises IndexError for a position beyond the items.

    Settings are separate arguments: typing a named tuple at every call costs numba more than all passes of a request.
    """
    passes = Passes(diversity, explored_slots, pool, seed, capped, floor_share)
    k, width = columns.shape[1], positions.shape[1]
    integers, numbers, listed = np.empty((4, width), np.int64), np.empty((2, width)), np.empty(width, np.float32)
    for row in range(len(positions)):
        work = WorkingList(
            items, positions[row], integers[0], integers[1], numbers[0], integers[2], integers[3], numbers[1], in_group, listed
        )
        listed[:] = 1.0
        n_pinned, count = sort_by_score(work, scores[row])
        n_kept = count
        if passes.diversity > 0.0:
            diversify(work, n_pinned, count, passes.diversity, k)
        if passes.explored_slots > 0:
            explore(work, count, passes, user_ids[row], k)
        if passes.capped:
            n_kept = cap(work, n_pinned, count, k)
        if passes.floor_share > 0.0:
            raise_floor(work, n_pinned, n_kept, count, passes.floor_share)
        if n_pinned:
            place_pins(work, n_pinned, count)
        for place in range(k):
            columns[row, place] = work.order[place] if place < count else -1
            propensities[row, place] = listed[work.order[place]] if place < count else np.float32(1.0)


@compiled
def get_item(work, place):
    """Return the ITEM_RULES record of the item at a place of the list."""
    return work.items[work.positions[work.order[place]]]


@compiled
def sort_by_score(work, scores):
    """Order the list: pinned items by slot, the others by falling score, ties by position. Return (n_pinned, count)."""
    order, ranks = work.order, work.ranks
    n_pinned = n_free = 0
    for column in range(len(work.positions)):
        position = work.positions[column]
        if position < -1 or position >= len(work.items):
            raise IndexError("rules: an item position is beyond the items that the rules were compiled for")
        item = work.items[position]  # -1 is the padding row, the last
        if item.blocked:
            continue
        if item.zone == 0:
            work.spare_order[n_free] = column
            ranks[n_free] = compute_rank(scores[column], position)
            n_free += 1
            continue
        place = n_pinned
        while place > 0 and get_item(work, place - 1).zone > item.zone:
            order[place] = order[place - 1]
            place -= 1
        order[place] = column
        n_pinned += 1
    count = n_pinned + n_free
    order[n_pinned:count] = work.spare_order[:n_free]
    sort_stably(ranks, order[n_pinned:], n_free, work.spare_ranks, work.spare_order)
    return n_pinned, count


@compiled
def diversify(work, n_pinned, count, weight, k):
    """Reorder by maximal marginal relevance (MMR) over categories: each further item of a category is worth less.

    value = (1 - weight) * (1 - place / k) - weight * (1 - 0.5 ** items of its category before it)

    Relevance is the place by score, 1 at the top and 0 at place k, because the scale of scores changes with every training.
    Within a category values fall, so greedy selection equals sorting by value.
    """
    counts = work.in_group[CATEGORY]
    for place in range(count):
        group = get_item(work, place).group[CATEGORY]
        alike = 0
        if group >= 0:
            alike = counts[group]
            counts[group] += 1
        work.costs[place] = place * ((1.0 - weight) / k) - weight * math.ldexp(1.0, -alike)
    _reset_counts(work, count)
    sort_stably(work.costs[n_pinned:], work.order[n_pinned:], count - n_pinned, work.spare_costs, work.spare_order)


@compiled
def explore(work, count, passes, user_id, k):
    """Draw the last slots from the next items, without replacement, by exponential races.

    An item arrives at -log(u) / rate; the first n arrivals are a draw of n in proportion to the rates.
    Drawn items keep their order, and so do the others. Pinned items are always drawn.
    Write the propensities of the drawn items. All are UNKNOWN where later passes move items up, depending on what was drawn.
    """
    n_drawn, arrivals = passes.explored_slots, work.costs
    start = max(k - n_drawn, 0)
    end = min(start + passes.pool, count)
    if end - start <= n_drawn:
        return
    rates, drawn = np.empty(end - start), np.empty(end - start, np.int64)
    for place in range(start, end):
        item = get_item(work, place)
        draw = draw_uniform(passes.seed, user_id, work.positions[work.order[place]])
        arrivals[place] = item.zone - math.log(draw) / item.draw_rate
        rates[place - start] = item.draw_rate if item.zone == 0 else np.inf
    n_found = 0
    for place in range(start, end):
        earlier = 0
        for other in range(start, end):
            earlier += arrivals[other] < arrivals[place]
        if earlier < n_drawn:
            work.ranks[n_found], work.spare_ranks[n_found] = place, start + n_found
            drawn[n_found] = place - start
            n_found += 1
    if passes.capped or passes.floor_share > 0.0:
        work.propensities[:] = UNKNOWN
    else:
        propensities = compute_propensities(rates, drawn[:n_found])
        for member in range(n_found):
            work.propensities[work.order[work.ranks[member]]] = propensities[member]
    move(work, count, n_found)


@compiled
def cap(work, n_pinned, count, k):
    """Move items that exceed a quota behind the rest, and items above the price cap behind those. Return n_kept.

    Whether an item fits its quota depends on the items kept before it. Once the k places are full, only items of the favoured
    providers are kept: the floor may lift them, and a quota counts no other item that is not shown.
    """
    order, behind = work.order, work.ranks
    n_kept, n_shown = 0, k + n_pinned
    for place in range(n_pinned):
        n_shown -= get_item(work, place).zone + BLOCKED < k
    for place in range(count):
        item = get_item(work, place)
        pinned = place < n_pinned
        hidden = n_kept >= n_shown and not item.in_floor_group
        if not pinned and (
            hidden or item.behind != OVER_CAP or _is_full(work, item, CATEGORY) or _is_full(work, item, PROVIDER)
        ):
            behind[place] = item.behind
            continue
        behind[place] = KEPT
        n_kept += 1
        for kind in (CATEGORY, PROVIDER):
            if item.group[kind] >= 0:
                work.in_group[kind, item.group[kind]] += 1
    _reset_counts(work, count)
    n_placed = 0
    for state in (KEPT, OVER_CAP, ABOVE_PRICE_CAP):
        for place in range(count):
            if behind[place] == state:
                work.spare_order[n_placed] = order[place]
                n_placed += 1
    order[:count] = work.spare_order[:count]
    return n_kept


@compiled
def _is_full(work, item, kind):
    """Return whether the kept items already use up the quota of an item's category or provider."""
    return item.group[kind] >= 0 and work.in_group[kind, item.group[kind]] >= item.cap[kind]


@compiled
def _reset_counts(work, count):
    """Reset the counters of the list's groups to zero."""
    for place in range(count):
        item = get_item(work, place)
        for kind in (CATEGORY, PROVIDER):
            if item.group[kind] >= 0:
                work.in_group[kind, item.group[kind]] = 0


@compiled
def raise_floor(work, n_pinned, n_kept, count, share):
    """Lift items of the favoured providers so that the first p free slots hold at least floor(share * p) of them, for every p.

    The j-th such item moves up to free slot ceil(j / share) if it is later; the others close up. Only items within the caps are
    lifted: the floor never breaks a cap.
    """
    places, targets = work.ranks, work.spare_ranks
    n_lifted = 0
    for place in range(n_pinned, n_kept):
        if get_item(work, place).in_floor_group:
            places[n_lifted] = place
            n_lifted += 1
            deadline = math.ceil(n_lifted / share - ROUNDING)
            targets[n_lifted - 1] = min(place, n_pinned - 1 + deadline)
    move(work, count, n_lifted)


@compiled
def place_pins(work, n_pinned, count):
    """Move the pinned items from the front to their slots, or to the end of a list that is too short."""
    for place in range(n_pinned):
        work.ranks[place] = place
        work.spare_ranks[place] = min(get_item(work, place).zone + BLOCKED, count - n_pinned + place)
    move(work, count, n_pinned)


@compiled
def move(work, count, n_members):
    """Move the items at places `ranks` to `spare_ranks`, both [n_members] ascending; the others keep their order."""
    member = passed = other = 0
    for place in range(count):
        while passed < n_members and work.ranks[passed] == other:
            passed += 1
            other += 1
        if member < n_members and (work.spare_ranks[member] <= place or other == count):
            work.spare_order[place] = work.order[work.ranks[member]]
            member += 1
        else:
            work.spare_order[place] = work.order[other]
            other += 1
    work.order[:count] = work.spare_order[:count]


@compiled
def draw_uniform(seed, user_id, position):
    """Return a draw in (0, 1): a hash of seed (uint64), user and item position (int64), so that requests replay exactly."""
    state = mix_bits(seed ^ np.uint64(user_id))
    state = mix_bits(state ^ np.uint64(position))
    return (np.float64(state >> np.uint64(12)) + 0.5) * 2.0**-52  # 52 bits leave room for the half, so 1.0 is never drawn


@compiled
def mix_bits(x):
    """Apply the finaliser of SplitMix64 (Steele, Lea, Flood 2014) to a uint64."""
    x += np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
