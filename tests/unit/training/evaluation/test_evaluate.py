"""The parts of `make eval` that need no server."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp

from export.evaluate import (
    find_positions,
    measure_quality,
    move_up,
    remove_repository,
    split_into_blocks,
    take_training_part,
)
from serving.contract.errors import ConfigError
from serving.contract.tensors import PAD_ID
from training.dataset import load_dataset
from training.evaluation.baselines import Split
from training.evaluation.problem import Problem


@pytest.fixture
def problem():
    relevant = sp.csr_matrix(np.array([[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], np.float32))
    empty = sp.csr_matrix((3, 4), dtype=np.float32)
    split = Split(empty, empty, relevant)
    return Problem(split, split, user_ids=np.array([5, 6, 7]), item_ids=np.array([10, 20, 30, 40]))


def test_lists_are_judged_for_users_with_something_to_find(problem):
    assert problem.test_users.tolist() == [0, 2]
    item_ids = np.array([[20, 10, 40, PAD_ID], [30, 20, PAD_ID, PAD_ID]])
    quality = measure_quality(item_ids, 0.5, problem)
    ideal = 1 + 1 / np.log2(3)
    assert quality.recall_at_20 == pytest.approx((1.0 + 0.0) / 2)
    assert quality.ndcg_at_10 == pytest.approx((1 + 1 / np.log2(4)) / ideal / 2)
    assert quality.coverage == 1.0
    assert quality.auc == 0.5


def test_items_behind_the_twentieth_do_not_count():
    """The lists of baselines have 20 items; [pipeline] items_returned may be larger."""
    relevant, nothing = sp.csr_matrix(np.eye(1, 30, 25, dtype=np.float32)), sp.csr_matrix((1, 30), dtype=np.float32)
    split = Split(nothing, nothing, relevant)
    quality = measure_quality(np.arange(30)[None], 0.5, Problem(split, split, np.array([5]), np.arange(30)))
    assert (quality.recall_at_20, quality.coverage) == (0.0, 20 / 30)


def test_padding_is_no_item(problem):
    np.testing.assert_array_equal(find_positions(np.array([[40, PAD_ID]]), problem), [[3, 4]])


def test_moving_a_list_to_the_top_keeps_the_order_of_the_rest():
    order = np.array([[4.0, 3.0, 2.0, 1.0]], np.float32)
    moved = move_up(order, np.array([[3, 1, 4]]))
    assert np.argsort(-moved[0]).tolist() == [3, 1, 0, 2]


def test_blocks_hold_every_user_once():
    users = np.arange(70)
    parts = split_into_blocks(users)
    assert [len(part) for part in parts] == [32, 32, 6]
    np.testing.assert_array_equal(np.concatenate(parts), users)


def test_no_block_is_larger_than_the_batches_of_the_server():
    assert [len(part) for part in split_into_blocks(np.arange(20), 8)] == [8, 8, 4]


def test_what_is_sold_out_by_now_can_be_found_in_the_test_part():
    dataset = load_dataset("synthetic:tiny")
    sold_out = replace(dataset, items=dataset.items.assign(available=False))
    part = take_training_part(sold_out)
    assert part.items["available"].all()
    assert len(part.interactions) < len(dataset.interactions)


def test_an_evaluation_removes_nothing_but_a_repository(tmp_path):
    (tmp_path / "recommend").mkdir()
    remove_repository(tmp_path)
    assert not tmp_path.exists()
    tmp_path.mkdir()
    (tmp_path / "thesis.txt").write_text("years of work")
    with pytest.raises(ConfigError, match="its contents would be lost"):
        remove_repository(tmp_path)
    assert (tmp_path / "thesis.txt").exists()
