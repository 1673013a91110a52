"""The search against a slow exact twin, whole or by index, with everything that may be blocked."""

import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import faiss
import numpy as np
import pytest
from numba import TypingError

from serving.contract.tensors import Sources
from serving.loops.inner_product import compute_inner_product
from serving.stages.search.loading import load_search
from serving.stages.search.loops import select_smallest
from serving.stages.search.search import (
    INDEX_FILE,
    Blocked,
    Neighbours,
    Search,
    compute_mean_item,
    compute_recency_weights,
    make_index_queries,
)
from tests.interrupting import called_on_return
from training.retrieval.index import make_index_vectors

N_ITEMS, WIDTH, HISTORY, N_NEIGHBOURS, B = 300, 8, 6, 5, 12


def random_catalogue(seed: int = 0) -> tuple[np.ndarray, Neighbours, np.ndarray]:
    """Return item vectors, neighbours and which items are available."""
    rng = np.random.default_rng(seed)
    positions = np.stack([rng.permutation(N_ITEMS)[:N_NEIGHBOURS] for _ in range(N_ITEMS + 1)]).astype(np.int32)
    weights = rng.random(positions.shape).astype(np.float32)
    positions[:, -1], weights[:, -1] = N_ITEMS, 0.0  # short lists are padded
    positions[-1], weights[-1] = N_ITEMS, 0.0
    vectors = rng.normal(size=(N_ITEMS, WIDTH)).astype(np.float32)
    return vectors, Neighbours(positions, weights), rng.random(N_ITEMS) < 0.9


def random_requests(seed: int = 1, most_blocked: int = 40) -> tuple[np.ndarray, np.ndarray, Blocked]:
    rng = np.random.default_rng(seed)
    users = rng.normal(size=(B, WIDTH)).astype(np.float32)
    history = rng.integers(0, N_ITEMS, (B, HISTORY))
    history[0] = N_ITEMS  # nothing known
    history[1, 3:] = N_ITEMS
    history[2, 1] = history[2, 0]  # bought twice
    starts = np.append(0, np.cumsum(rng.integers(0, most_blocked + 1, B)))
    return users, history, Blocked(rng.integers(0, N_ITEMS + 1, starts[-1]), starts)


def nothing_blocked(n_rows):
    return Blocked(np.empty(0, np.int64), np.zeros(n_rows + 1, np.int64))


def flat_index(vectors, available):
    index = faiss.IndexIDMap(faiss.IndexFlatL2(WIDTH + 1))
    index.add_with_ids(make_index_vectors(vectors[available]), np.flatnonzero(available))
    return index


def lists_index(vectors, available, n_searched=2):
    """Return an index that searches some of its 30 lists."""
    moved, index = make_index_vectors(vectors[available]), faiss.IndexIVFFlat(faiss.IndexFlatL2(WIDTH + 1), WIDTH + 1, 30)
    index.train(moved)
    index.add_with_ids(moved, np.flatnonzero(available))
    index.nprobe = n_searched
    return index


def recency_weights_slowly(history: np.ndarray, n_items: int) -> np.ndarray:
    """int [B, H], newest first -> float32 [B, H]: (1 + r) ** -0.5 for the r-th distinct item, 0 for repeats and padding."""
    weights = np.zeros(history.shape, np.float32)
    for row, own in enumerate(history.tolist()):
        distinct = list(dict.fromkeys(item for item in own if item != n_items))
        for rank, item in enumerate(distinct):
            weights[row, own.index(item)] = (1 + rank) ** -0.5
    return weights


