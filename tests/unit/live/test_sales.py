"""Live sales: the ranker's statistics equal those of training on the longer log, and visitors nobody knows see what sells."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from export.continuous.continued import count_sales
from live.archive import read_log
from serving.contract.tensors import PAD_ID
from serving.live.events import HEADER, EventBatch, Flags
from serving.live.layout import Layout
from serving.live.reader import MOST_READ_EVENTS, Reader
from serving.live.writer import Writer, WriterSettings
from serving.stages.features.encode import Plan
from serving.stages.features.ids import ItemIndex
from serving.stages.features.item_statistics import ItemStatistics
from serving.stages.live.candidates import lift_popular
from serving.stages.live.content import Content
from serving.stages.live.item_features import ItemFeatures
from serving.stages.live.items import BLOCKS_AT_ONCE, LiveItems
from serving.stages.live.ranked_items import RankedItems
from serving.stages.live.sales import LiveSales
from tests.unit.live.answers import event_inputs, last_event_ms
from training.models.rankers.item_statistics import Sales, StatisticsSettings, fit_statistics

HOUR_S, START_S, N_ITEMS = 3_600, 1_600_000_000, 30


def log_of(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return users, item positions and times of a log with an event an hour, and a new item towards its end."""
    rng = np.random.default_rng(3)
    items = rng.integers(0, N_ITEMS // 2, count)
    items[-count // 8 :: 5] = N_ITEMS - 1
    return rng.integers(0, 20, count), items, START_S + HOUR_S * np.arange(count)


def statistics_of(users, items, times_s):
    groups = np.zeros((N_ITEMS + 1, 2), np.int32)
    return fit_statistics(Sales.of(users, items, times_s), N_ITEMS, int(times_s.max()), groups, StatisticsSettings())


def write(folder: Path, users, items, times_s) -> None:
    """Item ids are the positions times 10."""
    headers = np.zeros(len(users), HEADER)
    headers["flags"] = Flags.POSITIVE | Flags.COUNTED
    headers["user_id"], headers["item_id"], headers["time_ms"] = users, items * 10, times_s * 1_000
    nothing = [b""] * len(users)
    writer = Writer(folder, Layout(), ("purchase",), settings=WriterSettings(lateness_s=0))
    writer.append(EventBatch(headers, nothing, nothing, nothing))
    writer.close()


def follow(reader: Reader, statistics: ItemStatistics, as_of_s: int, sales: np.ndarray | None = None) -> LiveItems:
    """Return items whose statistics follow the live sales. as_of_s: the clock of the generation that learned the statistics"""
    items, content = ItemIndex(np.arange(N_ITEMS) * 10), Content.of([{}] * N_ITEMS)
    rows, numbers = np.zeros((31, 1), np.int32), np.zeros((31, 0), np.float32)
    ranked = RankedItems(content, rows, numbers, statistics, ItemFeatures(Plan((), ()), rows, numbers))
    return LiveItems(reader, items, content, ranked, LiveSales(items, as_of_s, sales))


@pytest.mark.parametrize("at_once", [True, False], ids=["one batch", "event by event"])
def test_live_statistics_equal_those_of_training_on_the_whole_log(tmp_path, at_once):
    log = log_of(2_400)
    early, late = ([column[part] for column in log] for part in (slice(None, 1_600), slice(1_600, None)))
    statistics, expected = statistics_of(*early), statistics_of(*log)
    reader = Reader(tmp_path / "live")
    live = follow(reader, statistics, int(early[2].max()))
    before = statistics.popularity.copy()
    assert live.refresh()
    assert (statistics.popularity == before).all()
    for start in range(0, 800, 800 if at_once else 100):
        write(reader.folder, *(column[start : start + (800 if at_once else 100)] for column in late))
        assert live.refresh()
    np.testing.assert_allclose(statistics.popularity, expected.popularity, atol=2e-6)
    np.testing.assert_allclose(statistics.sold_days, expected.sold_days, atol=1e-4)
    assert statistics.clock.log_days + statistics.elapsed_days[0] == pytest.approx(expected.clock.log_days)
    reader.close()


def test_a_long_backlog_is_read_in_parts_of_bounded_size_until_nothing_is_left(tmp_path):
    part = BLOCKS_AT_ONCE * MOST_READ_EVENTS
    log = log_of(1_600 + 2 * part + 100)
    early, late = ([column[rows] for column in log] for rows in (slice(None, 1_600), slice(1_600, None)))
    expected, statistics, others = statistics_of(*log), statistics_of(*early), statistics_of(*early)
    reader = Reader(tmp_path / "live")
    write(reader.folder, *late)
    asked = follow(reader, statistics, int(early[2].max()))
    left = []
    for _ in range(3):
        assert asked.refresh()
        left.append(asked.n_behind)
    assert left == [part + 100, 100, 0]
    follow(reader, others, int(early[2].max())).catch_up()
    for found in (statistics, others):
        np.testing.assert_allclose(found.popularity, expected.popularity, atol=2e-6)
        np.testing.assert_allclose(found.sold_days, expected.sold_days, atol=1e-4)
    reader.close()


@pytest.mark.parametrize("learned", [1, 400, 800])
def test_sales_that_a_generation_learned_from_do_not_count_again(tmp_path, learned):
    log = log_of(2_400)
    known, expected = statistics_of(*(column[: 1_600 + learned] for column in log)), statistics_of(*log)
    reader = Reader(tmp_path / "live")
    write(reader.folder, *(column[1_600 : 1_600 + learned] for column in log))
    sales = count_sales([batch for _, batch in read_log(reader.folder)])
    live = follow(reader, known, int(log[2][1_600 + learned - 1]), sales)
    before = known.popularity.copy()
    assert live.refresh()
    np.testing.assert_allclose(known.popularity, before, atol=1e-6)
    if learned < 800:
        write(reader.folder, *(column[1_600 + learned :] for column in log))
        assert live.refresh()
    np.testing.assert_allclose(known.popularity, expected.popularity, atol=2e-6)
    np.testing.assert_allclose(known.sold_days, expected.sold_days, atol=1e-4)
    reader.close()


def test_sales_up_to_the_clock_of_a_generation_that_names_none_do_not_count(tmp_path):
    log = log_of(2_400)
    known, expected = statistics_of(*(column[:2_000] for column in log)), statistics_of(*log)
    reader = Reader(tmp_path / "live")
    write(reader.folder, *(column[1_600:2_200] for column in log))
    live = follow(reader, known, int(log[2][1_999]))
    live.catch_up()
    half = statistics_of(*(column[:2_200] for column in log))
    np.testing.assert_allclose(known.popularity, half.popularity, atol=2e-6)
    write(reader.folder, *(column[2_200:] for column in log))
    live.catch_up()
    np.testing.assert_allclose(known.popularity, expected.popularity, atol=2e-6)
    reader.close()


def lifted_slowly(lifts, vectors, servable, user_vectors, history, blocked, starts, positions, scores):
    """The same by scoring every item."""
    n_items, width = len(vectors), positions.shape[1]
    for row in range(len(positions)):
        if (history[row] != n_items).any():
            continue
        every = {int(p): float(s) for p, s in zip(positions[row], scores[row], strict=True) if p != n_items}
        for item in np.flatnonzero(lifts):
            if servable[item] and item not in blocked[starts[row] : starts[row + 1]]:
                every.setdefault(int(item), float(vectors[item] @ user_vectors[row]))
        best = sorted(every, key=lambda item: -(every[item] + lifts[item]))[:width]
        positions[row, : len(best)] = best
        scores[row, : len(best)] = [every[item] + lifts[item] for item in best]


def test_lifted_candidates_equal_those_of_a_search_that_scores_every_item():
    rng = np.random.default_rng(5)
    n_items, batch, width = 50, 6, 12
    vectors, users = (rng.normal(size=(count, 8)).astype(np.float32) for count in (n_items, batch))
    lifts = np.where(rng.random(n_items + 1) < 0.4, rng.random(n_items + 1) * 5, 0).astype(np.float32)
    lifts[n_items] = 0
    servable = np.append(rng.random(n_items) < 0.8, False)
    blocked = np.sort(rng.integers(0, n_items, 5 * batch).reshape(batch, 5), axis=1)
    history = np.full((batch, 3), n_items)
    history[2, 1] = 4
    positions, scores = np.full((batch, width), n_items), np.full((batch, width), -np.inf, np.float32)
    for row in range(batch):
        free = np.setdiff1d(np.flatnonzero(servable), blocked[row])[: width if row else 5]
        values = vectors[free] @ users[row]
        order = np.argsort(-values)
        positions[row, : len(free)], scores[row, : len(free)] = free[order], values[order]
    starts = np.arange(batch + 1) * 5
    found, expected = [positions.copy(), scores.copy()], [positions.copy(), scores.copy()]
    lift_popular(np.flatnonzero(lifts), lifts, vectors, servable, users, history, blocked.ravel(), starts, *found)
    lifted_slowly(lifts, vectors, servable, users, history, blocked.ravel(), starts, *expected)
    assert found[0].tolist() == expected[0].tolist()
    np.testing.assert_allclose(found[1], expected[1], atol=1e-5)
    assert found[0][2].tolist() == positions[2].tolist()


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


def test_late_sales_up_to_the_clock_of_a_generation_that_names_none_do_not_count_either(tmp_path):
    """As when Kafka lags: the shop's log, from which the generation learned, holds them already."""
    log = log_of(2_400)
    known, expected = statistics_of(*(column[:2_000] for column in log)), statistics_of(*(column[:2_200] for column in log))
    reader = Reader(tmp_path / "live")
    write(reader.folder, *(column[1_600:2_200:2] for column in log))
    live = follow(reader, known, int(log[2][1_999]))
    live.catch_up()
    for start in range(1_601, 2_200, 100):
        write(reader.folder, *(column[start : start + 100 : 2] for column in log))
        live.catch_up()
    np.testing.assert_allclose(known.popularity, expected.popularity, atol=2e-6)
    reader.close()
