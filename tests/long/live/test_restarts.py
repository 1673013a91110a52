"""A process that starts has the numbers of one that ran all the time: both compute them from the log, in its order."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from live.archive import compact
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.writer import Writer
from serving.stages.features.ids import ItemIndex
from serving.stages.live.catalogue.items import LiveItems
from serving.stages.live.content import Content
from serving.stages.live.counts.pairs import StoredPairs
from serving.stages.live.counts.sales import LiveSales
from serving.stages.live.counts.visits import EVENT, USER_EVENTS, VISIT_S, Visits
from serving.stages.search.search import Blocked
from tests.unit.live.items.test_trends import Shop, refresh
from tests.unit.live.toy_log import N_EVENTS, N_KNOWN, START_S, change_item, load_toy, write

N_ITEMS = 150


def draw_visits(count: int) -> pd.DataFrame:
    """Events of 4 users, who take more than a history holds within a visit. Some come up to two hours late."""
    rng = np.random.default_rng(0)
    late_s = np.where(rng.random(count) < 0.2, rng.integers(0, 7_200, count), 0)
    times_s = START_S + np.cumsum(rng.integers(1, 300, count)) - late_s
    items = np.where(rng.random(count) < 0.05, N_ITEMS + 1, np.minimum(rng.geometric(0.02, count), N_ITEMS) - 1)
    return pd.DataFrame({"user_id": rng.integers(0, 4, count), "item_id": 10 * items, "timestamp": times_s, "weight": 1.0})


class SoldNothing:
    """Arrays of a stage in which nothing depends on sales."""

    def add_item(self, position: int) -> None: ...

    def resemble(self, position: int, templates: np.ndarray) -> None: ...

    def change_item(self, position: int, columns: object) -> None: ...

    def update_sales(self, sales: LiveSales, positions: np.ndarray | None) -> None: ...


def start(store: Path, learned_until_s: int = 0) -> LiveItems:
    """Start a stage that counts pairs, and let it read the store."""
    items = ItemIndex(np.append(10 * np.arange(N_ITEMS), [-1] * 4))
    sales, pairs = LiveSales(items, learned_until_s), StoredPairs(items, learned_until_s)
    live = LiveItems(Reader(store), items, Content.of([{}] * N_ITEMS), SoldNothing(), sales, pairs)
    live.catch_up()
    return live


def read_pairs(live: LiveItems) -> tuple[np.ndarray, np.ndarray]:
    """Return the strengths of all items for each item, [I, I], and the companions that become candidates, [I, 60]."""
    assert live.pairs is not None
    pairs, n_items = live.pairs.pairs, live.items.n_items
    history = np.arange(n_items)[:, None]
    strengths, _ = pairs.sum_strengths(history, np.tile(np.arange(n_items), (n_items, 1)))
    nothing = Blocked(np.empty(0, np.int64), np.zeros(n_items + 1, np.int64))
    candidates, scores = np.full((n_items, 60), n_items), np.zeros((n_items, 60), np.float32)
    pairs.put_candidates(history, nothing, np.append(np.ones(n_items, bool), False), candidates, scores)
    return strengths, candidates


@pytest.mark.parametrize("at_once", [1, 7, 100])
def test_a_process_that_starts_has_the_pairs_of_a_running_one(tmp_path, at_once):
    log, store = draw_visits(700), tmp_path / "live"
    running = start(store)
    for first in range(0, len(log), at_once):
        write(store, log.iloc[first : first + at_once])
        assert running.refresh()
        if first == 0:
            change_item(store, 10 * (N_ITEMS + 1), title="new")
    strengths, candidates = read_pairs(running)
    assert (strengths > 2).sum() > 100
    assert strengths[N_ITEMS].any()  # the new item
    restarted = read_pairs(start(store))
    np.testing.assert_array_equal(restarted[0], strengths)
    np.testing.assert_array_equal(restarted[1], candidates)


def test_a_process_that_starts_after_events_were_archived_has_the_pairs_of_a_running_one(tmp_path):
    """Archived are those that the generation has learned from."""
    log, store = draw_visits(700), tmp_path / "live"
    write(store, log.iloc[:300])
    learned_until_s = int(log["timestamp"].iloc[:300].max())
    running = start(store, learned_until_s)
    with closing(Writer(store, Layout(), ("purchase",))) as writer:
        compact(writer, writer.now_ms() + 1)
    write(store, log.iloc[300:].assign(timestamp=log["timestamp"] + 2 * VISIT_S))
    assert running.refresh()
    with running.reader.snapshot() as snapshot:
        assert snapshot.read_headers_since(0) is None
    expected = read_pairs(running)
    assert (expected[0] > 2).sum() > 100
    for found, expected_pairs in zip(read_pairs(start(store, learned_until_s)), expected, strict=True):
        np.testing.assert_array_equal(found, expected_pairs)


def find_pairs_slowly(events: np.ndarray, since_s: int, most: int) -> list[list[int]]:
    pairs: list[list[int]] = []
    log = events.tolist()  # plain numbers: NumPy takes 50 times as long to give one at a time
    for number, (user, item, time_s) in enumerate(log):
        own = [event for event in log[max(0, number - most) : number] if event[0] == user]
        near = [(other, at_s) for _, other, at_s in own[::-1][: USER_EVENTS - 1] if abs(at_s - time_s) <= VISIT_S]
        if any(other == item for other, _ in near):
            continue
        latest = dict(near[::-1])
        for other in dict.fromkeys(other for other, _ in near):
            if max(latest[other], time_s) >= since_s:
                pairs.append([item, other])
    return pairs


@pytest.mark.parametrize("most_events", [64, 4_096])
@pytest.mark.parametrize("at_once", [1, 50, 3_000])
def test_pairs_equal_those_of_the_twin_also_when_more_users_come_than_are_kept(most_events, at_once):
    rng, count = np.random.default_rng(1), 3_000
    events = np.zeros(count, EVENT)
    events["user_id"] = np.where(rng.random(count) < 0.5, rng.integers(-5, 5, count), rng.integers(0, 1 << 40, count))
    events["item_id"] = rng.integers(0, 40, count)
    events["time_s"] = START_S + np.cumsum(rng.integers(0, 60, count)) - rng.integers(0, 3_000, count)
    visits, since_s = Visits(most_events), START_S + 20_000
    found = [visits.add(events[first : first + at_once], since_s) for first in range(0, count, at_once)]
    expected = find_pairs_slowly(events, since_s, most_events)
    assert len(expected) > 1_000
    assert np.concatenate(found).tolist() == expected


@pytest.mark.parametrize("at_once", [3, 40])
def test_a_process_that_starts_has_the_trends_of_a_running_one_after_items_changed_their_category(tmp_path, at_once):
    shop = Shop(tmp_path / "rank", dataset := load_toy(tmp_path / "data"))
    (live, numbers), log = shop.start(), dataset.interactions.copy()
    new_item = 405  # sold before it is added, and without a category at first
    log.loc[log.index[N_KNOWN + 10 :: 7], "item_id"] = new_item
    changes = [
        (10, "kind 0"),
        (new_item, None),
        (20, "kind 1"),
        (new_item, "kind 2"),
        (10, "a new kind"),
        (10, "kind 2"),
        (new_item, "kind 0"),
    ]
    for number, first in enumerate(range(N_KNOWN, N_EVENTS, at_once)):
        write(shop.store, log.iloc[first : first + at_once])
        if number % 2 == 0 and changes:
            item, kind = changes.pop(0)
            change_item(shop.store, item, **({"category": kind} if kind else {"title": "new"}))
        refresh(live)
    assert numbers[live.items.find_positions(np.array([new_item]))].any()
    np.testing.assert_array_equal(shop.start()[1], numbers)