def inner_product_slowly(a: np.ndarray, b: np.ndarray) -> np.float32:
    """float32 [D], float32 [D] -> float32: sixteen sums, halved; then what is left over by sixteen."""
    products = a * b
    whole = len(a) // 16 * 16
    sums = np.zeros(16, np.float32)
    for start in range(0, whole, 16):
        sums = sums + products[start : start + 16]
    while len(sums) > 1:
        sums = sums[: len(sums) // 2] + sums[len(sums) // 2 :]
    total = sums[0]
    for product in products[whole:]:
        total = total + product
    return total


def search_item_by_item(vectors, neighbours, available, users, history, blocked, count):
    """Item by item, as the module's docstring defines the score."""
    positions = np.full((len(users), count), N_ITEMS)
    scores = np.full((len(users), count), -np.inf)
    for row, user in enumerate(users):
        forbidden = set(blocked.positions[blocked.starts[row] : blocked.starts[row + 1]].tolist())
        score = {i: float(user.astype(np.float64) @ vectors[i]) for i in range(N_ITEMS)}
        distinct = list(dict.fromkeys(i for i in history[row].tolist() if i != N_ITEMS))
        for rank, item in enumerate(distinct):
            for other, weight in zip(neighbours.positions[item], neighbours.weights[item], strict=True):
                if other != N_ITEMS:
                    score[other] += (1 + rank) ** -0.5 * float(weight)
        servable = [i for i in range(N_ITEMS) if available[i] and i not in forbidden]
        for place, item in enumerate(sorted(servable, key=lambda i: (-score[i], i))[:count]):
            positions[row, place], scores[row, place] = item, score[item]
    return positions, scores


def test_sources_are_the_terms_above_those_of_the_mean_item_item_by_item():
    (vectors, neighbours, available), (users, history, blocked) = random_catalogue(), random_requests()
    vectors[:, -1] -= 9.0  # popularity: the logarithm of a share, so below 0 for every item
    users[:, -1] = 1.0
    columns = {Sources.GRAPH: slice(0, 3), Sources.TWO_TOWER: slice(3, WIDTH)}
    parts = columns | {Sources.TWO_TOWER: slice(3, WIDTH - 1), Sources.POPULAR: slice(WIDTH - 1, WIDTH)}
    search, mean_item = Search(vectors, neighbours, available), vectors[available].mean(axis=0)
    np.testing.assert_allclose(compute_mean_item(vectors, available), mean_item, atol=1e-5)
    asked = users, history, np.append(np.tile(np.arange(N_ITEMS), (B, 1)), np.full((B, 2), N_ITEMS), axis=1)
    before = search(users, history, blocked, 20)
    for row, marks in enumerate(search.find_sources(*asked, columns, mean_item)):
        for item in range(N_ITEMS):
            expected = Sources.NONE
            for source, part in parts.items():
                above = users[row, part] @ vectors[item, part] > users[row, part] @ mean_item[part]
                expected |= source if above else Sources.NONE
            listed = neighbours.positions[history[row]] == item
            expected |= Sources.BOUGHT_TOGETHER if (neighbours.weights[history[row]][listed] > 0).any() else Sources.NONE
            assert Sources(int(marks[item])) == expected
        assert not marks[N_ITEMS:].any()
    for again, first in zip(search(users, history, blocked, 20), before, strict=True):
        np.testing.assert_array_equal(again, first)


def test_the_mean_item_is_zero_without_available_ones_and_that_of_items_from_all_of_a_large_catalogue(monkeypatch):
    vectors, _, available = random_catalogue()
    np.testing.assert_array_equal(compute_mean_item(vectors, np.zeros_like(available)), np.zeros(WIDTH, np.float32))
    monkeypatch.setattr("serving.stages.search.search.MOST_AVERAGED", 10)
    assert compute_mean_item(np.arange(100, dtype=np.float32)[:, None], np.ones(100, bool)) == 45.0  # of 0, 10, … 90


@pytest.mark.parametrize("count", [1, 20, N_ITEMS + 10])
@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "by index"])
def test_search_equals_the_slow_twin(whole, count):
    catalogue, requests = random_catalogue(), random_requests()
    search = Search(*catalogue, index=None if whole else flat_index(catalogue[0], catalogue[2]))
    positions, scores = search(*requests, count)
    slow_positions, slow_scores = search_item_by_item(*catalogue, *requests, count)
    np.testing.assert_array_equal(positions, slow_positions)
    np.testing.assert_allclose(scores, slow_scores, atol=1e-5)
    assert (positions.dtype, scores.dtype) == (np.int64, np.float32)


