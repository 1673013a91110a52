"""Live sales: the ranker's statistics equal those of training on the longer log, and visitors nobody knows see what sells."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pandas as pd
import pytest

from export.continuous.continued import count_sales, find_lost_sales
from live.archive import compact, drop_segments, read_log
from serving.contract.tensors import PAD_ID
from serving.live.layout import Layout
from serving.live.reader import MOST_READ_EVENTS, Reader
from serving.live.writer import Writer
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.live.catalogue.item_features import ItemFeatures
from serving.stages.live.catalogue.items import BLOCKS_AT_ONCE, LiveItems
from serving.stages.live.catalogue.ranked_items import RankedItems
from serving.stages.live.content import Content
from serving.stages.live.counts.sales import LiveSales
from tests.present import present
from tests.unit.live.answers import event_inputs, last_event_ms
from tests.unit.live.toy_log import HOUR_S, START_S, write
from training.models.rankers.item_statistics import Sales, StatisticsSettings, fit_statistics

N_ITEMS = 30


def draw_log(count: int) -> pd.DataFrame:
    """Return a log with an event an hour, and a new item towards its end. Item ids are 10 times their positions."""
    rng = np.random.default_rng(3)
    positions = rng.integers(0, N_ITEMS // 2, count)
    positions[-count // 8 :: 5] = N_ITEMS - 1
    columns = {"user_id": rng.integers(0, 20, count), "item_id": 10 * positions, "weight": 1.0}
    return pd.DataFrame(columns | {"timestamp": START_S + HOUR_S * np.arange(count)})


def find_clock(log: pd.DataFrame) -> int:
    return int(log["timestamp"].max())


def fit(log: pd.DataFrame) -> ItemStatistics:
    """Return the statistics that training computes of a log."""
    sales = Sales.of(log["user_id"].to_numpy(), log["item_id"].to_numpy() // 10, log["timestamp"].to_numpy())
    return fit_statistics(sales, N_ITEMS, find_clock(log), np.zeros((N_ITEMS + 1, 2), np.int32), StatisticsSettings())


def follow(reader: Reader, statistics: ItemStatistics, as_of_s: int, sales: np.ndarray | None = None) -> LiveItems:
    """Return items whose statistics follow the live sales. as_of_s: the clock of the generation that learned the statistics"""
    items, content = ItemIndex(np.arange(N_ITEMS) * 10), Content.of([{}] * N_ITEMS)
    rows, numbers = np.zeros((31, 1), np.int32), np.zeros((31, 0), np.float32)
    ranked = RankedItems(content, rows, numbers, statistics, ItemFeatures(Plan((), ()), rows, numbers))
    return LiveItems(reader, items, content, ranked, LiveSales(items, as_of_s, sales))


def check(statistics: ItemStatistics, expected: ItemStatistics) -> None:
    np.testing.assert_allclose(statistics.popularity, expected.popularity, atol=2e-6)
    np.testing.assert_allclose(statistics.sold_days, expected.sold_days, atol=1e-4)


@pytest.mark.parametrize("at_once", [800, 100], ids=["one batch", "in parts"])
def test_live_statistics_equal_those_of_training_on_the_whole_log(log_reader, at_once):
    log = draw_log(2_400)
    known = log.iloc[:1_600]
    statistics, expected = fit(known), fit(log)
    live = follow(log_reader, statistics, find_clock(known))
    before = statistics.popularity.copy()
    assert live.refresh()
    assert (statistics.popularity == before).all()
    for start in range(1_600, 2_400, at_once):
        write(log_reader.folder, log.iloc[start : start + at_once])
        assert live.refresh()
    check(statistics, expected)
    assert statistics.clock.log_days + statistics.elapsed_days[0] == pytest.approx(expected.clock.log_days)


def test_a_long_backlog_is_read_in_parts_of_bounded_size_until_nothing_is_left(log_reader):
    part = BLOCKS_AT_ONCE * MOST_READ_EVENTS
    log = draw_log(1_600 + 2 * part + 100)
    known = log.iloc[:1_600]
    expected, statistics, others = fit(log), fit(known), fit(known)
    write(log_reader.folder, log.iloc[1_600:])
    asked = follow(log_reader, statistics, find_clock(known))
    left = []
    for _ in range(3):
        assert asked.refresh()
        left.append(asked.n_behind)
    assert left == [part + 100, 100, 0]
    follow(log_reader, others, find_clock(known)).catch_up()
    check(statistics, expected)
    check(others, expected)


@pytest.mark.parametrize("learned", [1, 400, 800])
def test_sales_that_a_generation_learned_from_do_not_count_again(log_reader, learned):
    log = draw_log(2_400)
    known = log.iloc[: 1_600 + learned]
    statistics, expected = fit(known), fit(log)
    write(log_reader.folder, known.iloc[1_600:])
    sales = count_sales([batch for _, batch in read_log(log_reader.folder)])
    live = follow(log_reader, statistics, find_clock(known), sales)
    before = statistics.popularity.copy()
    assert live.refresh()
    np.testing.assert_allclose(statistics.popularity, before, atol=1e-6)
    if learned < 800:
        write(log_reader.folder, log.iloc[1_600 + learned :])
        assert live.refresh()
    check(statistics, expected)


def test_all_sales_of_a_store_that_began_after_the_export_count(log_reader, tmp_path):
    log = draw_log(2_400)
    statistics = fit(log.iloc[:2_000])
    write(tmp_path / "former", log.iloc[1_600:2_000])
    sales = count_sales([batch for _, batch in read_log(tmp_path / "former")])
    live = follow(log_reader, statistics, find_clock(log.iloc[:2_000]), sales)
    write(log_reader.folder, log.iloc[2_000:])
    assert live.refresh()
    check(statistics, fit(log))


@pytest.mark.parametrize(("archived", "learned"), [(300, 1_600), (700, 1_600), (300, 1_500)])
def test_sales_that_retention_removed_do_not_count_on_top_of_the_shops_own_log(log_reader, archived, learned):
    """As where the shop delivers live events in its next log, and the archive has given up some of them.

    learned: rows that the generation learned from; `export follow` keeps the newest events to judge by
    """
    log, folder = draw_log(2_400), log_reader.folder
    statistics, before_s = fit(log.iloc[:learned]), int(log["timestamp"].iloc[learned])
    write(folder, log.iloc[900 : 900 + archived])
    with closing(Writer(folder, Layout(), ("purchase",))) as writer:
        compact(writer, writer.now_ms() + 1)
    drop_segments(folder, None, 0)
    write(folder, log.iloc[900 + archived : 1_600])
    batches = [batch.take(np.flatnonzero(batch.headers["time_ms"] < 1_000 * before_s)) for _, batch in read_log(folder)]
    sales = present(count_sales(batches, find_lost_sales(folder, before_s)))
    assert sales["last_ms"].max() < 1_000 * before_s
    live = follow(log_reader, statistics, find_clock(log.iloc[:learned]), sales)
    assert live.refresh()
    np.testing.assert_allclose(statistics.popularity, fit(log.iloc[:1_600]).popularity, atol=2e-6)
    write(folder, log.iloc[1_600:])
    assert live.refresh()
    check(statistics, fit(log))


@pytest.mark.parametrize("is_late", [False, True])
def test_sales_up_to_the_clock_of_a_generation_that_names_none_do_not_count(log_reader, is_late):
    """Late ones neither, as when Kafka lags: the shop's log, from which the generation learned, holds them already."""
    log = draw_log(2_400)
    statistics = fit(log.iloc[:2_000])
    live = follow(log_reader, statistics, find_clock(log.iloc[:2_000]))
    late = [log.iloc[1_600:2_200:2], *(log.iloc[start : start + 100 : 2] for start in range(1_601, 2_200, 100))]
    for part in late if is_late else [log.iloc[1_600:2_200]]:
        write(log_reader.folder, part)
        live.catch_up()
    np.testing.assert_allclose(statistics.popularity, fit(log.iloc[:2_200]).popularity, atol=2e-6)
    write(log_reader.folder, log.iloc[2_200:])
    live.catch_up()
    np.testing.assert_allclose(statistics.popularity, fit(log).popularity, atol=2e-6)


def test_what_sells_now_comes_up_for_a_visitor_nobody_knows(repository, pipeline, observe):
    at_ms = last_event_ms(repository) + 1_000
    item = 45  # nobody has bought it, and no rule is against it
    before = pipeline.trace({"user_id": np.array([[-5]])})
    observe(event_inputs(user_id=list(range(1_000, 1_080)), item_id=[item] * 80, timestamp_ms=[at_ms] * 80))
    after = pipeline.trace({"user_id": np.array([[-5]])})
    assert before["candidate_ids"][0, 0] != item
    assert after["candidate_ids"][0, 0] == item
    places = []
    for trace in (before, after):
        scores = trace["rank_scores"][trace["candidate_ids"] != PAD_ID]
        places.append((scores > trace["rank_scores"][trace["candidate_ids"] == item]).sum())
    assert places[1] < places[0]
