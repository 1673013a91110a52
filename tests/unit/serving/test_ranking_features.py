"""Cross features of the ranker against loops over history and neighbours."""

import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from serving.contract.errors import ArtifactError
from serving.stages.features.item_statistics import HORIZONS_DAYS, VIEWS, ItemStatistics
from serving.stages.features.ranking import (
    SCALE,
    compute_cross_features,
    compute_pair_numbers,
    list_feature_names,
    scale_aggregates,
)
from training.models.rankers.item_statistics import Sales, StatisticsSettings, Views, fit_statistics, number_visits

N_ITEMS, B, C, H = 40, 6, 12, 8
DAY = 86_400


def random_sales(seed):
    rng = np.random.default_rng(seed)
    return Sales.of(rng.integers(0, 30, 600), rng.integers(0, N_ITEMS - 1, 600), rng.integers(0, 90 * DAY, 600))


def random_statistics(seed=0):
    rng = np.random.default_rng(seed)
    groups = np.append(rng.integers(-1, 4, (N_ITEMS, 2)), [[-1, -1]], axis=0).astype(np.int32)
    return fit_statistics(random_sales(seed), N_ITEMS, 90 * DAY, groups, StatisticsSettings(neighbours=6))


def random_requests(seed=1):
    """Return (history, history_age_days, candidates, retrieval_scores)"""
    rng = np.random.default_rng(seed)
    history = rng.integers(0, N_ITEMS, (B, H))
    history[0] = N_ITEMS  # nothing known
    history[1, 3:] = N_ITEMS
    history[2, 1] = history[2, 0]  # taken twice
    ages = np.sort(rng.uniform(0, 80, (B, H)), axis=1).astype(np.float32)
    candidates = np.stack([rng.permutation(N_ITEMS)[:C] for _ in range(B)])
    candidates[3, 7:] = N_ITEMS
    candidates[4] = N_ITEMS
    scores = -np.sort(-rng.normal(size=(B, C)), axis=1).astype(np.float32)
    return history, ages, candidates, np.where(candidates < N_ITEMS, scores, -np.inf).astype(np.float32)


def slow_affinity(statistics, history, candidate):
    """[V, weightings] of one candidate: neighbour by neighbour."""
    distinct = list(dict.fromkeys(item for item in history.tolist() if item != N_ITEMS))
    recent = np.array([(1 + place) ** -0.5 for place in range(len(distinct))])
    recent = recent / max(recent.sum(), 1.0) if len(distinct) else recent
    total = np.zeros((len(VIEWS), 3))
    for place, item in enumerate(distinct):
        for neighbour, weights in zip(statistics.neighbours[item], statistics.neighbour_weights[item], strict=True):
            if neighbour == candidate:
                total[:, 0] += weights.astype(float) / np.sqrt(len(distinct))
                total[:, 1] += weights.astype(float) * recent[place]
                total[:, 2] += weights.astype(float) * 0.5**place
    return total


