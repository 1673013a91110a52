"""Pairs of items taken together since the export: counts equal those of a slow reference, live and in training."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from serving.contract.artifacts import find_stage_folder
from serving.live.events import Flags
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.pipeline import Pipeline
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import SCALE
from serving.stages.live.catalogue.candidates import put_new_and_pinned
from serving.stages.live.counts.pair_counts import KEPT_COMPANIONS, MOST_CANDIDATES, OWN_ITEMS, PairCounts
from serving.stages.live.counts.pairs import StoredPairs
from serving.stages.live.counts.visits import VISIT_S
from serving.stages.search.search import Blocked
from tests.unit.live import toy_log
from tests.unit.live.answers import event_inputs, last_event_ms
from tests.unit.live.toy_log import START_S
from training.models.rankers.live_pairs import find_pairs, put_live_pairs

N_ITEMS, LONGEST = 30, Layout().history
ITEMS = ItemIndex(np.arange(N_ITEMS) * 10)


def draw_log(count: int) -> pd.DataFrame:
    """Events of 20 users, some minutes to hours apart, of items that are 10 times their positions."""
    rng = np.random.default_rng(3)
    times_s = START_S + np.cumsum(rng.integers(60, 1_200, count))
    columns = {"user_id": rng.integers(0, 20, count), "item_id": rng.integers(0, N_ITEMS, count) * 10, "timestamp": times_s}
    return pd.DataFrame(columns | {"positive": rng.random(count) < 0.8})


def count_slowly(log: pd.DataFrame, first: int = 0) -> Counter:
    """Count the pairs of item positions whose newer event is in row `first` or later."""
    counts: Counter = Counter()
    history: dict[int, list[tuple[int, int]]] = {}
    for row, (user, item, time_s, positive) in enumerate(log.itertuples(index=False)):
        if not positive:
            continue
        visit = {other for other, other_s in history.get(user, []) if time_s - other_s <= VISIT_S}
        if row >= first and item not in visit:
            for other in visit:
                counts[item // 10, other // 10] += 1
                counts[other // 10, item // 10] += 1
        history.setdefault(user, []).append((item, time_s))
    return counts


def read_strengths(pairs: PairCounts) -> np.ndarray:
    """Return the strength of each item for each history of one item, [N_ITEMS, N_ITEMS]."""
    everything = np.broadcast_to(np.arange(N_ITEMS), (N_ITEMS, N_ITEMS)).copy()
    return pairs.sum_strengths(np.arange(N_ITEMS)[:, None], everything)[0]


def make_matrix(counts: Counter) -> np.ndarray:
    matrix = np.zeros((N_ITEMS, N_ITEMS))
    for pair, count in counts.items():
        matrix[pair] = count
    return matrix


def write(folder: Path, log: pd.DataFrame) -> None:
    toy_log.write(folder, log.assign(weight=1.0), np.where(log["positive"], Flags.POSITIVE, 0) | Flags.COUNTED)


def read(stored: StoredPairs, log_reader: Reader, after: int | None) -> int:
    """Count the events after sequence `after`, or all events anew if it is None. Return the last sequence."""
    with log_reader.snapshot() as snapshot:
        stored.count(stored.find(snapshot, None if after is None else snapshot.read_headers_since(after)))
        return snapshot.read_progress().last_sequence


@pytest.mark.parametrize("at_once", [1, 7, 100, 600])
def test_batches_of_events_and_the_whole_store_give_the_counts_of_the_reference(log_reader, at_once):
    log = draw_log(600)
    stored, after = StoredPairs(ITEMS), 0
    for start in range(0, len(log), at_once):
        write(log_reader.folder, log.iloc[start : start + at_once])
        after = read(stored, log_reader, after)
    expected = make_matrix(count_slowly(log))
    assert (expected > 0).sum() > 200
    np.testing.assert_allclose(read_strengths(stored.pairs), expected, rtol=1e-6)
    anew = StoredPairs(ITEMS)
    read(anew, log_reader, None)
    np.testing.assert_allclose(read_strengths(anew.pairs), expected, rtol=1e-6)


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_pairs_of_a_backlog_that_is_read_in_parts_count_once(log_reader, at_once):
    log = draw_log(600)
    write(log_reader.folder, log)
    stored = StoredPairs(ITEMS)
    with log_reader.snapshot() as snapshot:
        headers = snapshot.read_headers_since(0)
        for start in range(0, len(log), at_once):
            stored.count(stored.find(snapshot, headers[start : start + at_once]))
    np.testing.assert_allclose(read_strengths(stored.pairs), make_matrix(count_slowly(log)), rtol=1e-6)


def test_pairs_that_the_generation_learned_from_do_not_count_again(log_reader):
    log = draw_log(600)
    write(log_reader.folder, log)
    stored = StoredPairs(ITEMS, learned_until_s=int(log["timestamp"].iloc[399]))
    read(stored, log_reader, None)
    np.testing.assert_allclose(read_strengths(stored.pairs), make_matrix(count_slowly(log, 400)), rtol=1e-6)


def test_training_counts_what_a_live_store_would_have(log_reader):
    """A request counts the pairs whose newer event is after the split and before the request."""
    log = draw_log(600).assign(row=np.arange(600))
    rows, pairs = find_pairs(ITEMS, log, log.iloc[200:])
    assert (np.diff(rows) >= 0).all()
    live = PairCounts(N_ITEMS)
    live.add(pairs[rows < 500])
    np.testing.assert_allclose(read_strengths(live), make_matrix(count_slowly(log.iloc[:500, :4], 200)), rtol=1e-6)

    request_rows = np.array([210, 400, 599])
    history = np.full((3, LONGEST), N_ITEMS)
    history[:, :2] = [3, N_ITEMS], [7, 2], [11, 5]
    candidates = np.tile(np.arange(N_ITEMS), (3, 1))
    strengths = put_live_pairs(
        ITEMS, log, log.iloc[200:], request_rows, history, candidates, np.zeros((3, N_ITEMS), np.float32)
    )
    np.testing.assert_array_equal(candidates, np.tile(np.arange(N_ITEMS), (3, 1)))  # all are listed already
    for number, row in enumerate(request_rows):
        counts = count_slowly(log.iloc[:row, :4], 200)
        expected = [
            sum(counts[own, item] / (place + 1) for place, own in enumerate(history[number, :2])) for item in candidates[0]
        ]
        np.testing.assert_allclose(strengths[number], expected, rtol=1e-6)


def test_training_puts_companions_among_the_candidates():
    log = pd.DataFrame({"user_id": [1, 1, 2], "item_id": [30, 40, 30], "timestamp": START_S + np.arange(3), "positive": True})
    log = log.assign(row=np.arange(3))
    history, candidates = np.full((1, LONGEST), N_ITEMS), np.arange(5)[None].copy()
    history[0, 0] = 3
    scores = np.arange(5, 0, -1, dtype=np.float32)[None]
    strengths = put_live_pairs(ITEMS, log, log, np.array([2]), history, candidates, scores)
    assert (candidates.tolist(), strengths.tolist()) == ([[0, 1, 2, 3, 4]], [[0, 0, 0, 0, 1]])
    candidates[0, 4] = 9
    strengths = put_live_pairs(ITEMS, log, log, np.array([2]), history, candidates, scores)
    assert (candidates.tolist(), strengths.tolist()) == ([[0, 1, 2, 3, 4]], [[0, 0, 0, 0, 1]])
    assert scores.tolist() == [[5, 4, 3, 2, 2]]


def test_only_the_latest_distinct_items_of_a_history_count():
    pairs = PairCounts(N_ITEMS)
    pairs.add(np.array([[1, 20], [2, 20], [3, 20], [4, 20]]))
    history = np.array([[1, 1, 2, N_ITEMS, 3, 4]])
    assert OWN_ITEMS == 3
    expected = 1 + 1 / 2 + 1 / 3
    strengths, with_latest = pairs.sum_strengths(history, np.array([[20, 5]]))
    assert strengths.tolist() == [[pytest.approx(expected), 0.0]]
    assert with_latest.tolist() == [[1.0, 0.0]]


def test_strong_companions_become_candidates_in_place_of_the_last_ones():
    pairs = PairCounts(N_ITEMS)
    pairs.add(np.repeat([[1, 20], [1, 21], [1, 22], [1, 23], [1, 24]], [5, 4, 3, 2, 1], axis=0))
    servable = np.append(np.ones(N_ITEMS, bool), False)
    servable[21] = False
    blocked = Blocked(np.array([22]), np.array([0, 1]))
    positions, scores = np.array([[9, 23, 8, 7, 6]]), np.array([[5.0, 4.0, 3.0, 2.0, 1.0]], np.float32)
    pairs.put_candidates(np.array([[1]]), blocked, servable, positions, scores)
    assert (positions.tolist(), scores.tolist()) == ([[9, 23, 8, 20, 24]], [[5.0, 4.0, 3.0, 3.0, 3.0]])
    positions, scores = np.array([[9, N_ITEMS, N_ITEMS]]), np.array([[5.0, -np.inf, -np.inf]], np.float32)
    pairs.put_candidates(np.array([[1]]), blocked, servable, positions, scores)
    assert (positions.tolist(), scores.tolist()) == ([[20, 23, 24]], [[5.0, 5.0, 5.0]])


def test_lists_have_no_repeats_and_keep_their_first_candidates():
    rng = np.random.default_rng(0)
    n_items, width = 300, 40
    pairs, servable = PairCounts(n_items), np.append(rng.random(n_items) < 0.9, False)
    pairs.add(rng.integers(0, n_items, (20_000, 2)))
    for _ in range(50):
        positions = rng.permutation(n_items)[None, :width].copy()
        before, scores = positions.copy(), np.sort(rng.random((1, width), np.float32))[:, ::-1].copy()
        blocked = rng.integers(0, n_items, 20)
        pairs.put_candidates(
            rng.integers(0, n_items, (1, 10)), Blocked(blocked, np.array([0, 20])), servable, positions, scores
        )
        assert len(set(positions[0].tolist())) == width
        changed = np.flatnonzero(positions[0] != before[0])
        assert 0 < len(changed) <= MOST_CANDIDATES
        assert changed.min() >= width - MOST_CANDIDATES
        assert servable[positions[0, changed]].all()
        assert not np.isin(positions[0, changed], blocked).any()
        assert (np.diff(scores[0]) <= 0).all()


def test_an_item_with_too_many_companions_keeps_the_strongest_and_overstates_none():
    rng = np.random.default_rng(1)
    strong, n_pairs = np.arange(1, 9), 4_000
    others = np.where(rng.random(n_pairs) < 0.4, rng.choice(strong, n_pairs), rng.integers(100, 1_000, n_pairs))
    pairs = PairCounts(1_000)
    pairs.add(np.stack([np.zeros_like(others), others], axis=1))
    true = np.bincount(others, minlength=1_000)
    counted = pairs.sum_strengths(np.array([[0]]), np.arange(1_000)[None])[0][0]
    assert (counted <= true).all()
    assert (true - counted).max() <= n_pairs / (KEPT_COMPANIONS + 1)
    assert (counted[strong] > 0).all()


def test_rows_stop_growing_when_the_pool_is_used_up_and_overstate_nothing():
    rng, n_items = np.random.default_rng(3), 300
    drawn = rng.integers(0, n_items, (40_000, 2))
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    true = np.zeros((n_items, n_items))
    np.add.at(true, (drawn[:, 0], drawn[:, 1]), 1)
    true += true.T
    pairs = PairCounts(n_items, most_places=8_192)
    pairs.add(drawn)
    pairs.add(np.repeat([[0, 1]], 1_000, axis=0))
    true[[0, 1], [1, 0]] += 1_000
    everything = np.broadcast_to(np.arange(n_items), (n_items, n_items)).copy()
    counted, _ = pairs.sum_strengths(np.arange(n_items)[:, None], everything)
    assert len(pairs.rows.positions) == 8_192
    assert (counted <= true).all()
    assert (counted > 0).any(axis=1).mean() > 0.9
    assert min(counted[0, 1], counted[1, 0]) > 900


def test_counts_of_many_items_equal_the_twins():
    """More than the first rows of the arrays."""
    drawn = np.random.default_rng(2).integers(0, 500, (2_000, 2))
    drawn, pairs = drawn[drawn[:, 0] != drawn[:, 1]], PairCounts(500)
    for start in range(0, len(drawn), 300):
        pairs.add(drawn[start : start + 300])
    expected = np.zeros((500, 500))
    np.add.at(expected, (drawn[:, 0], drawn[:, 1]), 1)
    expected += expected.T
    assert (expected > 0).sum(axis=1).max() <= KEPT_COMPANIONS
    everything = np.broadcast_to(np.arange(500), (500, 500)).copy()
    np.testing.assert_array_equal(pairs.sum_strengths(np.arange(500)[:, None], everything)[0], expected)


def test_counts_do_not_depend_on_how_many_pairs_are_added_at_once_and_fill_their_memory():
    """Rows move and are packed several times on the way, with few companions for some items and many for others."""
    rng, n_items = np.random.default_rng(4), 2_000
    drawn = np.minimum(rng.geometric(0.005, (60_000, 2)), n_items - 1)
    drawn = drawn[drawn[:, 0] != drawn[:, 1]]
    at_once, in_parts = PairCounts(n_items), PairCounts(n_items)
    at_once.add(drawn)
    for start in range(0, len(drawn), 777):
        in_parts.add(drawn[start : start + 777])
    history = np.arange(n_items)[:, None]
    for first in range(0, n_items, 500):
        everything = np.broadcast_to(np.arange(first, first + 500), (n_items, 500)).copy()
        counted, in_turn = (pairs.sum_strengths(history, everything)[0] for pairs in (at_once, in_parts))
        np.testing.assert_array_equal(counted, in_turn)
    assert in_parts.n_places < 2.2 * in_parts.rows.lengths.sum()


def test_new_items_and_companions_both_become_candidates():
    pairs, n_items, width = PairCounts(100), 100, 20
    pairs.add(np.array([[1, 50], [1, 51], [1, 90]]))
    vectors, newcomers = np.ones((n_items, 2), np.float32), np.arange(88, 92)
    positions, scores = np.arange(2, 2 + width)[None], np.linspace(9, 1, width, dtype=np.float32)[None]
    servable, nothing = np.append(np.ones(n_items, bool), False), Blocked(np.empty(0, np.int64), np.zeros(2, np.int64))
    pairs.put_candidates(np.array([[1]]), nothing, servable, positions, scores, n_spared=len(newcomers))
    assert (np.diff(scores[0]) <= 0).all()
    put_new_and_pinned(newcomers, np.empty(0, np.int64), vectors, np.ones((1, 2), np.float32), *nothing, positions, scores)
    assert {50, 51, 88, 89, 90, 91} <= set(positions[0].tolist())
    assert len(set(positions[0].tolist())) == width


def test_repeating_a_pair_and_erased_events_push_nothing(log_reader):
    items, times_s = np.array([10, 20] * 10), START_S + 60 * np.arange(20)
    write(log_reader.folder, pd.DataFrame({"user_id": 1, "item_id": items, "timestamp": times_s, "positive": True}))
    stored = StoredPairs(ITEMS)
    with log_reader.snapshot() as snapshot:
        headers = snapshot.read_headers_since(0).copy()
        stored.count(stored.find(snapshot, headers))
        headers["flags"] |= Flags.ERASED
        assert len(stored.find(snapshot, headers)) == 0
    np.testing.assert_allclose(read_strengths(stored.pairs), make_matrix(Counter({(1, 2): 1, (2, 1): 1})))


def test_unknown_items_and_the_padding_of_histories_form_no_pairs(log_reader):
    log = pd.DataFrame(
        {"user_id": [1, 1, 1], "item_id": [10, 999_999, 20], "timestamp": START_S + np.arange(3), "positive": True}
    )
    write(log_reader.folder, log)
    stored = StoredPairs(ITEMS)
    read(stored, log_reader, 0)
    np.testing.assert_allclose(read_strengths(stored.pairs), make_matrix(Counter({(1, 2): 1, (2, 1): 1})), rtol=1e-6)


def test_a_companion_rises_for_users_who_have_its_item(repository, observe, reader):
    """By log(1 + 3 * strength / (1 + sales before the export)): the generation's lists hold the pairs of items that sold.

    A companion of the latest item gains half of log(1 + pairs) more.
    """
    at_ms, first, second = last_event_ms(repository), 3, 5
    users = np.repeat(np.arange(101, 106), 2)
    times_ms = at_ms + 60_000 * np.arange(10)
    observe(event_inputs(user_id=users.tolist(), item_id=[first, second] * 5, timestamp_ms=times_ms.tolist()))
    later_ms = at_ms + 60_000 * np.array([20, 20, 20 + 9 * 60])  # the last one in a visit of its own
    observe(event_inputs(user_id=[200, 201, 201], item_id=[first, first, 7], timestamp_ms=later_ms.tolist()))
    pipeline = Pipeline.load(repository, live=reader)
    trace = pipeline.trace({"user_id": np.array([[200], [201]])})
    rank = pipeline.stages["rank"]
    is_asked = trace["candidate_ids"] == second
    asked = rank.inputs.items.find_positions(np.array([[second]]))
    assert trace["taken_together"][is_asked].tolist() == [5, 2.5]
    assert trace["taken_with_latest"][is_asked].tolist() == [5, 0]
    without = replace(rank, inputs=replace(rank.inputs, novelty=None))
    fields = {tensor.name: trace[tensor.name] for tensor in pipeline.specs["rank"].input_fields}
    lifts = rank(fields)["rank_scores"] - without(fields)["rank_scores"]
    sold = np.expm1(np.load(find_stage_folder(repository, "rank", 1) / "popularity.npy")[:, 0] / SCALE)
    assert sold[asked] > 0
    expected = np.log1p(3 * np.array([5, 5 / 2]) / (1 + sold[asked].item())) + np.array([np.log(1 + 5) / 2, 0])
    np.testing.assert_allclose(lifts[is_asked], expected, rtol=1e-4)
    assert np.count_nonzero(np.abs(lifts) > 1e-5) == 2
