"""The writer and the reader of the live store, against the slow exact twin."""

from __future__ import annotations

import json
import os
import stat
import time
from contextlib import closing
from types import SimpleNamespace

import lmdb
import numpy as np
import pytest

from serving.contract.errors import ConfigError, DependencyError, RequestError
from serving.contract.tensors import NO_SEQUENCE, PAD_ID
from serving.live.events import HEADER, ITEM_CHANGED, USER_CHANGED, EventBatch, EventKind, EventKinds, Flags, pack, unpack
from serving.live.layout import Layout
from serving.live.reader import MOST_AHEAD, Reader
from serving.live.seeds import GenerationSeeds
from serving.live.sequences import mark_sequences
from serving.live.store import DATABASES, make_folder, set_aside
from serving.live.writer import Writer, WriterSettings
from tests.unit.live.batches import KINDS, START_MS, change, events, purchase
from tests.unit.live.twin import StateTwin, differences

DAY_MS = 86_400_000


@pytest.fixture
def reader(folder):
    reader = Reader(folder)
    yield reader
    reader.close()


def test_events_survive_packing():
    batch = events(np.random.default_rng(0), 50, ids=True)
    batch = EventBatch(batch.headers, batch.event_ids, [b"r" * n for n in range(50)], [b"c" * (n % 3) for n in range(50)])
    again = unpack(pack(batch))
    assert again.headers.tobytes() == batch.headers.tobytes()
    assert (again.event_ids, again.request_ids, again.columns) == (batch.event_ids, batch.request_ids, batch.columns)


def test_a_layout_survives_json():
    layout = Layout(history=10, session=4)
    assert Layout.from_json(layout.to_json()) == layout
    more = json.loads(layout.to_json()) | {"user_aggregates": [0, []]}  # stores that an earlier program made have it
    assert Layout.from_json(json.dumps(more).encode()) == layout


@pytest.mark.parametrize("largest", [1, 7, 300])
def test_the_state_equals_the_twins_whatever_the_batches(writer, reader, largest):
    rng, twin = np.random.default_rng(largest), StateTwin()
    written = 0
    while written < 300:
        batch = events(rng, int(rng.integers(1, largest + 1)))
        sequences = writer.append(batch)
        assert sequences.tolist() == list(range(written + 1, written + len(batch) + 1))
        twin.apply(batch)
        written += len(batch)
    with reader.snapshot() as snapshot:
        assert differences(twin, snapshot, Layout()) == []
        assert snapshot.read_progress().accepted == written
        assert snapshot.read_progress().latest_ms == max(
            max(event[0] for event in user.session) for user in twin.users.values()
        )


def test_the_log_holds_every_event_in_order(writer, reader):
    batches = [events(np.random.default_rng(seed), 20, ids=True) for seed in range(3)]
    for batch in batches:
        writer.append(batch)
    with reader.snapshot() as snapshot:
        log = list(snapshot.read_events())
        assert [sequence for sequence, _ in log] == list(range(1, 61))
        assert [bytes(packed) for _, packed in log] == [packed for batch in batches for packed in pack(batch)]
        assert [sequence for sequence, _ in snapshot.read_events(after=58)] == [59, 60]


def test_an_event_id_that_comes_again_changes_nothing_and_returns_the_first_sequence(writer, reader):
    assert writer.append(purchase(1, 5, event_id=b"a")).tolist() == [1]
    again = EventBatch.join([purchase(1, 5, event_id=b"a"), purchase(1, 7, event_id=b"b"), purchase(1, 7, event_id=b"b")])
    assert writer.append(again).tolist() == [1, 2, 2]
    with reader.snapshot() as snapshot:
        _, records = snapshot.read_users(np.array([1]))
        assert records["history_ids"][0, :3].tolist() == [7, 5, PAD_ID]
        assert (snapshot.read_progress().accepted, snapshot.read_progress().repeated) == (2, 2)


@pytest.mark.parametrize("other", [{"user_id": 2}, {"item_id": 6}, {"kind": 0}])
def test_an_event_id_of_another_event_is_refused_and_nothing_is_written(writer, reader, other):
    def make_batch(user: int, **differing: int) -> EventBatch:
        batch = purchase(user, 5, event_id=b"a")
        for name, value in differing.items():
            batch.headers[name] = value
        return EventBatch.join([purchase(9, 9), batch])

    with pytest.raises(RequestError, match="event_id was used for an event of another user, item or name") as refused:
        writer.append(EventBatch.join([make_batch(1), make_batch(1, **other)]))
    assert refused.value.rows == [3]
    writer.append(make_batch(1))
    with pytest.raises(RequestError, match="expected an id of its own for each event"):
        writer.append(make_batch(1, **other))
    assert writer.append(make_batch(1, time_ms=START_MS + 1)).tolist() == [3, 2]  # sent again, with the time of the repeat
    with reader.snapshot() as snapshot:
        assert snapshot.read_progress().accepted == 3