def slow_features(statistics, history, age, candidates, scores):
    """{feature name: [C]} of one request, written from the module's docstrings."""
    valid = [place for place, item in enumerate(candidates) if item != N_ITEMS]
    features = {name: np.zeros(len(candidates)) for name in list_feature_names()}
    distinct = list(dict.fromkeys(item for item in history.tolist() if item != N_ITEMS))
    idle = max(float(age[0]), 0.0) if distinct else 0.0

    def z(values):
        return (values - np.mean(values)) / (np.std(values) + 1e-6) if len(values) else values

    features["retrieval_score"][valid] = z(scores[valid].astype(float))
    affinity = np.array([slow_affinity(statistics, history, candidates[place]) for place in valid]).reshape(
        len(valid), len(VIEWS), 3
    )
    for view, name in enumerate(VIEWS):
        for number, weighting in enumerate(("even", "recent", "latest")):
            features[f"{name}_{weighting}"][valid] = z(affinity[:, view, number])
            features[f"{name}_{weighting}_log"][valid] = np.log(affinity[:, view, number] + 1e-3) * SCALE
    clock, n_buckets = statistics.clock, statistics.popularity_then.shape[1]
    bucket = int(np.clip((clock.log_days - idle) // clock.bucket_days, 0, n_buckets - 1))
    for place in valid:
        item = candidates[place]
        features["retrieval_rank"][place] = np.log1p(place) * SCALE
        for number, name in enumerate(("popularity", *(f"popularity_{days:.0f}d" for days in HORIZONS_DAYS))):
            features[name][place] = statistics.popularity[item, number]
        then = float(statistics.popularity_then[item, bucket])
        features["popularity_then"][place], features["trend_then"][place] = then, then - statistics.popularity[item, 0]
        for number, name in enumerate(("first_sold_since", "last_sold_since")):
            days = idle - statistics.sold_days[item, number]
            features[name][place] = np.sign(days) * np.log1p(abs(days)) * SCALE
        for kind, name in enumerate(("category_share", "provider_share")):
            group = statistics.groups[item, kind]
            same = sum(statistics.groups[other, kind] == group for other in distinct)
            features[name][place] = same / max(np.sqrt(len(distinct)), 1) ** 2 if group >= 0 else 0.0
        features["history_length"][place] = np.log1p(len(distinct)) * SCALE
        features["idle_days"][place] = np.log1p(idle) * SCALE
        taken_ago = age[history == item].astype(float)
        features["times_taken"][place] = np.log1p(len(taken_ago)) * SCALE
        features["taken_days_ago"][place] = np.log1p(max(taken_ago[0], 0.0)) * SCALE if len(taken_ago) else 0.0
    return features


def test_a_request_has_the_same_features_alone_and_in_a_batch():
    statistics, requests = random_statistics(), random_requests()
    together = compute_cross_features(statistics, *requests)
    for row in range(B):
        alone = compute_cross_features(statistics, *(values[[row]] for values in requests))
        np.testing.assert_array_equal(alone[0], together[row])


def any_requests(seed):
    """As `random_requests`, with whatever the contract allows: any lengths, repeats, ties, visits before the log began."""
    rng = np.random.default_rng(seed)
    n, width, length = rng.integers(1, 9), rng.integers(1, N_ITEMS), rng.integers(1, 70)
    history = rng.integers(0, N_ITEMS + 1, (n, length))
    history[rng.random((n, length)) < rng.choice([0, 0.3, 1], (n, 1))] = N_ITEMS
    ages = rng.choice([-1.0, 0.0, 0.3, 7.0, 45.5, 89.999, 90.0, 1e4], (n, length)).astype(np.float32)
    candidates = np.stack([rng.permutation(N_ITEMS)[:width] for _ in range(n)])
    candidates[np.arange(width) >= rng.choice([0, 1, width // 2, width], (n, 1))] = N_ITEMS
    scores = np.where(rng.random((n, 1)) < 0.3, 0.7, rng.normal(size=(n, width)) * 10.0 ** rng.integers(-3, 4, (n, 1)))
    scores = np.where(candidates < N_ITEMS, scores, rng.choice([-np.inf, np.nan, 3.0], (n, width)))
    kind = np.dtype(rng.choice(["int32", "int64"]))
    return history.astype(kind), ages, candidates.astype(kind), scores.astype(np.float32)


def test_cross_features_equal_the_slow_twin():
    kinds = [random_statistics(seed) for seed in range(3)]
    for seed in range(60):
        statistics, requests = kinds[seed % 3], any_requests(seed)
        got = compute_cross_features(statistics, *requests)
        assert (got.shape, got.dtype) == ((*requests[2].shape, len(list_feature_names())), np.float32), seed
        for row in range(len(got)):
            expected = slow_features(statistics, *(values[row] for values in requests))
            for column, name in enumerate(list_feature_names()):
                case = f"{name}, row {row}, seed {seed}"
                np.testing.assert_allclose(got[row, :, column], expected[name], rtol=1e-6, atol=2e-6, err_msg=case)
        again = compute_cross_features(statistics, *requests)  # the scratch was left as it was found
        np.testing.assert_array_equal(again, got, err_msg=f"seed {seed}")


def test_numbers_of_the_items_stand_before_the_cross_features():
    statistics, requests = random_statistics(), random_requests()
    numbers = np.random.default_rng(0).normal(size=(N_ITEMS + 1, 3)).astype(np.float32)
    pairs = compute_pair_numbers(statistics, numbers, *requests)
    np.testing.assert_array_equal(pairs[..., :3], numbers[requests[2]])
    np.testing.assert_array_equal(pairs[..., 3:], compute_cross_features(statistics, *requests))


def test_an_aggregation_that_no_float32_can_hold_is_a_number_like_the_others():
    scaled = scale_aggregates(np.array([3e38, np.inf, -np.inf, np.nan], np.float32))
    assert np.abs(scaled).max() < 30
    assert scaled[0] <= scaled[1] == -scaled[2]
    assert scaled[3] == 0.0


def test_statistics_come_back_as_they_were_saved(tmp_path):
    statistics = random_statistics()
    statistics.save(tmp_path)
    loaded = ItemStatistics.load(tmp_path)
    np.testing.assert_array_equal(
        compute_cross_features(loaded, *random_requests()), compute_cross_features(statistics, *random_requests())
    )


def test_statistics_of_two_catalogues_are_refused(tmp_path):
    random_statistics().save(tmp_path)
    np.save(tmp_path / "groups.npy", np.zeros((3, 2), np.int32))
    with pytest.raises(ArtifactError, match="different lengths"):
        ItemStatistics.load(tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("popularity", lambda array: array[:, :2], r"holds float32 rows of shape \[2\]; expected float32 \[4\]"),
        ("neighbour_weights", lambda array: array.astype(np.float32), "holds float32 rows of shape .* expected float16"),
        ("neighbours", lambda array: array[:, :-1], r"neighbour_weights\.npy holds float16 rows of shape"),
        ("neighbours", lambda array: array + 1, r"neighbours\.npy holds values from \d+ to 41; expected 0 to 40"),
        ("neighbours", lambda array: array - 1, r"neighbours\.npy holds values from -1 to 39; expected 0 to 40"),
        ("popularity_then", lambda array: array[:, :0], r"popularity_then\.npy holds no bucket; expected one"),
    ],
)
def test_arrays_of_another_form_are_refused(tmp_path, name, change, message):
    statistics = random_statistics()
    statistics.save(tmp_path)
    np.save(tmp_path / f"{name}.npy", change(getattr(statistics, name)))
    with pytest.raises(ArtifactError, match=message):
        ItemStatistics.load(tmp_path)


@pytest.mark.parametrize("age", [np.nan, np.inf, -np.inf])
def test_an_age_that_is_no_number_of_days_counts_as_none(age):
    statistics, (history, ages, *listed) = random_statistics(), random_requests()
    without = compute_cross_features(statistics, history, np.zeros_like(ages), *listed)
    np.testing.assert_array_equal(compute_cross_features(statistics, history, np.full_like(ages, age), *listed), without)


def test_a_clock_of_another_version_is_refused(tmp_path):
    random_statistics().save(tmp_path)
    (tmp_path / "item_statistics.json").write_text('{"hours": 1}')
    with pytest.raises(ArtifactError, match="not a clock"):
        ItemStatistics.load(tmp_path)


@pytest.mark.parametrize("days", [{"log_days": np.nan}, {"log_days": np.inf}, {"bucket_days": 0.0}, {"bucket_days": np.nan}])
def test_a_clock_that_does_not_count_is_refused(tmp_path, days):
    random_statistics().save(tmp_path)
    (tmp_path / "item_statistics.json").write_text(json.dumps({"log_days": 90.0, "bucket_days": 7.0} | days))
    with pytest.raises(ArtifactError, match="expected finite days and a bucket longer than 0"):
        ItemStatistics.load(tmp_path)


def test_threads_that_share_statistics_are_answered_as_one_is():
    statistics = random_statistics()
    requests = [tuple(np.tile(array, (500, 1)) for array in random_requests(seed)) for seed in range(4)]
    expected = [compute_cross_features(statistics, *request) for request in requests]
    with ThreadPoolExecutor(len(requests)) as threads:
        for _ in range(10):
            for got, wanted in zip(
                threads.map(lambda asked: compute_cross_features(statistics, *asked), requests), expected, strict=True
            ):
                np.testing.assert_array_equal(got, wanted)


def test_views_count_customers_visits_and_what_came_next():
    """Three users; positions 0, 1, 2. User 0: 0 then 1 in one visit. User 1: 0, a day later 2. User 2: 1, 0, 2 in one visit."""
    users = np.array([0, 0, 1, 1, 2, 2, 2])
    positions = np.array([0, 1, 0, 2, 1, 0, 2])
    times = np.array([0, 60, 0, DAY, 0, 60, 120])
    sales = Sales.of(users, positions, times)
    np.testing.assert_array_equal(number_visits(sales, gap_hours=8), [0, 0, 1, 2, 3, 3, 3])
    views = Views.of(sales, 3, StatisticsSettings())
    customers, together, after = (view.toarray() for view in views.make_matrices(slice(0, 3)))
    for whole, part in zip((customers, together, after), views.make_matrices(slice(1, 3)), strict=True):
        np.testing.assert_array_equal(part.toarray(), whole[1:])
    norm = np.sqrt(np.array([3.0, 2.0, 2.0]))
    scale = np.outer(norm, norm)
    np.testing.assert_allclose(customers * scale, [[0, 2, 2], [2, 0, 1], [2, 1, 0]], rtol=1e-5)
    np.testing.assert_allclose(
        together * scale, [[0, 1 / 2 + 1 / 3, 1 / 3], [1 / 2 + 1 / 3, 0, 1 / 3], [1 / 3, 1 / 3, 0]], rtol=1e-5
    )
    two_later = 1 / (1 + np.log(2))
    np.testing.assert_allclose(after * scale, [[0, 1, 2], [1, 0, two_later], [0, 0, 0]], rtol=1e-5)


def test_repeats_and_long_histories_count_once_and_from_the_end():
    sales = Sales.of(np.zeros(6, int), np.array([4, 4, 5, 6, 5, 7]), np.arange(6))
    kept = sales.keep_first(longest=3)
    np.testing.assert_array_equal(kept.positions, [5, 6, 7])
    np.testing.assert_array_equal(kept.times_s, [2, 3, 5])
