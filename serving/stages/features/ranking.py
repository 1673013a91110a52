"""Cross features of a (user, candidate) pair: the same code for training and for requests.

Co-occurrence comes from neighbour lists with one weight per view (item_statistics.py). A candidate's affinity is the sum, over
the history, of its weights in the lists of the history's items: once with equal weights of the history's items, once with more
weight for recent ones, and once with the weight halved from item to item, which predicts what comes next within a visit.

Letters: B requests, C candidates, H history, N neighbours, V views, T time buckets. Positions are rows of per-item arrays,
n_items the padding row (serving/stages/features/ids.py).
"""

from __future__ import annotations

import numpy as np
from numba import literal_unroll

from serving.contract.artifacts import view_read_only
from serving.loops.compiled import compiled
from serving.loops.read_ahead import read_ahead
from serving.stages.features.item_statistics import HORIZONS_DAYS, VIEWS, ItemStatistics
from serving.stages.search.search import weigh_by_recency

WEIGHTINGS = ("even", "recent", "latest")
SMALLEST_DEVIATION = 1e-6  # keeps constant columns near 0 despite rounding
SMALLEST_WEIGHT = 1e-3  # floor of the logarithm of affinities
SCALE = 1 / 3  # scales logarithms of counts and days to about 1


def list_feature_names() -> tuple[str, ...]:
    """Return the names of the last axis of `compute_cross_features`, in order."""
    affinities = [f"{view}_{weighting}" for view in VIEWS for weighting in WEIGHTINGS]
    return (
        *("retrieval_score", "retrieval_rank"),
        *affinities,
        *(f"{name}_log" for name in affinities),
        *("popularity", *(f"popularity_{days:.0f}d" for days in HORIZONS_DAYS)),
        *("popularity_then", "trend_then", "first_sold_since", "last_sold_since"),
        *("category_share", "provider_share", "history_length", "idle_days"),
        *("times_taken", "taken_days_ago"),  # 0 where what users took before is not served again
        *("taken_together_since", "is_live"),
    )


_column = list_feature_names().index
SCORE, RANK = _column("retrieval_score"), _column("retrieval_rank")
AFFINITY, LOGARITHM = _column("customers_even"), _column("customers_even_log")  # the first column of each group
POPULARITY, THEN, SOLD = _column("popularity"), _column("popularity_then"), _column("first_sold_since")
SHARE, LENGTH, IDLE = _column("category_share"), _column("history_length"), _column("idle_days")
TAKEN = _column("times_taken")
TOGETHER, LIVE = _column("taken_together_since"), _column("is_live")
N_FEATURES = len(list_feature_names())
NO_NUMBERS = np.empty((1, 0), np.float32)
NO_NUMBERS.flags.writeable = False
ALL_TAKEN = np.zeros(1, np.int64)  # histories of training hold only items that were taken


def compute_cross_features(
    statistics: ItemStatistics,
    history: np.ndarray,
    history_age_days: np.ndarray,
    candidates: np.ndarray,
    retrieval_scores: np.ndarray,
) -> np.ndarray:
    """Compute the cross features of each candidate.

    history           int [B, H] positions, newest first, padded with n_items
    history_age_days  float32 [B, H]
    candidates        int [B, C] positions, best first, no item twice in a row, padded with n_items
    retrieval_scores  float32 [B, C], ignored at padded candidates
    Returns           float32 [B, C, len(list_feature_names())], finite; zeros at padded candidates
    """
    return compute_pair_numbers(statistics, NO_NUMBERS, history, history_age_days, candidates, retrieval_scores)


def compute_pair_numbers(
    statistics: ItemStatistics,
    item_numbers: np.ndarray,
    history: np.ndarray,
    history_age_days: np.ndarray,
    candidates: np.ndarray,
    retrieval_scores: np.ndarray,
    first_taken: np.ndarray = ALL_TAKEN,
) -> np.ndarray:
    """Return the item numbers of each candidate, then its cross features; arguments as in `compute_cross_features`.

    item_numbers  float32 [n_items + 1, G]
    first_taken   int64 [B] or [1], first place of the history that counts for `times_taken` and `taken_days_ago`
    Returns       float32 [B, C, G + len(list_feature_names())]
    """
    pairs = np.empty((*candidates.shape, item_numbers.shape[1] + N_FEATURES), np.float32)
    with statistics.lock:
        write_pairs(
            *statistics.loop_arguments,
            view_read_only(item_numbers),
            np.ascontiguousarray(history, np.int64),
            np.ascontiguousarray(history_age_days, np.float32),
            np.ascontiguousarray(candidates, np.int64),
            np.ascontiguousarray(retrieval_scores, np.float32),
            np.ascontiguousarray(first_taken, np.int64),
            pairs,
        )
    return pairs


def scale_strengths(strengths: np.ndarray) -> np.ndarray:
    """Return the feature `taken_together_since` of strengths (`PairCounts.sum_strengths`), float32 of any shape."""
    return np.log1p(strengths) * np.float32(SCALE)