def test_event_ids_are_forgotten_when_they_expire(folder, clock):
    writer = Writer(folder, Layout(), KINDS.names, settings=WriterSettings(key_days=1.0), now_ms=clock)
    writer.append(purchase(1, 5, event_id=b"a"))
    clock.ms += DAY_MS // 2
    assert writer.append(purchase(1, 5, event_id=b"a")).tolist() == [1]
    clock.ms += DAY_MS
    writer.append(purchase(2, 5))  # every append forgets some of what has expired
    assert writer.append(purchase(1, 5, event_id=b"a")).tolist() == [3]
    clock.ms += 2 * DAY_MS
    assert writer.append(purchase(2, 7, event_id=b"a")).tolist() == [4]  # of another event, as the first one is long ago
    assert writer.append(purchase(2, 7, event_id=b"a")).tolist() == [4]
    writer.close()


def test_archiving_an_event_does_not_forget_its_id_where_a_later_event_has_it(folder, clock):
    writer = Writer(folder, Layout(), KINDS.names, settings=WriterSettings(key_days=1.0), now_ms=clock)
    writer.append(purchase(1, 5, event_id=b"a"))
    clock.ms += 2 * DAY_MS
    writer.append(purchase(2, 5))  # forgets the id, which has expired
    assert writer.append(purchase(1, 5, event_id=b"a")).tolist() == [3]
    writer.remove_events(last_sequence=2)
    assert writer.append(purchase(1, 5, event_id=b"a")).tolist() == [3]
    writer.close()


def test_what_is_acknowledged_has_reached_the_disk(writer):
    """A process that is killed loses nothing without fsync either; a machine that loses power does."""
    flags = writer.store.env.flags()
    assert flags["sync"]
    assert flags["metasync"]
    assert not flags["map_async"]


def test_late_events_are_put_where_they_belong_and_counted(writer, reader):
    writer.append(purchase(1, 5, START_MS + 60_000))
    writer.append(purchase(1, 6, START_MS))
    with reader.snapshot() as snapshot:
        assert snapshot.read_users(np.array([1]))[1]["history_ids"][0, :3].tolist() == [5, 6, PAD_ID]
        assert snapshot.read_progress().late == 1
        assert (snapshot.read_progress().latest_ms, snapshot.read_progress().watermark_ms) == (
            START_MS + 60_000,
            START_MS + 50_000,
        )
        flags = unpack(packed for _, packed in snapshot.read_events()).headers["flags"]
        assert [bool(flag & Flags.LATE) for flag in flags] == [False, True]


def test_changes_are_merged_and_found_by_their_sequence(writer, reader):
    writer.append(change(ITEM_CHANGED, 7, price=2.5, available=True))
    writer.append(EventBatch.join([purchase(1, 5), change(USER_CHANGED, 1, country="FR")]))
    sequences = writer.append(change(ITEM_CHANGED, 7, available=False))
    with reader.snapshot() as snapshot:
        assert snapshot.read_progress().changed_sequence == sequences[0] == 4
        assert [(c.type, c.id, c.columns) for c in snapshot.read_changes(after=0)] == [
            (ITEM_CHANGED, 7, {"price": 2.5, "available": False}),
            (USER_CHANGED, 1, {"country": "FR"}),
        ]
        assert [c.id for c in snapshot.read_changes(after=3)] == [7]
        assert snapshot.read_changes(after=4) == []