def test_rows_left_short_by_the_filters_are_searched_exactly(monkeypatch):
    """An index that may give 25 answers cannot leave 20 when 200 are blocked: those rows are widened, the others are not."""
    catalogue = random_catalogue()
    users, history, _ = random_requests()
    best = search_item_by_item(*catalogue, users[:1], history[:1], nothing_blocked(1), 200)[0][0]
    blocked = Blocked(best, np.where(np.arange(B + 1) > 0, 200, 0))  # of the first request
    monkeypatch.setattr("serving.stages.search.search.MOST_ANN_RESULTS", 25)
    search = Search(*catalogue, index=flat_index(catalogue[0], catalogue[2]))
    widened = []
    with called_on_return(lambda: widened.append(1), Search.search_exactly):
        positions, _ = search(users, history, blocked, 20)
    np.testing.assert_array_equal(positions, search_item_by_item(*catalogue, users, history, blocked, 20)[0])
    assert len(widened) == 1


@pytest.mark.parametrize("make_index", [flat_index, partial(lists_index, n_searched=25)])
def test_an_index_passes_over_items_that_are_no_longer_served(monkeypatch, make_index):
    """However many it holds, so no request is searched exactly. No items are blocked, and no history is known."""
    vectors, neighbours, available = random_catalogue()
    users, history, nothing = random_requests()[0], np.full((B, HISTORY), N_ITEMS), nothing_blocked(B)
    index = make_index(vectors, available)
    search = Search(vectors, neighbours, available.copy(), index=index)
    monkeypatch.setattr("serving.stages.search.search.MOST_ANN_RESULTS", 25)
    best = np.unique(search(users, history, nothing, 25)[0])
    search.rule_out(best)
    searched_exactly = []
    with called_on_return(lambda: searched_exactly.append(1), Search.search_exactly):
        positions, _ = search(users, history, nothing, 5)
    assert not searched_exactly
    # the slow twin: the index's whole ranking, without those items
    ranked = index.search(make_index_queries(users), index.ntotal)[1]
    for row in range(B):
        assert positions[row].tolist() == [item for item in ranked[row].tolist() if item not in set(best)][:5]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "by index"])
def test_answers_do_not_depend_on_batch_mates_bit_for_bit(whole, size):
    catalogue, (users, history, blocked) = random_catalogue(), random_requests()
    search = Search(*catalogue, index=None if whole else flat_index(catalogue[0], catalogue[2]))
    positions, scores = search(users, history, blocked, 20)
    for start in range(0, B, size):
        rows = slice(start, start + size)
        mine = Blocked(blocked.positions, blocked.starts[start : start + size + 1])
        own = search(users[rows], history[rows], mine, 20)
        np.testing.assert_array_equal(own[0], positions[rows])
        np.testing.assert_array_equal(own[1], scores[rows])


def test_a_user_is_shown_the_same_lists_alone_and_among_many(tmp_path):
    """Faiss ranks the lists of 20 queries and more by BLAS, which rounds otherwise: of equal lists others are searched."""
    catalogue, rng = random_catalogue(), np.random.default_rng(2)
    vectors, neighbours, available = catalogue
    faiss.write_index(lists_index(vectors, available), str(tmp_path / INDEX_FILE))
    neighbours.save(tmp_path)
    np.save(tmp_path / "available.npy", available)
    np.save(tmp_path / "item_vectors.npy", vectors)
    search = load_search(tmp_path, "lists")
    asked = make_index_queries(rng.normal(size=(4_000, WIDTH)).astype(np.float32))
    together = search.index.quantizer.search(asked, 30)[0]
    alone = np.concatenate([search.index.quantizer.search(query[None], 30)[0] for query in asked])
    np.testing.assert_array_equal(together, alone)


def test_padding_only_when_the_catalogue_has_no_more():
    catalogue = random_catalogue()
    users, history, _ = random_requests()
    n_left = 3
    left = np.flatnonzero(catalogue[2])[:n_left]
    others = np.setdiff1d(np.arange(N_ITEMS), left)
    blocked = Blocked(np.tile(others, B), np.arange(B + 1) * len(others))
    for index in (None, flat_index(catalogue[0], catalogue[2]), lists_index(catalogue[0], catalogue[2])):
        positions, scores = Search(*catalogue, index=index)(users, history, blocked, 5)
        np.testing.assert_array_equal(np.sort(positions[:, :n_left], axis=1), np.tile(left, (B, 1)))
        assert (positions[:, n_left:] == N_ITEMS).all()
        assert np.isneginf(scores[:, n_left:]).all()