def scale_aggregates(features: np.ndarray) -> np.ndarray:
    """Return aggregations of items as numbers near one: scaled logarithms, 0 for missing ones. features: float32 [..., A]

    A sum that no float32 can hold counts as the largest that one can: an infinite number would break every list with the item.
    """
    sizes = np.minimum(np.abs(features), np.finfo(np.float32).max)
    return np.nan_to_num(np.copysign(np.log1p(sizes), features) * np.float32(SCALE))


@compiled
def write_pairs(
    neighbours, neighbour_weights, popularity, popularity_then, sold_days, groups, log_days, bucket_days,
    column_of, group_counts, item_numbers, history, history_age_days, candidates, retrieval_scores, first_taken, pairs,
):  # fmt: skip
    """Write `compute_pair_numbers`, request by request. The scratch stays clean: column_of holds -1, group_counts 0.

    The functions below write some columns of `cross`, float32 [C, len(list_feature_names())].
    """
    n_items, n_numbers = len(neighbours) - 1, item_numbers.shape[1]
    recent, values = np.empty(history.shape[1], np.float32), np.zeros((candidates.shape[1], LOGARITHM))
    ranks = log1p(np.arange(candidates.shape[1])) * SCALE
    per_candidate = (popularity, popularity_then, sold_days, groups, item_numbers)
    for row in range(len(candidates)):
        if row == 0:
            read_ahead_of_request(neighbours, neighbour_weights, per_candidate, history[row], candidates[row])
        if row + 1 < len(candidates):  # fetch the next request's rows while this one is computed
            read_ahead_of_request(neighbours, neighbour_weights, per_candidate, history[row + 1], candidates[row + 1])
        request_history, request_candidates, cross = history[row], candidates[row], pairs[row, :, n_numbers:]
        n_distinct, idle_days = weigh_by_recency(request_history, n_items, recent), np.float32(0.0)
        if n_distinct > 0 and 0 < history_age_days[row, 0] < np.inf:
            idle_days = history_age_days[row, 0]
        values[:, SCORE] = retrieval_scores[row]
        sum_affinities(
            neighbours, neighbour_weights, request_history, recent, n_distinct, request_candidates, column_of, values
        )
        write_standardized(values, request_candidates, n_items, cross)
        write_logarithms(values, cross)
        write_sales(popularity, popularity_then, sold_days, log_days, bucket_days, idle_days, request_candidates, cross)
        write_group_shares(groups, request_history, recent, n_distinct, request_candidates, group_counts, cross)
        since = first_taken[row % len(first_taken)]
        write_repeats(request_history[since:], history_age_days[row, since:], n_items, request_candidates, column_of, cross)
        length, idle = log1p(n_distinct) * SCALE, log1p(idle_days) * SCALE
        for place in range(len(request_candidates)):
            cross[place, RANK], cross[place, LENGTH], cross[place, IDLE] = ranks[place], length, idle
            cross[place, TOGETHER], cross[place, LIVE] = 0.0, 0.0  # written later, where there are live events
            if request_candidates[place] == n_items:
                cross[place] = 0.0
            for number in range(n_numbers):
                pairs[row, place, number] = item_numbers[request_candidates[place], number]


@compiled
def write_repeats(history, age_days, n_items, candidates, column_of, cross):
    """Write how often the history has each candidate, and the days since the newest time, as scaled logarithms; 0 for never."""
    cross[:, TAKEN : TAKEN + 2] = 0.0
    if not len(history):
        return
    for place in range(len(candidates)):
        column_of[candidates[place]] = place
    column_of[n_items] = -1
    for age in range(len(history)):
        place = column_of[history[age]]
        if place >= 0:
            if cross[place, TAKEN] == 0 and 0 < age_days[age] < np.inf:
                cross[place, TAKEN + 1] = log1p(age_days[age]) * SCALE
            cross[place, TAKEN] += 1.0
    for place in range(len(candidates)):
        column_of[candidates[place]] = -1
        cross[place, TAKEN] = log1p(cross[place, TAKEN]) * SCALE


@compiled
def read_ahead_of_request(neighbours, neighbour_weights, per_candidate, history, candidates):
    """Prefetch the rows of a request: they are scattered, and cache misses one by one cost more than the arithmetic."""
    read_ahead(neighbours, history)
    read_ahead(neighbour_weights, history)
    for array in literal_unroll(per_candidate):
        read_ahead(array, candidates)