def test_a_users_record_begins_as_the_generation_knows_it(folder, reader):
    known = SimpleNamespace(
        **{"history_ids": np.array([[3, 4, PAD_ID]]), "history_times": np.array([[1_600_000_100, 1_600_000_000, 0]])},
        **{"event_count": np.array([5]), "sum_weight": np.array([7.0]), "sum_label": np.array([2.0])},
        **{"first_time": np.array([1_500_000_000]), "last_time": np.array([1_600_000_100])},
    )
    users = SimpleNamespace(lookup=lambda user_ids: known)
    writer = Writer(folder, Layout(), KINDS.names, seeds=GenerationSeeds(users))
    writer.append(purchase(1, 9))
    with reader.snapshot() as snapshot:
        _, records = snapshot.read_users(np.array([1]))
        assert records["history_ids"][0, :4].tolist() == [9, 3, 4, PAD_ID]
        assert records["history_s"][0, :3].tolist() == [START_MS // 1000, 1_600_000_100, 1_600_000_000]
        assert (records["event_count"][0], records["sum_weight"][0], records["sum_label"][0]) == (6, 8.0, 2.0)
        assert (records["first_ms"][0], records["last_ms"][0]) == (1_500_000_000_000, START_MS)
    writer.close()


def test_two_writers_of_one_store_take_turns(writer, folder, clock, reader):
    other = Writer(folder, Layout(), KINDS.names, now_ms=clock)
    assert [int((writer, other)[n % 2].append(purchase(n, 1))[0]) for n in range(6)] == [1, 2, 3, 4, 5, 6]
    other.close()
    with reader.snapshot() as snapshot:
        assert snapshot.read_progress().last_sequence == 6


def test_names_of_events_keep_their_codes(folder):
    Writer(folder, Layout(), ("view", "purchase")).close()
    writer = Writer(folder, Layout(), ("cart", "purchase"))
    assert writer.codes.tolist() == [2, 1]
    writer.close()


def test_a_store_of_another_layout_is_refused(writer, folder):
    with pytest.raises(ConfigError, match="move the folder away"):
        Writer(folder, Layout(history=8), KINDS.names)


def test_a_store_of_another_shop_is_refused_and_stays_as_it_is(folder):
    with closing(Writer(folder, Layout(), KINDS.names, shop="another")) as writer:
        writer.append(purchase(1, 2))
    with pytest.raises(ConfigError, match=r"holds the events of 'another', not those of 'shop'.* Move the folder away"):
        Writer(folder, Layout(), ("refund",), shop="shop")
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:  # a helper names no shop
        assert writer.store.read_shop() == "another"
        assert writer.append(purchase(1, 2)).tolist() == [2]


def test_a_store_of_another_shop_that_lacks_a_database_is_refused_too(folder):
    """An older version made it: `set_aside` cannot read it."""
    Writer(folder, Layout(), KINDS.names, shop="another").close()
    with lmdb.open(str(folder), max_dbs=len(DATABASES)) as env:
        last = env.open_db(DATABASES[-1].encode())
        with env.begin(write=True) as txn:
            txn.drop(last)
    assert set_aside(folder, "shop") is None
    with pytest.raises(ConfigError, match="Move the folder away"):
        Writer(folder, Layout(), KINDS.names, shop="shop")


def test_a_folder_that_others_can_read_is_refused(folder):
    folder.mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="mode 755"):
        Writer(folder, Layout(), KINDS.names)


def test_a_link_instead_of_a_folder_is_refused(folder, tmp_path):
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="is not a directory"):
        Writer(folder, Layout(), KINDS.names)


def test_a_folder_that_cannot_be_made_is_named_with_a_remedy(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"shop\.live cannot be made: Not a directory\. .* Run this as the user who serves"):
        make_folder(tmp_path / "file" / "shop.live")


def test_only_the_owner_can_read_the_store(writer, folder):
    writer.append(purchase(1, 2))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert not any(mode & 0o077 for mode in modes.values()), modes
    assert folder.stat().st_uid == os.getuid()


def test_a_full_store_takes_nothing_and_says_so(folder, reader):
    writer = Writer(folder, Layout(), KINDS.names, settings=WriterSettings(store_bytes=1 << 20))
    rng = np.random.default_rng(0)

    def append() -> int:
        return len(writer.append(events(rng, 100, users=1_000)))

    with pytest.raises(DependencyError, match="store_bytes"):
        sum(iter(append, 0))
    with pytest.raises(DependencyError, match="store_bytes"):
        append()
    with reader.snapshot() as snapshot:
        progress = snapshot.read_progress()
        assert progress.last_sequence == progress.accepted == len(list(snapshot.read_events()))
        assert progress.last_sequence % 100 == 0 < progress.last_sequence
    writer.close()


def test_a_store_that_does_not_exist_is_a_dependency_that_is_away(reader):
    assert not reader.exists()
    with pytest.raises(DependencyError, match="no live store"), reader.snapshot():
        pass


def test_a_sequence_of_another_machine_is_not_taken_for_one_of_this_log(writer, reader):
    for item in range(5):
        writer.append(purchase(1, item))
    own, other = (mark_sequences(np.array([5]), name, shared=False)[0] for name in (writer.name_machine(), "another"))
    asked = np.array([own, other, mark_sequences(np.array([5]), "another", shared=True)[0], NO_SEQUENCE])
    begun_s = time.monotonic()
    assert reader.wait_for(asked, timeout_s=60.0).tolist() == [True, False, False, True]
    assert time.monotonic() - begun_s < 30
    assert asked.max() < 2**53  # JSON readers hold numbers as doubles