def test_recency_weights_count_distinct_items_only():
    history = np.array([[7, 7, 3, N_ITEMS, 7, 9], [N_ITEMS] * 6])
    expected = [[1, 0, 2**-0.5, 0, 0, 3**-0.5], [0] * 6]
    np.testing.assert_allclose(compute_recency_weights(history, N_ITEMS), np.array(expected), rtol=1e-6)


def test_recency_weights_equal_the_slow_twin():
    for width, n_items, kind in itertools.product([0, 1, 7, 64], [2, 40, 100_000], [np.int32, np.int64]):
        history = np.random.default_rng(0).integers(0, n_items + 1, (30, width)).astype(kind)
        got, expected = compute_recency_weights(history, n_items), recency_weights_slowly(history, n_items)
        np.testing.assert_array_equal(got, expected, err_msg=f"{width} of {n_items}, {kind}")


def test_recency_weights_of_long_histories_are_rounded_as_powers_are():
    history = np.arange(5_000)[None]
    np.testing.assert_array_equal(compute_recency_weights(history, 5_000), np.float32((1.0 + history) ** -0.5))


@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "by index"])
@pytest.mark.parametrize("seed", range(6))
def test_the_slow_twin_and_the_loops_find_the_same_of_many_equal_scores(whole, seed):
    """Small whole numbers: scores are exact and often equal, and the lower position comes first."""
    rng = np.random.default_rng(seed)
    vectors, neighbours, available = random_catalogue(seed)
    vectors = rng.integers(-1, 2, vectors.shape).astype(np.float32)
    users = rng.integers(-1, 2, (B, WIDTH)).astype(np.float32)
    neighbours = Neighbours(neighbours.positions, np.where(neighbours.weights > 0, np.float32(1), np.float32(0)))
    history = np.full((B, HISTORY), N_ITEMS)
    history[1:, seed % HISTORY] = rng.integers(0, N_ITEMS, B - 1)  # one item each, whose weight is exactly 1; none of the first
    _, _, blocked = random_requests(seed)
    everything = Blocked(np.tile(np.arange(N_ITEMS), B), np.arange(B + 1) * N_ITEMS)
    search = Search(vectors, neighbours, available, index=None if whole else flat_index(vectors, available))
    for forbidden, count in ((blocked, 20), (blocked, N_ITEMS), (nothing_blocked(B), 7), (everything, 5)):
        expected = search_item_by_item(vectors, neighbours, available, users, history, forbidden, count)
        if whole or count == N_ITEMS:  # an index may leave out some of many items that are equally near
            np.testing.assert_array_equal(search(users, history, forbidden, count)[0], expected[0])
        np.testing.assert_array_equal(search(users, history, forbidden, count)[1], expected[1])


