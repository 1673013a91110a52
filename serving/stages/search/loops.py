"""Compiled loops of the search over one request: block, gather, score, select. Their arrays belong to one Search.

Each item of a request's list has a slot; `place` maps items to slots. Between requests every place is FREE or NEVER.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from serving.loops.compiled import compiled
from serving.loops.inner_product import compute_inner_product
from serving.loops.ordering import compute_rank, read_place
from serving.loops.read_ahead import LINE_BYTES, prefetch

FREE, BLOCKED, NEVER = -1, -2, -3  # may be served; not to this user; never


class Catalogue(NamedTuple):
    """vectors: float32 [n_items, D]; neighbours: int32 [n_items + 1, N]; weights: float32 [n_items + 1, N]."""

    vectors: np.ndarray
    neighbours: np.ndarray
    weights: np.ndarray


class Scratch(NamedTuple):
    """Scratch arrays. place: int32 [n_items + 1] by position; the others [n_items] by slot."""

    place: np.ndarray
    items: np.ndarray  # int32 position
    sums: np.ndarray  # float64: the neighbours' weights, then the whole score
    keys: np.ndarray  # int64, ascending from best to worst

    @classmethod
    def of(cls, servable: np.ndarray) -> Scratch:
        """Allocate scratch for a catalogue. servable: bool [n_items + 1]."""
        n_items = len(servable) - 1
        return cls(make_places(servable), np.empty(n_items, np.int32), np.empty(n_items), np.empty(n_items, np.int64))


def make_places(servable: np.ndarray) -> np.ndarray:
    """Return `place` of a Scratch between requests, int32 [n_items + 1]. servable: bool [n_items + 1]"""
    return np.where(servable, np.int32(FREE), np.int32(NEVER))


@compiled
def count_blocked(positions, starts, place, counts):
    """Write to counts, int64 [B], how many distinct servable items are blocked for each request."""
    for row in range(len(counts)):
        row_positions = positions[starts[row] : starts[row + 1]]
        counts[row] = block(row_positions, place)
        release(row_positions, place)


@compiled
def search_requests(
    user_vectors, history, recency, blocked, starts, near,  # the requests
    vectors, neighbours, weights, place, items, sums, keys,  # Catalogue and Scratch
    positions, scores, n_near,  # int64 [B, C], float32 [B, C], int64 [B], written
):  # fmt: skip
    """Run `search_request` for B requests.

    Arrays are separate arguments: unpacking a tuple at every call costs numba as long as the search of a request.
    """
    catalogue, scratch = Catalogue(vectors, neighbours, weights), Scratch(place, items, sums, keys)
    for row in range(len(user_vectors)):
        n_near[row] = search_request(
            user_vectors[row],
            history[row],
            recency[row],
            blocked[starts[row] : starts[row + 1]],
            near[min(row, len(near) - 1)],
            catalogue,
            scratch,
            positions[row],
            scores[row],
        )


@compiled
def search_request(vector, history, weights, blocked, near, catalogue, scratch, positions, scores):
    """Search one request: score the neighbours of its history and the index's results, and keep the best.

    vector: float32 [D]; history: int [H], weights: float32 [H]; blocked: int64 [X]; near: int64 [A], negative = none
    positions: int64 [C], scores: float32 [C], written: best first, then padding
    Returns how many of `near` may be served.
    """
    place, items, sums, keys = scratch
    block(blocked, place)
    n_slots = add_neighbours(history, weights, catalogue, scratch)
    n_slots, n_near = add_index_results(near, n_slots, catalogue.vectors, scratch)
    for slot in range(n_slots):
        item = items[slot]
        score = np.float32(sums[slot]) + compute_inner_product(catalogue.vectors[item], vector)
        sums[slot] = score
        keys[slot] = compute_rank(score, item)  # ties go to the lower position
    n_kept = select_smallest(keys, n_slots, len(positions))
    for rank in range(n_kept):
        item = read_place(keys[rank])
        positions[rank], scores[rank] = item, sums[place[item]]
    positions[n_kept:] = len(place) - 1
    scores[n_kept:] = -np.inf
    for slot in range(n_slots):
        place[items[slot]] = FREE
    release(blocked, place)
    return n_near


@compiled
def mark_sources(
    user_vectors, history, recency, positions,  # the requests and their items
    vectors, neighbours, weights, place,  # Catalogue, and `place` of Scratch
    mean_item, columns, bits, together_bit, popular_bit, sources,  # float32 [D], int64 [T, 2], uint8 [T]; uint8 [B, C], written
):  # fmt: skip
    """Set the bits of the terms that propose an item: `Search.find_sources`.

    positions: int64 [B, C], n_items = padding, which gets 0
    columns: first column and end of each term that is an inner product; bits: theirs
    together_bit, popular_bit: of the neighbours, and of the last column, popularity, which counts in no other term
    """
    n_items, before, usual = len(vectors), np.empty(positions.shape[1], np.int32), np.empty(len(bits), np.float32)
    vector = np.empty(vectors.shape[1], np.float32)
    for row in range(len(positions)):
        items, marks = positions[row], sources[row]
        vector[:], popularity_weight = user_vectors[row], user_vectors[row, -1]
        vector[-1] = 0.0  # a term of one column less would cost half as much again, because its width fills no whole lanes
        for term in range(len(bits)):
            first, end = columns[term]
            usual[term] = compute_inner_product(mean_item[first:end], vector[first:end])
        for slot in range(len(items)):
            item, marks[slot] = items[slot], 0
            if item == n_items:
                continue
            if popularity_weight * (vectors[item, -1] - mean_item[-1]) > 0.0:
                marks[slot] |= popular_bit
            for term in range(len(bits)):
                first, end = columns[term]
                if compute_inner_product(vectors[item][first:end], vector[first:end]) > usual[term]:
                    marks[slot] |= bits[term]
            before[slot], place[item] = place[item], slot
        for rank in range(len(recency[row])):
            if recency[row, rank] == 0.0:
                continue
            listed, strengths = neighbours[history[row, rank]], weights[history[row, rank]]
            for number in range(len(listed)):
                if place[listed[number]] >= 0 and strengths[number] > 0.0:
                    marks[place[listed[number]]] |= together_bit
        for slot in range(len(items) - 1, -1, -1):
            if items[slot] != n_items:
                place[items[slot]] = before[slot]


@compiled
def block(positions, place):
    """Block items and return how many were servable, repeats counted once."""
    n_blocked = 0
    for position in positions:
        if place[position] == FREE:
            place[position] = BLOCKED
            n_blocked += 1
    return n_blocked


@compiled
def release(positions, place):
    """Undo `block`."""
    for position in positions:
        if place[position] == BLOCKED:
            place[position] = FREE


@compiled
def add_neighbours(history, weights, catalogue, scratch):
    """Give each neighbour of the history a slot and sum its weights. Return the number of slots."""
    place, items, sums, _ = scratch
    n_slots = 0
    for rank in range(len(history)):
        if weights[rank] > 0.0:
            fetch_ahead(catalogue.neighbours[history[rank]])
            fetch_ahead(catalogue.weights[history[rank]])
    for rank in range(len(history)):
        if weights[rank] == 0.0:
            continue
        neighbours, strengths = catalogue.neighbours[history[rank]], catalogue.weights[history[rank]]
        for number in range(len(neighbours)):
            item, strength = neighbours[number], weights[rank] * strengths[number]
            slot = place[item]
            if slot >= 0:
                sums[slot] += strength
            elif slot == FREE:
                place[item], items[n_slots], sums[n_slots] = n_slots, item, strength
                fetch_ahead(catalogue.vectors[item])
                n_slots += 1
    return n_slots


@compiled
def add_index_results(near, n_slots, vectors, scratch):
    """Give a slot to each result of the index that has none. Return (number of slots, how many of `near` may be served)."""
    place, items, sums, _ = scratch
    n_near = 0
    for item in near:
        if item < 0:
            continue
        slot = place[item]
        n_near += slot >= FREE
        if slot == FREE:
            place[item], items[n_slots], sums[n_slots] = n_slots, item, 0.0
            fetch_ahead(vectors[item])
            n_slots += 1
    return n_slots, n_near


@compiled
def select_smallest(keys, n_keys, count):
    """Move the smallest `count` of the first n_keys to the front, sorted. Return how many there are."""
    first, last = 0, n_keys - 1
    while count < n_keys and first < last:  # Hoare's selection: the dividing key is in first … last
        a, b, c = keys[first], keys[(first + last) // 2], keys[last]
        pivot = max(min(a, b), min(max(a, b), c))
        left, right = first, last
        while left <= right:
            while keys[left] < pivot:
                left += 1
            while keys[right] > pivot:
                right -= 1
            if left <= right:
                keys[left], keys[right] = keys[right], keys[left]
                left += 1
                right -= 1
        if count <= right:
            last = right
        elif count > left:
            first = left
        else:
            break
    n_kept = min(count, n_keys)
    keys[:n_kept].sort()
    return n_kept


@compiled
def fetch_ahead(row):
    """Prefetch a contiguous row of a large table, because a cache miss costs more than the use of the row."""
    for offset in range(0, row.size * row.itemsize, LINE_BYTES):
        prefetch(row, offset)