def test_an_event_is_visible_at_once_and_one_that_cannot_exist_yet_makes_nobody_wait(writer, reader):
    sequence = int(writer.append(purchase(1, 2))[0])
    assert reader.wait_for(np.array([sequence, sequence + 1]), timeout_s=0.01).tolist() == [True, False]
    begun_s = time.monotonic()
    asked = np.array([sequence, NO_SEQUENCE, sequence + MOST_AHEAD + 1, 2**63 - 1])
    assert reader.wait_for(asked, timeout_s=60.0).tolist() == [True, True, False, False]
    assert time.monotonic() - begun_s < 30


def test_what_an_event_counts_follows_from_its_name_and_value():
    ratings = EventKinds((EventKind("rating", positive_at=4.0), EventKind("hide", seen=True)), value_is="label")
    headers = np.zeros(4, HEADER)
    headers["kind"], headers["value"] = [0, 0, 0, 1], [5.0, 3.0, np.nan, np.nan]
    ratings.decide(headers)
    known = Flags.SEEN | Flags.COUNTED
    assert headers["flags"].tolist() == [Flags.POSITIVE | known, known, Flags.POSITIVE | known, Flags.SEEN]
    np.testing.assert_equal(headers["label"], np.array([5.0, 3.0, np.nan, np.nan], np.float32))
    quantities = EventKinds((EventKind("purchase", 2.0, positive=True),), value_is="weight")
    headers = np.zeros(2, HEADER)
    headers["value"] = [3.0, np.nan]
    quantities.decide(headers)
    assert headers["weight"].tolist() == [6.0, 2.0]


def test_a_return_changes_neither_history_nor_totals_nor_sales_nor_seen_items(writer, reader):
    quantities = EventKinds((EventKind("view", 0.1, seen=True), EventKind("purchase", 2.0, positive=True)), value_is="weight")
    batch = EventBatch.join([purchase(1, item) for item in (5, 6, 7, 8)])
    batch.headers["value"], batch.headers["kind"], batch.headers["flags"] = [3.0, -3.0, 0.0, 0.0], [1, 1, 1, 0], 0
    quantities.decide(batch.headers)
    writer.append(batch)
    with reader.snapshot() as snapshot:
        _, records = snapshot.read_users(np.array([1]))
        assert records["history_ids"][0, :2].tolist() == [5, PAD_ID]
        assert records["session_ids"][0, :3].tolist() == [8, 5, PAD_ID]
        assert (records["event_count"][0], records["sum_weight"][0]) == (1, 6.0)
        assert snapshot.read_seen(np.array([1]))["item_id"].tolist() == [5, 8]  # a value says nothing about a view
        assert snapshot.read_items(np.array([5, 6, 7]))[1]["positive_count"].tolist() == [1, 0, 0]
        assert snapshot.read_progress().accepted == 4


def test_events_without_a_positive_name_are_refused():
    with pytest.raises(ConfigError, match="positive"):
        EventKinds((EventKind("view"),))


def test_a_long_time_without_any_event_is_noted_as_a_pause(writer, reader):
    writer.append(purchase(1, 5, START_MS))
    writer.append(purchase(1, 6, START_MS + 29 * DAY_MS))
    writer.append(EventBatch.join([purchase(2, 5, START_MS + 100 * DAY_MS), purchase(1, 5, START_MS + 90 * DAY_MS)]))
    with reader.snapshot() as snapshot:
        assert snapshot.read_progress().first_ms == START_MS
        assert snapshot.read_pauses_ms() == [[START_MS + 29 * DAY_MS, START_MS + 90 * DAY_MS]]
        assert snapshot.read_progress().n_pauses == 1
    days = [START_MS + day * DAY_MS for day in (*range(101, 150), 190, 191, 240)]  # of one batch
    writer.append(EventBatch.join([purchase(1, 7, day_ms) for day_ms in reversed(days)]))
    with reader.snapshot() as snapshot:
        assert snapshot.read_pauses_ms()[1:] == [[days[-4], days[-3]], [days[-2], days[-1]]]
        assert snapshot.read_progress().n_pauses == 3


def test_more_names_of_events_than_codes_are_refused_instead_of_mixed_up(folder):
    Writer(folder, Layout(), [f"event {number}" for number in range(200)]).close()
    with pytest.raises(ConfigError, match=r"has had 257 names of events.*expected 256 at most. Use names of .events. again"):
        Writer(folder, Layout(), [f"event {number}" for number in range(100, 257)])
    Writer(folder, Layout(), [f"event {number}" for number in range(100, 256)]).close()