@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "by index"])
def test_threads_that_share_a_search_are_answered_as_one_is(whole):
    catalogue = random_catalogue()
    search = Search(*catalogue, index=None if whole else flat_index(catalogue[0], catalogue[2]))
    asked = [random_requests(seed) for seed in range(4)]
    expected = [search(*requests, 20) for requests in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        for _ in range(50):
            answers = threads.map(search, *zip(*asked, strict=True), [20] * len(asked))
            for got, wanted in zip(answers, expected, strict=True):
                np.testing.assert_array_equal(got[0], wanted[0])
                np.testing.assert_array_equal(got[1], wanted[1])


@pytest.mark.parametrize("change", [lambda array: array.astype(np.float64), np.asfortranarray], ids=["float64", "strided"])
def test_vectors_that_lanes_cannot_read_are_refused(change):
    vectors = change(np.ones((3, 32), np.float32))
    with pytest.raises(TypingError, match="lanes cannot read"):
        compute_inner_product(vectors[0], vectors[1])


@pytest.mark.parametrize("whole", [True, False], ids=["whole catalogue", "by index"])
def test_loops_leave_their_arrays_as_they_found_them(whole):
    catalogue, requests = random_catalogue(), random_requests()
    search = Search(*catalogue, index=None if whole else flat_index(catalogue[0], catalogue[2]))
    first = search(*requests, 20)
    search(*random_requests(seed=2), 20)
    for again, expected in zip(search(*requests, 20), first, strict=True):
        np.testing.assert_array_equal(again, expected)


class ManyAtOnce:
    """A Faiss index as if on a GPU."""

    def __init__(self, index):
        self.index, self.ntotal, self.asked = index, index.ntotal, []

    def getDevice(self):
        return 0

    def search(self, queries, count):
        self.asked.append(len(queries))
        return self.index.search(queries, count)


def test_an_index_on_a_gpu_is_asked_once_and_finds_the_same():
    catalogue, requests = random_catalogue(), random_requests()
    index = flat_index(catalogue[0], catalogue[2])
    gpu = ManyAtOnce(index)
    for got, expected in zip(Search(*catalogue, gpu)(*requests, 20), Search(*catalogue, index)(*requests, 20), strict=True):
        np.testing.assert_array_equal(got, expected)
    assert gpu.asked == [B]


@pytest.mark.parametrize("width", [1, 5, 15, 16, 17, 63, 64, 65, 200])
def test_inner_products_are_summed_in_the_order_that_is_promised(width):
    for a, b in np.random.default_rng(width).normal(size=(50, 2, width)).astype(np.float32):
        assert compute_inner_product(a, b) == inner_product_slowly(a, b)


@pytest.mark.parametrize("order", ["random", "rising", "falling", "few values"])
def test_the_smallest_keys_come_first(order):
    for n_keys, count in itertools.product([0, 1, 2, 20, 1_000], [1, 2, 19, 20, 200, 1_000]):
        rng, case = np.random.default_rng(n_keys + count), f"{count} of {n_keys}"
        keys = rng.integers(-(2**60), 2**60, n_keys) if order == "random" else np.arange(n_keys)
        keys = {"falling": keys[::-1].copy(), "few values": keys % 3}.get(order, keys)
        expected = np.sort(keys)[:count]
        assert select_smallest(keys, n_keys, count) == len(expected), case
        np.testing.assert_array_equal(keys[: len(expected)], expected, err_msg=case)


def test_items_that_come_and_go_or_are_ruled_out_are_found_by_an_index_that_does_not_know_of_it():
    vectors, neighbours, available = random_catalogue()
    requests, rng = random_requests(), np.random.default_rng(8)
    search = Search(vectors, neighbours, available.copy(), index=flat_index(vectors, available))
    for _ in range(5):
        for item in rng.integers(0, N_ITEMS, 60).tolist():
            available[item] = rng.random() < 0.5
            search.set_available(item, bool(available[item]))
        ruled_out = rng.integers(0, N_ITEMS, 40)
        search.rule_out(ruled_out)
        positions, scores = search(*requests, 20)
        allowed = available & ~np.isin(np.arange(N_ITEMS), ruled_out)
        expected = Search(vectors, neighbours, allowed)(*requests, 20)
        np.testing.assert_array_equal(positions, expected[0])
        np.testing.assert_array_equal(scores, expected[1])


def test_an_item_that_comes_or_goes_costs_no_pass_over_all_that_the_index_lacks():
    """Counted as memory: a pass would make an array of the items. Other threads of the process may disturb a few changes."""
    n_items, rng = 20_000, np.random.default_rng(9)
    vectors = rng.normal(size=(n_items, WIDTH)).astype(np.float32)
    neighbours = Neighbours(np.full((n_items + 1, 1), n_items, np.int32), np.zeros((n_items + 1, 1), np.float32))
    available = np.arange(n_items) < 100
    search = Search(vectors, neighbours, available.copy(), index=flat_index(vectors, available))
    users, nothing = rng.normal(size=(B, WIDTH)).astype(np.float32), nothing_blocked(B)
    no_history = np.full((B, 1), n_items)
    for left_out in ([], range(150, n_items, 3), [99, n_items - 1]):
        now = np.ones(n_items, bool)
        now[left_out] = False
        changes, taken_bytes = list(enumerate(now.tolist())), np.zeros(n_items, np.int64)
        tracemalloc.start()
        try:
            for number, change in enumerate(changes):
                tracemalloc.reset_peak()
                before_bytes, _ = tracemalloc.get_traced_memory()
                search.set_available(*change)
                taken_bytes[number] = tracemalloc.get_traced_memory()[1] - before_bytes
        finally:
            tracemalloc.stop()
        assert np.sort(taken_bytes)[-10] < n_items // 2  # half of a byte for each item
        requests = (users, no_history, nothing, 20)
        for found, expected in zip(search(*requests), Search(vectors, neighbours, now)(*requests), strict=True):
            np.testing.assert_array_equal(found, expected)
