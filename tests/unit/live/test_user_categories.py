"""Aggregations of users within categories follow live events: they equal those of training on the longer log."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from live.erase import erase_user
from serving.contract.errors import ArtifactError
from serving.live.aggregations import Aggregation
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import scale_aggregates
from serving.stages.live.users.user_categories import FOLDER, UserCategoryTrends
from tests.present import present
from tests.unit.live.toy_log import N_EVENTS, N_ITEMS, N_KNOWN, USERS, change_item, write
from training.dataset import Dataset
from training.features.aggregates import LogAggregates, name_all
from training.features.trends import write_trends

N_FREE = 4  # rows for new items
DECLARED = (
    Aggregation("own_7d", "user x kind", "count", "count", window="7d"),
    Aggregation("amount_long", "user x kind", "amount", "mean", half_life="3d"),
    Aggregation("paid", "user x kind", "price", "last", n=2),
)
ITEMS = np.tile(np.arange(N_ITEMS), (len(USERS), 1))


class Stage:
    """Follows a live store from the records of a generation that learned the first events of a log."""

    def __init__(self, folder: Path, dataset: Dataset, log: pd.DataFrame):
        self.folder, self.dataset, self.known = folder, dataset, log.iloc[:N_KNOWN]
        if not folder.exists():
            folder.mkdir()
            write_trends(folder, dataset, LogAggregates.of(dataset, self.known, DECLARED), N_FREE)
        self.items = ItemIndex(np.append(10 * np.arange(N_ITEMS), [-1] * N_FREE))
        self.n_numbers = sum(len(aggregation.feature_names) for aggregation in DECLARED)
        as_of_s = int(self.known["timestamp"].max())
        self.trends = present(UserCategoryTrends.load(folder, self.items, self.n_numbers, as_of_s)).compile_loops()
        self.read_sequence = 0

    @property
    def store(self) -> Path:
        return self.folder / "live"

    def ask(self, positions: np.ndarray = ITEMS) -> np.ndarray:
        """Read what is new, and return the numbers of USERS, float32 [22, C, F]. positions: int [22, C]"""
        if self.store.exists():
            with closing(Reader(self.store)) as reader, reader.snapshot() as snapshot:
                progress = snapshot.read_progress()
                self.trends.follow(snapshot, progress, None, self.read_sequence)
                self.read_sequence = progress.last_sequence
        numbers = np.empty((*positions.shape, self.n_numbers), np.float32)
        self.trends.write(USERS, positions, numbers)
        return numbers

    def expect(self, log: pd.DataFrame) -> np.ndarray:
        """Return what training computes of USERS from a log at the stage's clock."""
        aggregates, clock_s = LogAggregates.of(self.dataset, log, DECLARED), self.trends.clock_ms // 1_000
        assert len(name_all(aggregates.pair_plans)) == self.n_numbers
        return aggregates.compute_for_pairs(USERS, ITEMS, np.full(len(USERS), clock_s), np.full(len(USERS), len(log)))


@pytest.fixture
def stage(tmp_path, toy, toy_log) -> Stage:
    return Stage(tmp_path / "rank", toy, toy_log)


def test_numbers_equal_those_of_training_on_the_whole_log_also_after_a_restart(tmp_path, toy, toy_log, stage):
    frozen = stage.ask()
    np.testing.assert_allclose(frozen, stage.expect(stage.known), rtol=1e-6)
    for first in range(N_KNOWN, N_EVENTS, 50):
        write(stage.store, toy_log.iloc[first : first + 50])
        followed = stage.ask()
    np.testing.assert_allclose(followed, stage.expect(toy_log), rtol=1e-6, atol=1e-6)
    assert (np.abs(followed - frozen).max(axis=(0, 1)) > 0.01).all()
    assert followed[20].any()  # the user who came after the export
    assert not followed[21].any()
    assert not followed[:, N_ITEMS - 1].any()  # an item without a category
    np.testing.assert_array_equal(Stage(tmp_path / "rank", toy, toy_log).ask(), followed)


def test_an_erased_users_events_count_for_nobody(tmp_path, toy, toy_log, stage):
    write(stage.store, toy_log.iloc[N_KNOWN:])
    with closing(Writer(stage.store, Layout(), ("purchase",))) as writer:
        erase_user(writer, 7)
    left = pd.concat([stage.known, toy_log.iloc[N_KNOWN:].query("user_id != 7")])
    np.testing.assert_allclose(stage.ask(), stage.expect(left), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["kind 1", "a kind that the export did not know"])
def test_events_of_a_new_item_wait_for_its_category(toy_log, stage, kind):
    sold = toy_log.iloc[N_KNOWN : N_KNOWN + 5].assign(item_id=405, user_id=3)
    write(stage.store, sold)
    position = stage.items.add(405)
    new = np.full((len(USERS), 1), position)
    before = stage.ask(ITEMS[:, :3])
    assert not stage.ask(new).any()
    change_item(stage.store, 405, category=kind)
    stage.trends.change_item(position, {"category": kind})
    numbers = stage.ask(new)
    assert numbers[3, 0, 0] > 0
    if kind == "kind 1":
        np.testing.assert_array_equal(numbers[:, 0], stage.ask()[:, 1])
        assert (numbers[3, 0, 0] > before[3, 1, 0]).all()
    else:
        assert numbers[3, 0, 0] == scale_aggregates(np.array([5.0], np.float32))
        assert not np.delete(numbers, 3, axis=0).any()
        np.testing.assert_array_equal(stage.ask(ITEMS[:, :3]), before)


def test_an_item_reads_its_new_category_and_earlier_events_stay_where_they_were(stage):
    before = stage.ask()
    stage.trends.change_item(0, {"category": "kind 1"})
    numbers = stage.ask()
    np.testing.assert_array_equal(numbers[:, 0], before[:, 1])
    np.testing.assert_array_equal(numbers[:, 1:], before[:, 1:])


def test_damaged_files_are_refused(toy, toy_log, stage):
    path = stage.folder / FOLDER / "keys.0.npy"
    np.save(path, np.load(path)[1:])
    with pytest.raises(ArtifactError, match=r"records\.0\.npy holds"):
        Stage(stage.folder, toy, toy_log)


def test_without_such_aggregations_nothing_is_published(tmp_path, toy, toy_log):
    (tmp_path / "other").mkdir()
    item_only = [Aggregation("sold_24h", "item", "count", "count", window="24h")]
    write_trends(tmp_path / "other", toy, LogAggregates.of(toy, toy_log, item_only), N_FREE)
    assert UserCategoryTrends.load(tmp_path / "other", ItemIndex(np.arange(3)), 4, 0) is None
