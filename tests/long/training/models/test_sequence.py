"""The sequence model: windows of the log, what a moment may know, what it learns, and that it is served as trained."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from serving.contract.artifacts import open_network
from serving.stages.features.sequence import NETWORK, SequenceSource
from training.features.build import Examples
from training.models.candidates.sequence import SequenceModel, SequenceShape, find_time_bucket
from training.models.candidates.train_sequence import SequenceSettings, Taken, cut_windows, train_sequence
from training.retrieval.save import save_sequence

N_ITEMS, LENGTH, DAY_S = 12, 6, 86_400
SHAPE = SequenceShape(width=16, length=LENGTH, dropout=0.0)


def cyclic_log(n_users: int = 80, n_events: int = 9) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each user takes items one after the other, from a random one on: what comes next is certain."""
    rng = np.random.default_rng(0)
    users = np.repeat(np.arange(n_users), n_events)
    items = (np.repeat(rng.integers(0, N_ITEMS, n_users), n_events) + np.tile(np.arange(n_events), n_users)) % N_ITEMS
    return users, items, np.tile(np.arange(n_events), n_users) * DAY_S


def users_of(history: list[list[int]], ages: list[list[float]]) -> Examples:
    nothing = np.zeros((len(history), 0))
    return Examples(nothing, nothing, np.array(history, np.int32), np.array(ages, np.float32))


@pytest.fixture(scope="module")
def trained() -> SequenceModel:
    settings = SequenceSettings(SHAPE, epochs=60, most_events=40_000, batch_events=256, learning_rate=5e-3)
    return train_sequence(cut_windows(Taken(*cyclic_log()), N_ITEMS, LENGTH), N_ITEMS, settings, say=lambda _: None)


def test_windows_begin_at_the_newest_event_and_overlap_by_one():
    users, items = np.array([0, 0, 0, 1, 2, 2, 0, 0]), np.array([5, 6, 4, 1, 2, 3, 7, 8])
    windows = cut_windows(Taken(users, items, np.arange(8)), N_ITEMS, 2)
    np.testing.assert_array_equal(windows.items, [[4, 7, 8], [5, 6, 4], [2, 3, N_ITEMS]])
    np.testing.assert_array_equal(windows.learned, [[True, True], [True, True], [True, False]])
    np.testing.assert_array_equal(windows.lengths, [2, 2, 1])
    np.testing.assert_array_equal(windows.users, [0, 0, 2])


def test_an_item_is_learned_again_only_where_it_is_served_again():
    log = (np.zeros(3, int), np.array([1, 2, 1]), np.arange(3))
    np.testing.assert_array_equal(cut_windows(Taken(*log), N_ITEMS, 2).learned, [[True, False]])
    np.testing.assert_array_equal(cut_windows(Taken(*log, repeats=True), N_ITEMS, 2).learned, [[True, True]])


def test_logs_in_which_nobody_returns_have_no_windows():
    assert len(cut_windows(Taken(np.arange(3), np.arange(3), np.arange(3)), N_ITEMS, LENGTH).items) == 0
    settings = SequenceSettings(SHAPE)
    empty = cut_windows(Taken(np.arange(0), np.arange(0), np.arange(0)), N_ITEMS, LENGTH)
    assert np.isfinite(train_sequence(empty, N_ITEMS, settings, say=lambda _: None).item_vectors).all()


def test_a_moment_does_not_know_what_comes_later():
    model = SequenceModel(N_ITEMS, SHAPE).eval()
    items, ages = torch.tensor([[1, 2, 3, 4]]), torch.tensor([[9.0, 5.0, 2.0, 1.0]])
    before = model.encode_moments(items, ages)[0, :2]
    items[0, 2:] = 7
    torch.testing.assert_close(model.encode_moments(items, ages)[0, :2], before)


def test_it_learns_what_comes_next(trained):
    history = [[(first + 4 - age) % N_ITEMS for age in range(5)] + [N_ITEMS] for first in range(N_ITEMS)]
    vectors = trained.compute_user_vectors(users_of(history, [[1, 2, 3, 4, 5, 0]] * N_ITEMS))
    best = (vectors @ trained.item_vectors.T).argmax(axis=1)
    np.testing.assert_array_equal(best, (np.arange(N_ITEMS) + 5) % N_ITEMS)


def test_times_apart_share_a_bucket_by_their_logarithm():
    days = torch.tensor([0.0, 1 / 1_440, 1.0, 1_000.0, 1e9, -1.0])
    assert find_time_bucket(days).tolist() == [0, 1, 10, 20, 23, 0]


def test_it_is_served_as_it_was_trained_and_whoever_else_asks(trained, tmp_path):
    """Also for strangers, who have no history."""
    history = [[3, 2, 1, N_ITEMS, N_ITEMS, N_ITEMS], [N_ITEMS] * LENGTH, [7, 1, 5, 4, 9, 8]]
    users = users_of(history, [[0.5, 1, 4, 0, 0, 0], [0] * 6, [1, 2, 3, 4, 5, 6]])
    assert save_sequence(tmp_path, trained, users.history_positions, users.history_age_days).max_rel < 1e-5
    source = SequenceSource(open_network(tmp_path, NETWORK), trained.item_vectors, 0.5, LENGTH)
    served = source.compute_vectors(users.history_positions, users.history_age_days)
    np.testing.assert_allclose(served, 0.5 * trained.compute_user_vectors(users), atol=1e-5)
    for row in range(len(history)):
        alone = source.compute_vectors(users.history_positions[row, None], users.history_age_days[row, None])
        np.testing.assert_array_equal(alone[0], served[row])
