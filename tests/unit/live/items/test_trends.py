"""Aggregations of items and categories follow live events: they equal those of training on the longer log."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from live.archive import compact
from live.erase import erase_user
from serving.contract.artifacts import find_stage_folder
from serving.contract.errors import ArtifactError
from serving.live.aggregations import Aggregation
from serving.live.events import Flags
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.features.ranking import LIVE, N_FEATURES, SCALE, TAKEN, scale_aggregates
from serving.stages.live.catalogue.item_features import ItemFeatures
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.catalogue.ranked_items import RankedItems
from serving.stages.live.content import Content
from serving.stages.live.counts.sales import LiveSales
from serving.stages.live.counts.trends import FOLDER, TRENDS_FILE, ItemTrends
from serving.stages.rank import Rank
from tests.present import present
from tests.unit.live.answers import event_inputs, last_event_ms
from tests.unit.live.toy_log import DAY_S, HOUR_S, N_EVENTS, N_ITEMS, N_KNOWN, START_S, change_item, write
from training.dataset import Dataset
from training.features.aggregates import LogAggregates, name_all
from training.features.trends import write_trends
from training.models.rankers.item_statistics import Sales, StatisticsSettings, fit_statistics

N_FREE = 4  # rows for new items
DECLARED = (
    Aggregation("sold_24h", "item", "count", "count", window="24h"),
    Aggregation("sold_long", "item", "count", "count", half_life="3d"),
    Aggregation("kind_7d", "kind", "amount", "sum", window="7d"),
    Aggregation("paid", "item", "price", "mean", window="7d"),
    Aggregation("since", "kind", "count", "last", n=2),
    Aggregation("buyers", "item", "distinct", "distinct", window="7d"),
)


class Shop:
    """A rank stage's numbers, of a generation that learned the first events of a log, and a live store."""

    def __init__(self, folder: Path, dataset: Dataset, n_known: int = N_KNOWN) -> None:
        self.folder, self.dataset, self.store = folder, dataset, folder / "live"
        folder.mkdir(exist_ok=True)
        self.known = dataset.interactions.iloc[:n_known]
        self.as_of_s = int(self.known["timestamp"].max())
        self.aggregates = LogAggregates.of(dataset, self.known, DECLARED)
        write_trends(folder, dataset, self.aggregates, N_FREE)
        self.exported = np.zeros((N_ITEMS + N_FREE + 1, 1 + len(name_all(self.aggregates.item_plans))), np.float32)
        self.exported[:N_ITEMS, 1:] = expect_numbers(self.aggregates, self.as_of_s)

    def start(self) -> tuple[LiveItems, np.ndarray]:
        """Start a stage that has read the store. Return it and its numbers, float32 [N_ITEMS + N_FREE + 1, 1 + F]."""
        items, numbers = ItemIndex(np.append(10 * np.arange(N_ITEMS), [-1] * N_FREE)), self.exported.copy()
        trends = ItemTrends.load(self.folder, items, numbers, self.as_of_s)
        groups, rows = np.zeros((items.n_items + 1, 2), np.int32), np.zeros((items.n_items + 1, 1), np.int32)
        positions = items.find_positions(self.known["item_id"].to_numpy())
        sold = Sales.of(self.known["user_id"].to_numpy(), positions, self.known["timestamp"].to_numpy())
        statistics = fit_statistics(sold, items.n_items, self.as_of_s, groups, StatisticsSettings())
        features = ItemFeatures(Plan((), ()), rows, numbers)
        ranked = RankedItems(Content.of([{}] * N_ITEMS), rows, numbers, statistics, features, trends)
        live = LiveItems(Reader(self.store), items, ranked.content, ranked, LiveSales(items, self.as_of_s), trends=trends)
        refresh(live)
        return live, numbers

    def expect(self, log: pd.DataFrame, live: LiveItems) -> np.ndarray:
        """Return the numbers that training computes of a log at the stage's clock, float32 [N_ITEMS, F]."""
        assert live.trends is not None
        return expect_numbers(LogAggregates.of(self.dataset, log, DECLARED), live.trends.clock_ms // 1_000)


def expect_numbers(aggregates: LogAggregates, clock_s: int) -> np.ndarray:
    (numbers,) = aggregates.compute_for_items(np.arange(N_ITEMS)[None], np.array([clock_s]), np.array([len(aggregates.events)]))
    return numbers


def refresh(live: LiveItems) -> None:
    """Read what is new, and compute all items as of now."""
    assert live.refresh()
    assert live.trends is not None
    live.trends.sweep(live.items.n_items)


def check(numbers: np.ndarray, expected: np.ndarray) -> None:
    """numbers: float32 [N_ITEMS + N_FREE + 1, 1 + F]; expected: float32 [N_ITEMS, F]"""
    np.testing.assert_allclose(numbers[:N_ITEMS, 1:], expected, rtol=1e-6, atol=1e-6)
    assert not numbers[:, 0].any()  # a column that is no aggregation
    assert not numbers[-1].any()  # the padding row


@pytest.fixture
def shop(tmp_path, toy) -> Shop:
    return Shop(tmp_path / "rank", toy)


@pytest.mark.parametrize("at_once", [200, 7], ids=["one batch", "a few events at a time"])
def test_numbers_equal_those_of_training_on_the_whole_log_also_after_a_restart(shop, toy, at_once):
    log, (live, numbers) = toy.interactions, shop.start()
    check(numbers, expect_numbers(shop.aggregates, shop.as_of_s))
    for start in range(N_KNOWN, N_EVENTS, at_once):
        write(shop.store, log.iloc[start : min(start + at_once, N_EVENTS)])
        refresh(live)
    check(numbers, shop.expect(log, live))
    assert (np.abs(numbers[:N_ITEMS, 1:] - shop.exported[:N_ITEMS, 1:]).max(axis=0) > 0.01).all()
    _, restarted = shop.start()
    np.testing.assert_array_equal(restarted, numbers)


def test_what_a_generation_learned_does_not_count_again(tmp_path, toy):
    log = toy.interactions
    write(tmp_path / "rank" / "live", log.iloc[300:500])
    shop = Shop(tmp_path / "rank", toy, n_known=500)
    live, numbers = shop.start()
    check(numbers, expect_numbers(shop.aggregates, shop.as_of_s))
    write(shop.store, log.iloc[500:])
    refresh(live)
    check(numbers, shop.expect(log, live))


def test_time_stands_still_during_a_pause(shop, toy):
    log, (live, numbers) = toy.interactions.copy(), shop.start()
    paused = log.iloc[N_KNOWN:].copy()
    paused["timestamp"] += 100 * DAY_S
    write(shop.store, paused)
    refresh(live)
    log.loc[log.index[N_KNOWN:], "timestamp"] -= HOUR_S  # the first event after the pause comes at the time of the export
    check(numbers, shop.expect(log, live))
    assert live.trends is not None
    assert live.trends.clock_ms // 1_000 <= log["timestamp"].max()


@pytest.mark.parametrize("flags", [Flags(0), Flags.COUNTED], ids=["of a kind outside of the log", "low ratings"])
def test_only_positive_events_count(shop, toy, flags):
    live, numbers = shop.start()
    write(shop.store, toy.interactions.iloc[N_KNOWN:], flags)
    refresh(live)
    check(numbers, shop.expect(shop.known, live))


def test_a_new_item_begins_with_nothing_and_reads_its_category(shop, toy):
    live, numbers = shop.start()
    columns = (
        1 + np.array([name in ("kind_7d", "since_1", "since_2") for name in name_all(shop.aggregates.item_plans)]).nonzero()[0]
    )
    change_item(shop.store, 405, title="A new one")
    refresh(live)
    position = int(live.items.find_positions(np.array([405]))[0])
    assert position == N_ITEMS
    assert not numbers[position].any()
    change_item(shop.store, 405, category="kind 1")
    refresh(live)
    assert numbers[position, columns].tolist() == numbers[1, columns].tolist()
    assert numbers[position, columns].all()
    change_item(shop.store, 405, category="a kind that the export did not know")
    refresh(live)
    assert not numbers[position].any()


@pytest.mark.parametrize("first", ["events", "item"])
def test_events_of_a_new_item_count_whichever_comes_first(shop, toy, first):
    live, numbers = shop.start()
    sold = toy.interactions.iloc[N_KNOWN : N_KNOWN + 5].assign(item_id=405)
    if first == "events":
        write(shop.store, sold)
        refresh(live)
        assert not numbers[N_ITEMS].any()
    change_item(shop.store, 405, category="kind 1")
    if first == "item":
        refresh(live)
        write(shop.store, sold)
    refresh(live)
    sold_24h, kind_7d = (1 + name_all(shop.aggregates.item_plans).index(name) for name in ("sold_24h", "kind_7d"))
    assert numbers[N_ITEMS, sold_24h] == scale_aggregates(np.array([5.0], np.float32))
    assert numbers[N_ITEMS, kind_7d] == numbers[1, kind_7d] > shop.exported[1, kind_7d]
    np.testing.assert_array_equal(shop.start()[1], numbers)


def test_an_erased_users_events_still_count_for_their_items(shop, toy):
    log, (live, numbers) = toy.interactions, shop.start()
    write(shop.store, log.iloc[N_KNOWN:])
    refresh(live)
    with closing(Writer(shop.store, Layout(), ("purchase",))) as writer:
        erase_user(writer, int(log["user_id"].iloc[-1]))
    refresh(live)
    check(numbers, shop.expect(log, live))
    erased, buyers = shop.start()[1], 1 + name_all(shop.aggregates.item_plans).index("buyers")
    np.testing.assert_array_equal(np.delete(erased, buyers, axis=1), np.delete(numbers, buyers, axis=1))


def test_a_process_that_starts_counts_what_the_log_still_holds(shop, toy):
    log, (live, numbers) = toy.interactions, shop.start()
    write(shop.store, log.iloc[N_KNOWN:500])
    refresh(live)
    with closing(Writer(shop.store, Layout(), ("purchase",))) as writer:
        compact(writer, writer.now_ms() + 1)
    write(shop.store, log.iloc[500:])
    refresh(live)
    check(numbers, shop.expect(log, live))  # it has read everything
    started, restarted = shop.start()
    check(restarted, shop.expect(pd.concat([shop.known, log.iloc[500:]]), started))


def test_the_clock_moves_all_items_on_a_part_at_a_time(shop, toy):
    live, numbers = shop.start()
    assert live.trends is not None
    quiet = shop.known.iloc[-1:].assign(item_id=99_999, timestamp=shop.as_of_s + 5 * DAY_S)
    write(shop.store, quiet)
    expected = shop.expect(shop.known, live)
    assert live.refresh()  # sweeps more items than there are
    assert (numbers[:N_ITEMS, 1:] != expected).any()
    check(numbers, shop.expect(shop.known, live))
    write(shop.store, quiet.assign(timestamp=shop.as_of_s + 6 * DAY_S))
    before = numbers.copy()
    with live.reader.snapshot() as snapshot:
        live.trends.follow(snapshot, snapshot.read_progress(), None, 1)
    for _ in range(5):
        live.trends.sweep(9)
    check(numbers, shop.expect(shop.known, live))
    assert (numbers != before).any()


def test_the_rank_stage_reads_live_sales_of_an_item(repository, observe, reader):
    folder, at_ms = find_stage_folder(repository, "rank", 1), last_event_ms(repository)
    rank = Rank.load(folder).with_live(reader)
    before = rank.inputs.item_numbers.copy()
    observe(event_inputs(user_id=[1, 2, 3], item_id=[45] * 3, timestamp_ms=[at_ms + 20_000] * 3))
    assert rank.live_items is not None
    assert rank.live_items.refresh()
    numbers, position = rank.inputs.item_numbers, int(rank.inputs.items.find_positions(np.array([45]))[0])
    assert (numbers[position, -3:] > before[position, -3:]).all()  # the trend of items, which is on by default
    np.testing.assert_array_equal(np.delete(numbers, position, axis=0), np.delete(before, position, axis=0))
    with closing(Rank.load(folder).with_live(reader)) as restarted:
        np.testing.assert_array_equal(restarted.inputs.item_numbers, numbers)
    rank.close()


def make_inputs(history_ids: np.ndarray, ages_days: list[float], scores: list[float]) -> dict[str, np.ndarray]:
    """Return inputs of a rank stage for one user. history_ids: [1, H]; scores: of each candidate"""
    return {
        "history_ids": history_ids,
        "history_age_days": np.array([ages_days], np.float32),
        "history_interests": np.zeros((1, 1), np.int64),
        "retrieval_scores": np.array([scores], np.float32),
        "taken_together": np.zeros((1, len(scores)), np.float32),
        "taken_with_latest": np.zeros((1, len(scores)), np.float32),
    }


def test_the_rank_stage_reads_whether_events_came_after_the_export(repository, observe, reader):
    at_ms = last_event_ms(repository)
    with closing(Rank.load(find_stage_folder(repository, "rank", 1)).with_live(reader)) as rank:
        assert rank.live_items is not None
        items = rank.inputs.items
        candidates = np.array([[0, 3, items.n_items]])
        inputs = make_inputs(items.ids[[[1, 2]]], [0.0, 0.0], [2.0, 1.0, -np.inf])

        def read_live() -> list[float]:
            assert present(rank.live_items).refresh()
            return rank.inputs.compute_pair_inputs(inputs, candidates)[0][0, :, LIVE - N_FEATURES].tolist()

        assert read_live() == [0.0, 0.0, 0.0]
        observe(event_inputs(user_id=[1], item_id=[45], timestamp_ms=[at_ms - 1_000]))  # which the export may have learned
        assert read_live() == [0.0, 0.0, 0.0]
        observe(event_inputs(user_id=[1], item_id=[45], timestamp_ms=[at_ms + 20_000]))
        assert read_live() == [1.0, 1.0, 0.0]


def test_only_a_ranker_that_learned_repeats_reads_them(repository):
    """A live history has what users only looked at, too, which is no taking."""
    with closing(Rank.load(find_stage_folder(repository, "rank", 1))) as rank:
        items, columns = rank.inputs.items, slice(TAKEN - N_FEATURES, TAKEN - N_FEATURES + 2)
        candidates = np.array([[3, 0]])
        inputs = make_inputs(items.ids[[[3, 2, 3]]], [1.0, 2.0, 5.0], [2.0, 1.0])
        learned = replace(rank.inputs, settings=replace(rank.inputs.settings, repeats=True))
        found = [each.compute_pair_inputs(inputs, candidates)[0][0, :, columns].tolist() for each in (rank.inputs, learned)]
        assert found[0] == [[0.0, 0.0], [0.0, 0.0]]
        assert found[1] == [pytest.approx([np.log(3) * SCALE, np.log(2) * SCALE]), [0.0, 0.0]]
        inputs["history_interests"][:] = 2  # the newest two were only looked at
        counted = learned.compute_pair_inputs(inputs, candidates)[0][0, :, columns].tolist()
        assert counted == [pytest.approx([np.log(2) * SCALE, np.log(6) * SCALE]), [0.0, 0.0]]


def test_without_aggregations_nothing_is_published_or_followed(tmp_path, toy):
    user_only = [Aggregation("events_7d", "user", "count", "count", window="7d")]
    write_trends(tmp_path, toy, LogAggregates.of(toy, toy.interactions, user_only), N_FREE)
    assert not (tmp_path / FOLDER).exists()
    assert ItemTrends.load(tmp_path, ItemIndex(np.arange(3)), np.zeros((4, 1), np.float32), START_S) is None


def test_a_damaged_declaration_is_refused(shop):
    path = shop.folder / FOLDER / TRENDS_FILE
    path.write_text(path.read_text().replace("24h", "24 hours"))
    with pytest.raises(ArtifactError, match="is not a declaration of aggregations"):
        shop.start()


@pytest.mark.parametrize(
    ("name", "damage", "told"),
    [
        ("records.0.npy", lambda records: records[:-1], r"records\.0\.npy holds"),
        ("record_of.1.npy", lambda records: records + 1, r"record_of\.1\.npy holds values from 1 to 4; expected 0 to 3"),
    ],
)
def test_damaged_arrays_are_refused(shop, name, damage, told):
    path = shop.folder / FOLDER / name
    np.save(path, damage(np.load(path)))
    with pytest.raises(ArtifactError, match=told):
        shop.start()


def test_fewer_numbers_than_aggregations_are_refused(shop):
    shop.exported = shop.exported[:, :3]
    with pytest.raises(ArtifactError, match=r"declares more numbers than item_numbers\.npy has \(3\)"):
        shop.start()
