"""Maintenance: old events move into Parquet, what is kept no longer goes, and idle users are forgotten and start cold."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pyarrow.parquet as pq
import pytest

from live.archive import list_segments, read_log
from live.erase import erase_user
from live.maintenance import Retention, lock, maintain
from live.replay import replay
from repository.generations import write_pins
from serving.contract.artifacts import find_stage_folder
from serving.contract.tensors import FIRST_USER_ID, PAD_ID, STAGES
from serving.live.events import HEADER, ITEM_CHANGED, EventBatch, Flags, unpack
from serving.live.layout import Layout
from serving.live.reader import Reader
from serving.live.store import find_live_folder
from serving.live.writer import Writer, WriterSettings, read_wall_clock_ms
from tests.repositories import copy_generation
from tests.unit.live.batches import KINDS, events, purchase
from tests.unit.live.commands import call
from tests.unit.live.conftest import Clock
from tests.unit.live.learned import Generation
from tests.unit.live.twin import StateTwin, differences

DAY_MS = 86_400_000
START_MS = 20_000 * DAY_MS
KEEP_ALL = Retention(key_days=1_000, archive_days=0, archive_bytes=0, idle_days=0, most_users=0)
KNOWN_COUNT = 40  # events of each user before the export


class KnownUsers:
    """A generation that knows every user by a number of events."""

    def make_first_records(self, user_ids: np.ndarray, layout: Layout) -> np.ndarray:
        records = layout.make_empty_users(len(user_ids))
        records["event_count"] = KNOWN_COUNT
        return records


@pytest.fixture
def clock(clock):
    clock.ms = START_MS  # a day begins
    return clock


@pytest.fixture
def writer(folder, clock):
    writer = Writer(folder, Layout(), KINDS.names, KnownUsers(), now_ms=clock)
    yield writer
    writer.close()


def counts_of(folder, *users: int) -> dict[int, int]:
    """Return the number of events of each user that has a record."""
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        rows, records = snapshot.read_users(np.array(users))
        return {users[row]: int(record["event_count"]) for row, record in zip(rows, records, strict=True)}


def measure_used(writer: Writer) -> int:
    with writer.store.env.begin() as txn:
        return writer.store.measure_used_bytes(txn)


def buy_daily(writer: Writer, clock: Clock, *users: int) -> None:
    """Each of the users buys one thing, a day after the other."""
    for user in users:
        writer.append(purchase(user, item=user + 100))
        clock.ms += DAY_MS


def test_whole_days_move_into_parquet_segments_and_old_ones_go(writer, folder, clock):
    buy_daily(writer, clock, *range(10))
    clock.ms += DAY_MS // 2
    done = maintain(writer, replace(KEEP_ALL, key_days=2), clock.ms)
    assert (done.archived, [(s.first, s.last) for s in done.written]) == (8, [(1, 8)])
    assert pq.read_table(done.written[0].path)["user_id"].to_pylist() == list(range(8))
    clock.ms += DAY_MS
    maintain(writer, replace(KEEP_ALL, key_days=2), clock.ms)
    assert [(s.first, s.last) for s in list_segments(folder)] == [(1, 8), (9, 9)]
    assert writer.store.measure_archive_bytes() == sum(s.bytes for s in list_segments(folder))
    assert [s.first for s in maintain(writer, replace(KEEP_ALL, key_days=2, archive_days=3.6), clock.ms).dropped] == [1]
    assert [s.first for s in maintain(writer, replace(KEEP_ALL, key_days=2, archive_bytes=1), clock.ms).dropped] == [9]
    assert np.concatenate([sequences for sequences, _ in read_log(folder)]).tolist() == [10]


def test_an_idle_user_is_forgotten_and_comes_back_as_the_generation_knows_them(writer, folder, clock):
    buy_daily(writer, clock, 1, 2, 3)
    done = maintain(writer, replace(KEEP_ALL, idle_days=1.5), clock.ms)
    assert done.evicted == 2
    assert counts_of(folder, 1, 2, 3) == {3: KNOWN_COUNT + 1}
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert snapshot.read_seen(np.array([1, 2, 3]))["user_id"].tolist() == [3]
        assert len(snapshot.read_seeds(np.array([1, 2, 3]))[0]) == 1
    assert writer.store.read_counters() == {"evicted_users": 2, "maintained_ms": clock.ms}
    writer.append(purchase(1, item=5))
    assert counts_of(folder, 1) == {1: KNOWN_COUNT + 1}
    assert replay(folder).is_equal


BOUGHT_S = START_MS // 1_000  # when a user bought item 7, a second after item 5
LIVE = [(7, BOUGHT_S), (5, BOUGHT_S - 1)]
LATER, EARLIER = (99, BOUGHT_S + 500), (2, BOUGHT_S - 500)


@pytest.mark.parametrize(
    ("history", "left"),
    [
        ([LATER, *LIVE, EARLIER], 0),
        ([*LIVE, EARLIER], 0),
        ([LATER, *LIVE], 0),
        (LIVE, 1),  # it knows no more
        ([LATER, LIVE[0], EARLIER], 1),  # it does not know one of the purchases
        ([LATER, LIVE[1], EARLIER], 1),
        ([LIVE[1], EARLIER, EARLIER], 1),  # the latest one came after the export
    ],
)
def test_a_record_gives_way_to_a_generation_that_knows_it_and_more(folder, clock, history, left):
    session = FIRST_USER_ID - 5
    with closing(Writer(folder, Layout(), KINDS.names, now_ms=clock)) as writer:
        for user in (1, session):
            for item, second in reversed(LIVE):
                writer.append(purchase(user, item, 1_000 * second))
        generation = Generation(history)
        assert maintain(writer, KEEP_ALL, clock.ms, generation=generation).surpassed == 0  # the visit goes on
        clock.ms += DAY_MS
        assert maintain(writer, KEEP_ALL, clock.ms, generation=generation).surpassed == 1 - left
        assert counts_of(folder, 1, session) == ({1: 2} if left else {}) | {session: 2}
        assert maintain(writer, KEEP_ALL, clock.ms, generation=generation).surpassed == 0
    assert replay(folder).is_equal


def test_who_dismissed_an_item_keeps_the_record_that_says_so(folder, clock):
    """A dismissal is no purchase, so that no generation learns it."""
    with closing(Writer(folder, Layout(), KINDS.names, now_ms=clock)) as writer:
        for item, second in reversed(LIVE):
            writer.append(purchase(1, item, 1_000 * second))
        dismissal = purchase(1, 8, 1_000 * BOUGHT_S)
        dismissal.headers["flags"] = Flags.SEEN
        writer.append(dismissal)
        clock.ms += DAY_MS
        assert maintain(writer, KEEP_ALL, clock.ms, generation=Generation([LATER, *LIVE])).surpassed == 0
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert 8 in snapshot.read_seen(np.array([1]))["item_id"]


def test_what_a_later_generation_learned_of_a_user_reaches_the_answers(repository, pipeline, observe):
    def read_history() -> list[int]:
        return pipeline.trace({"user_id": np.array([[1]])})["history_ids"][0].tolist()

    learned = read_history()
    assert learned[1] != PAD_ID
    headers = np.zeros(1, HEADER)
    headers["user_id"], headers["item_id"], headers["time_ms"], headers["flags"] = 1, 45, START_MS // 10, Flags.COUNTED
    kinds, place = observe.settings.event_kinds.names, find_live_folder(repository)
    yesterday_ms = read_wall_clock_ms() - DAY_MS
    with closing(Writer(place, observe.writer.layout, kinds, now_ms=lambda: yesterday_ms)) as writer:  # without seeds
        writer.append(EventBatch(headers, [b""], [b""], [b""]))
    assert [item for item in read_history() if item != PAD_ID] == [45]
    assert "0 idle users forgotten, 1 of whom the generation knows more" in call("maintain", "--repo", repository)
    assert read_history() == learned


def test_a_generation_that_is_pinned_and_not_yet_served_makes_nobody_forgotten(repository, observe):
    """A server answers with generation 1 until it is moved, and would answer by what that one knows of the user."""
    copy_generation(repository)
    write_pins(repository, 2)
    users = find_stage_folder(repository, STAGES[0], 1) / "store" / "user_ids.npy"
    np.save(users, np.where((user_ids := np.load(users)) == 1, 0, user_ids))  # generation 1 does not know user 1
    headers = np.zeros(1, HEADER)
    headers["user_id"], headers["item_id"], headers["time_ms"], headers["flags"] = 1, 45, START_MS // 10, Flags.COUNTED
    kinds, place = observe.settings.event_kinds.names, find_live_folder(repository)
    yesterday_ms = read_wall_clock_ms() - DAY_MS
    with closing(Writer(place, observe.writer.layout, kinds, now_ms=lambda: yesterday_ms)) as writer:
        writer.append(EventBatch(headers, [b""], [b""], [b""]))
    assert " 0 of whom the generation knows more" in call("maintain", "1", "--repo", repository)
    assert " 1 of whom the generation knows more" in call("maintain", "--repo", repository)


def test_an_anonymous_session_is_forgotten_sooner_than_a_user(writer, folder, clock):
    session = FIRST_USER_ID - 5
    buy_daily(writer, clock, session, 1, session - 1)
    kept = replace(KEEP_ALL, idle_days=100, session_hours=36)
    assert maintain(writer, kept, clock.ms).evicted == 1
    assert counts_of(folder, session, 1, session - 1).keys() == {1, session - 1}


def test_the_longest_idle_users_beyond_a_number_are_forgotten(writer, folder, clock):
    buy_daily(writer, clock, 1, 2, 3, 1, 4)
    assert maintain(writer, replace(KEEP_ALL, most_users=2), clock.ms).evicted == 2
    assert counts_of(folder, 1, 2, 3, 4) == {1: KNOWN_COUNT + 2, 4: KNOWN_COUNT + 1}
    assert maintain(writer, KEEP_ALL, clock.ms).evicted == 0


def test_a_user_with_an_event_since_the_look_stays(writer, folder, clock):
    buy_daily(writer, clock, 1, 2)
    assert writer.evict(np.array([1, 2, 9]), np.array([START_MS - 1, START_MS + DAY_MS, START_MS])) == 1
    assert counts_of(folder, 1, 2) == {1: KNOWN_COUNT + 1}


def test_the_state_is_that_of_the_log_with_evictions_in_it(folder, clock):
    rng, twin = np.random.default_rng(0), StateTwin()
    with closing(Writer(folder, Layout(), KINDS.names, now_ms=clock)) as writer:
        for _ in range(8):
            writer.append(events(rng, 30))
            clock.ms += DAY_MS
            maintain(writer, replace(KEEP_ALL, key_days=3, idle_days=1.5, most_users=15), clock.ms)
        for _, batch in read_log(folder):
            twin.apply(batch)
        with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
            assert 0 < len(snapshot.list_users()) <= 15
            assert sorted(twin.users) == sorted(snapshot.list_users().tolist())
            assert differences(twin, snapshot, Layout()) == []
        assert replay(folder).is_equal
        assert writer.store.read_counters()["evicted_users"] > 0
        erase_user(writer, next(iter(twin.users)))
        assert replay(folder).is_equal


@pytest.mark.parametrize(
    ("exported_on", "today", "left"),
    [(5, 10, range(4, 10)), (9, 10, range(8, 10)), (5, 36, range(6, 36)), (None, 10, range(8, 10))],
    ids=["unknown to the generation", "known to it", "older than 30 days", "no generation"],
)
def test_events_that_the_generation_does_not_know_stay(writer, folder, clock, exported_on, today, left):
    """A stage that starts counts them again."""
    buy_daily(writer, clock, *range(today))
    exported_until_ms = None if exported_on is None else START_MS + exported_on * DAY_MS
    maintain(writer, replace(KEEP_ALL, key_days=2), clock.ms, exported_until_ms)
    with closing(Reader(folder)) as reader, reader.snapshot() as snapshot:
        assert [unpack([packed]).headers["user_id"][0] for _, packed in snapshot.read_events()] == list(left)


def test_a_store_that_is_half_full_keeps_no_more_than_it_must(folder, clock):
    settings, rng = WriterSettings(store_bytes=1 << 20), np.random.default_rng(0)
    with closing(Writer(folder, Layout(), KINDS.names, settings=settings, now_ms=clock)) as writer:
        while measure_used(writer) <= settings.store_bytes / 2:
            writer.append(events(rng, 100))
        clock.ms += 5 * DAY_MS
        assert maintain(writer, replace(KEEP_ALL, key_days=2), clock.ms, exported_until_ms=START_MS).archived > 0
        assert measure_used(writer) < settings.store_bytes / 2 < writer.store.measure_size_bytes()
        writer.append(events(rng, 100))  # there is room again, although the file does not shrink
        clock.ms += 5 * DAY_MS
        assert maintain(writer, replace(KEEP_ALL, key_days=2), clock.ms, exported_until_ms=START_MS).archived == 0


def test_only_one_process_maintains_a_store(writer, folder):
    with lock(folder) as first, lock(folder) as second:
        assert (first, second) == (True, False)


def test_a_user_is_not_erased_while_events_are_on_their_way_into_the_archive(writer, folder, clock):
    buy_daily(writer, clock, 1)
    with ThreadPoolExecutor(1) as pool, lock(folder):
        erasing = pool.submit(erase_user, writer, 1)
        with pytest.raises(TimeoutError):
            erasing.result(timeout=0.3)
        assert counts_of(folder, 1) == {1: KNOWN_COUNT + 1}
    assert erasing.result().removed["record"] == 1


def test_only_the_latest_change_of_an_item_is_kept_in_mind(writer, folder, monkeypatch):
    monkeypatch.setattr("live.maintenance.CHANGES_LEFT", 0)
    headers = np.zeros(40, HEADER)
    headers["type"], headers["item_id"] = ITEM_CHANGED, np.arange(40) % 3
    columns = [json.dumps({"price": price, f"extra {price}": 1}).encode() for price in range(40)]
    writer.append(EventBatch(headers, [b""] * 40, [b""] * 40, columns))
    with closing(Reader(folder)) as reader:
        with reader.snapshot() as snapshot:
            before = snapshot.read_changes(after=0)
        assert maintain(writer, KEEP_ALL, START_MS).superseded == 37
        assert maintain(writer, KEEP_ALL, START_MS).superseded == 0
        with reader.snapshot() as snapshot:
            assert sorted(snapshot.read_changes(after=0)) == sorted(before, key=lambda change: change.id)
            assert [change.id for change in snapshot.read_changes(after=38)] == [2, 0]
    assert replay(folder).is_equal


def test_evictions_are_no_events_that_were_accepted(writer, folder, clock):
    buy_daily(writer, clock, 1)
    writer.evict(np.array([1]), np.array([START_MS]))
    progress = writer.store.read_progress()
    assert (progress.last_sequence, progress.accepted, progress.changed_sequence) == (2, 1, 0)
    assert EventBatch.join([batch for _, batch in read_log(folder)]).headers["item_id"].tolist() == [101, 0]