@compiled
def sum_affinities(neighbours, neighbour_weights, history, recent, n_distinct, candidates, column_of, values):
    """Sum each candidate's affinity with one history, by view, into `values`, float64 [C, LOGARITHM].

    neighbour_weights: uint16, the bits of float16; recent, n_distinct: from `weigh_by_recency`
    """
    for place in range(len(candidates)):
        column_of[candidates[place]] = place
    column_of[len(neighbours) - 1] = -1
    values[:, AFFINITY:] = 0.0
    named = np.empty(neighbours.shape[1], np.int32)
    even, total = np.float32(1.0 / np.sqrt(max(n_distinct, 1))), np.float32(max(recent.sum(), 1.0))
    latest = np.float32(2.0)
    for age in range(len(history)):
        if recent[age] == 0:
            continue
        item, newest = history[age], recent[age] / total
        latest *= np.float32(0.5)
        n_named = 0
        for number in range(neighbours.shape[1]):  # without a branch, which would be mispredicted half of the time
            named[n_named] = number
            n_named += column_of[neighbours[item, number]] >= 0
        for number in named[:n_named]:
            place = column_of[neighbours[item, number]]
            for view in range(len(VIEWS)):
                strength = decode_half(neighbour_weights[item, number, view])
                values[place, AFFINITY + len(WEIGHTINGS) * view] += strength * even
                values[place, AFFINITY + len(WEIGHTINGS) * view + 1] += strength * newest
                values[place, AFFINITY + len(WEIGHTINGS) * view + 2] += strength * latest
    for place in range(len(candidates)):
        column_of[candidates[place]] = -1


@compiled
def decode_half(bits):
    """Return the float32 of a non-negative float16; bits: uint16."""
    return np.int32(np.int32(bits) << 13).view(np.float32) * np.float32(2.0**112)


@compiled
def log1p(values):
    """Return log(1 + values) in float64: exact enough for millionths of a day, three times as fast as the C library's."""
    return np.log(1.0 + values)


@compiled
def write_standardized(values, candidates, n_items, cross):
    """Write values, float64 [C, LOGARITHM], standardised over the candidates (mean 0, standard deviation 1)."""
    count, mean, scale = 0, np.zeros(LOGARITHM), np.zeros(LOGARITHM)
    for place in range(len(candidates)):
        if candidates[place] != n_items:
            count += 1
            for number in range(LOGARITHM):
                mean[number] += values[place, number]
    mean /= max(count, 1)
    for place in range(len(candidates)):
        if candidates[place] != n_items:
            for number in range(LOGARITHM):
                scale[number] += (values[place, number] - mean[number]) ** 2
    for number in range(LOGARITHM):
        scale[number] = 1.0 / (np.sqrt(scale[number] / max(count, 1)) + SMALLEST_DEVIATION)
    for place in range(len(candidates)):
        for number in range(LOGARITHM):
            cross[place, number] = (values[place, number] - mean[number]) * scale[number]


@compiled
def write_logarithms(values, cross):
    """Write the logarithms of affinities; those of 0, which are many, are computed once."""
    nothing = np.log(np.float32(SMALLEST_WEIGHT)) * np.float32(SCALE)
    for place in range(len(values)):
        for view in range(len(VIEWS)):
            is_named = values[place, AFFINITY + len(WEIGHTINGS) * view] > 0
            for number in range(len(WEIGHTINGS) * view, len(WEIGHTINGS) * (view + 1)):
                logarithm = nothing
                if is_named:
                    logarithm = np.log(np.float32(values[place, AFFINITY + number] + SMALLEST_WEIGHT)) * np.float32(SCALE)
                cross[place, LOGARITHM + number] = logarithm


@compiled
def write_sales(popularity, popularity_then, sold_days, log_days, bucket_days, idle_days, candidates, cross):
    """Write an item's popularity: now, and around the user's last visit; and its first and latest sale after that visit.

    The popularity around the visit is written alone, and relative to that of all time.
    An item that came after a user's last visit is new to that user, who passed over the older ones.
    idle_days: float32, from the last event of the history to the clock
    """
    last = popularity_then.shape[1] - 1
    bucket = int(min(max((np.float32(log_days) - idle_days) // np.float32(bucket_days), 0.0), last))
    for place in range(len(candidates)):
        item = candidates[place]
        for number in range(popularity.shape[1]):
            cross[place, POPULARITY + number] = popularity[item, number]
        former_popularity = decode_half(popularity_then[item, bucket])
        cross[place, THEN] = former_popularity
        cross[place, THEN + 1] = former_popularity - popularity[item, 0]
        for number in range(sold_days.shape[1]):
            after = idle_days - sold_days[item, number]  # days from the last visit to the sale
            cross[place, SOLD + number] = np.copysign(log1p(abs(after)), after) * SCALE


@compiled
def write_group_shares(groups, history, recent, n_distinct, candidates, group_counts, cross):
    """Write the share of the history in the candidate's category and provider."""
    for place in range(len(history)):
        for kind in range(groups.shape[1]):
            if recent[place] > 0 and groups[history[place], kind] >= 0:
                group_counts[groups[history[place], kind], kind] += 1
    for place in range(len(candidates)):
        for kind in range(groups.shape[1]):
            group = groups[candidates[place], kind]
            cross[place, SHARE + kind] = group_counts[group, kind] / max(n_distinct, 1) if group >= 0 else 0.0
    for place in range(len(history)):
        for kind in range(groups.shape[1]):
            if groups[history[place], kind] >= 0:
                group_counts[groups[history[place], kind], kind] = 0
