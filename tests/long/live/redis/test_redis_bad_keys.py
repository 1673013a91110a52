"""A key in Redis that cannot be read costs its own user or item alone, and its events count once it can be read again."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from live.deferred import read_deferred
from live.erase import erase_user
from live.maintenance import lock
from serving.contract.errors import DependencyError
from serving.contract.tensors import OBSERVE, Degraded
from serving.live.shared.feast_layout import make_entity_key, make_feature_field
from serving.live.shared.feast_views import ITEMS_VIEW, USERS_VIEW, View
from serving.live.shared.redis_reader import RedisReader
from serving.live.shared.redis_state import PATIENT_S, RedisState
from serving.live.store import find_live_folder
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe
from tests.interrupting import called_on_return
from tests.unit.live.answers import answer, change_stage
from tests.unit.live.batches import purchase
from tests.unit.live.commands import call
from tests.unit.live.consuming import consumer_of, make_message
from tests.unit.live.redis.redis_machines import PROJECT, Machine, count_events, machine, sharing
from tests.unit.tables.redis_server import RedisServer
from tests.waiting import until

BAD, GOOD = 4711, 4712
BAD_FIELDS = {
    "garbled feature": (make_feature_field(USERS_VIEW.name, "event_count"), b"\xff\xff"),
    "garbled text": (make_feature_field(USERS_VIEW.name, "session_events"), b"\x62\x03\x0a\x01\xff"),
}


def spoil(redis: RedisServer, how: str, view: View = USERS_VIEW, entity_id: int = BAD) -> bytes:
    """Make a key unreadable, and return it."""
    key = make_entity_key(PROJECT, view.join_key, entity_id)
    redis.client.delete(key)
    if how == "no hash":
        redis.client.set(key, b"no hash")
    else:
        redis.client.hset(key, *BAD_FIELDS[how])
    return key


@pytest.fixture(params=["no hash", *BAD_FIELDS])
def how(request) -> str:
    return request.param


@pytest.fixture
def host(tmp_path, redis) -> Iterator[Machine]:
    with machine(tmp_path / "a", redis.address) as host:
        yield host


def read_deferred_count(host: Machine) -> float | None:
    return host.writer.store.read_counters().get("redis_deferred")


def test_only_the_user_of_a_bad_key_is_answered_without_live_state(repository, tmp_path, redis, state, how):
    with (
        closing(Observe.load(repository / OBSERVE / "1")) as observe,
        machine(tmp_path / "other", redis.address) as other,
        closing(RedisReader(find_live_folder(repository), "", RedisState(redis.address, PROJECT, PATIENT_S))) as reader,
    ):
        live, frozen = Pipeline.load(repository, live=reader), Pipeline.load(repository)
        bought = answer(frozen, [7, 8, 9])["item_ids"][:, 0].tolist()
        for user, item in zip((7, 8, 9), bought, strict=True):
            other.writer.append(purchase(user, item, observe.now_ms()))
        other.share_all()
        expected = answer(live, [7, 8, 9])
        assert expected["degraded"].tolist() == [[0]] * 3
        spoil(redis, how, entity_id=8)
        mixed = answer(live, [7, 8, 9, 8])
        assert mixed["degraded"][:, 0].tolist() == [0, Degraded.LIVE, 0, Degraded.LIVE]
        for place in (0, 2):
            assert mixed["item_ids"][place].tolist() == expected["item_ids"][place].tolist()
            assert bought[place] not in mixed["item_ids"][place]
        unaware = answer(frozen, [8])["item_ids"][0].tolist()
        assert mixed["item_ids"][1].tolist() == mixed["item_ids"][3].tolist() == unaware


def test_all_other_events_are_shared_and_those_of_a_bad_key_count_once_it_is_removed(host, redis, state, how):
    key = spoil(redis, how)
    for item in range(3):
        for user in (BAD, GOOD):
            host.writer.append(purchase(user, item))
    host.share_all()
    assert host.sharer.read_shared_sequence() == 6
    assert count_events(state, GOOD) == 3
    assert [count_events(state, item, ITEMS_VIEW) for item in range(3)] == [2, 2, 2]
    host.sharer.share_deferred()
    assert state.read(USERS_VIEW, np.array([BAD]))[0].fault
    redis.client.delete(key)
    host.writer.append(purchase(BAD, 7))
    host.share_all()  # this event may not overtake those before it: the hash would seem to have them
    assert count_events(state, BAD) is None
    host.sharer.share_deferred()
    host.buy((BAD, 8))
    (entity,) = state.read(USERS_VIEW, np.array([BAD]))
    assert (entity.values["event_count"], entity.values["seen_ids"]) == (5, [0, 1, 2, 7, 8])
    host.sharer.share(0)
    host.sharer.share_deferred()
    assert (count_events(state, BAD), count_events(state, GOOD)) == (5, 3)


def test_the_events_of_an_item_with_a_bad_key_count_for_their_users(host, redis, state):
    key = spoil(redis, "no hash", ITEMS_VIEW, 1)
    host.buy((GOOD, 1), (GOOD, 2), (GOOD, 1))
    assert (count_events(state, GOOD), count_events(state, 2, ITEMS_VIEW)) == (3, 1)
    redis.client.delete(key)
    host.sharer.share_deferred()
    assert [count_events(state, item, ITEMS_VIEW) for item in (1, 2)] == [2, 1]


def test_a_list_of_another_length_in_the_hash_of_an_item_stops_nobody(host, redis, state):
    counts: dict[str, int | list] = {"event_count": 4, "positive_count": 4, "first_ms": 1, "last_ms": 1}
    values = counts | {"decayed": [1.0, 1.0]}
    redis.client.hset(make_entity_key(PROJECT, "item_id", 1), mapping=dict(ITEMS_VIEW.encode(values)))
    host.buy((GOOD, 1))
    assert (count_events(state, 1, ITEMS_VIEW), count_events(state, GOOD)) == (5, 1)


def test_waiting_events_outlive_the_process_that_shares_and_a_redis_that_loses_its_data(tmp_path, redis, state):
    with machine(tmp_path / "a", redis.address) as host:
        host.buy((BAD, 0))
        spoil(redis, "no hash")
        host.buy((BAD, 1))
    with machine(tmp_path / "a", redis.address) as host:
        host.buy((BAD, 2), (GOOD, 2))
        redis.client.flushall()
        host.share_all()
        host.sharer.share_deferred()
        assert (count_events(state, BAD), count_events(state, GOOD)) == (3, 1)


def test_a_key_that_is_spoiled_again_while_its_events_are_applied_goes_on_waiting(host, redis, state):
    key = spoil(redis, "no hash")
    host.buy((BAD, 1))
    redis.client.delete(key)
    with called_on_return(lambda: spoil(redis, "no hash"), RedisState.read):
        host.sharer.share_deferred()
    redis.client.delete(key)
    host.sharer.share_deferred()
    assert count_events(state, BAD) == 1


def test_an_event_from_kafka_that_two_machines_had_to_defer_counts_once(tmp_path, redis, state):
    key = spoil(redis, "no hash")
    messages = [make_message(b'{"user_id": %d, "item_id": %d}' % (BAD, number), number) for number in range(3)]
    with machine(tmp_path / "a", redis.address) as one, machine(tmp_path / "b", redis.address) as other:
        for host in (one, other):
            consumer_of(host.writer).append_messages(messages)
            host.buy((BAD, 50))
        redis.client.delete(key)
        for host in (one, other, one):
            host.sharer.share_deferred()
    assert count_events(state, BAD) == 5


def test_many_waiting_events_are_shared_in_turns_so_that_others_need_not_wait(host, redis, state, monkeypatch):
    monkeypatch.setattr("live.sharing.EVENTS_PER_STEP", 2)
    monkeypatch.setattr("live.sharing.STEPS_PER_RETRY", 2)
    keys = [spoil(redis, "no hash", entity_id=user) for user in (BAD, BAD + 10)]
    for item in range(6):
        for user in (BAD, GOOD):
            host.writer.append(purchase(user, item))
    host.buy((BAD + 10, 1))
    for key in keys:
        redis.client.delete(key)
    counts, waiting = [], []
    for item in range(4):
        host.sharer.share_deferred()
        counts.append(count_events(state, BAD))
        waiting.append([after for _, after in sorted(read_deferred(host.writer.store).items())])
        host.buy((GOOD, item))
    assert counts == [2, 4, 6, 6]
    assert waiting == [[4, 12], [8, 12], [12, 12], []]  # each waits only for what was not looked at yet
    assert [count_events(state, user) for user in (GOOD, BAD + 10)] == [10, 1]


def test_a_bad_key_is_counted_and_logged_once_without_an_id(host, redis, state, monkeypatch, caplog):
    caplog.set_level("INFO")
    monkeypatch.setattr("live.sharing.PAUSE_S", 0.02)
    monkeypatch.setattr("live.sharing.STATUS_EVERY_S", 0.02)

    def read_log() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name == "live.sharing"]

    key = spoil(redis, "no hash")
    with sharing(host):
        for user in (BAD, BAD, GOOD, BAD):
            host.writer.append(purchase(user, 1))
        until(lambda: read_deferred_count(host) == 1)
        until(lambda: count_events(state, GOOD) == 1)
        counters = host.writer.store.read_counters()
        assert counters["redis_down"] == 0
        redis.client.delete(key)
        until(lambda: read_deferred_count(host) == 0)
        assert count_events(state, BAD) == 3
    (warning,) = [line for line in read_log() if "cannot be read" in line]
    assert "is no hash. Its events wait; all others are shared. `python -m live inspect` lists such keys." in warning
    assert "remove it" in warning
    assert any("can be read again" in line for line in read_log())
    assert not any(str(BAD) in line for line in read_log())


def test_inspect_prints_the_key_as_redis_cli_takes_it(repository, redis):
    change_stage(repository, OBSERVE, live_redis=redis.address, live_project=PROJECT)
    key = spoil(redis, "no hash")
    with machine(find_live_folder(repository), redis.address) as host:
        host.buy((GOOD, 1))
        assert "Redis" not in call("inspect", "--repo", repository)
        host.buy((BAD, 1))
    lines = call("inspect", "--repo", repository).splitlines()
    place, _, quoted = lines[-1].partition(": ")
    assert place == f"user_id {BAD}, events after sequence 1"
    subprocess.run(["redis-cli", "-p", str(redis.port)], input=f"DEL {quoted}\n", text=True, check=True, capture_output=True)
    assert not redis.client.exists(key)


def test_sharing_waits_where_more_keys_are_bad_than_single_faults_explain(host, redis, state, monkeypatch):
    monkeypatch.setattr("live.deferred.MOST_DEFERRED", 2)
    keys = [spoil(redis, "no hash", entity_id=user) for user in range(3)]
    host.buy((0, 5), (1, 5))
    for user in (0, 2, GOOD):
        host.writer.append(purchase(user, 5))
    with pytest.raises(DependencyError, match=r"more than 2 users and items.*`python -m live inspect`.*remove these keys"):
        host.share_all()
    assert host.sharer.read_shared_sequence() == 2
    redis.client.delete(keys[1])
    host.sharer.share_deferred()
    host.share_all()
    for key in (keys[0], keys[2]):
        redis.client.delete(key)
    host.sharer.share_deferred()
    assert [count_events(state, user) for user in (0, 1, 2, GOOD)] == [2, 1, 1, 1]


def test_a_user_with_a_bad_key_is_erased_and_does_not_come_back(host, redis, state):
    spoil(redis, "no hash")
    host.buy((BAD, 1))
    with lock(host.writer.store.folder):  # as an erasure that has read no event yet
        redis.client.flushall()
        host.sharer.share_deferred()
        assert count_events(state, BAD) is None
    spoil(redis, "no hash")
    host.share_all()
    erasure = erase_user(host.writer, BAD, state)
    assert erasure.removed["fields in Redis"] == 1
    assert not any(erasure.left.values())
    host.sharer.share_deferred()
    host.sharer.share(0)
    assert count_events(state, BAD) is None
    assert redis.client.keys(b"*user_id*") == []


def test_maintenance_runs_while_a_key_stays_unreadable(repository, redis):
    with machine(find_live_folder(repository), redis.address) as host:
        spoil(redis, "no hash")
        host.buy((BAD, 1))
        rounds = []

        def maintain() -> None:
            with lock(host.writer.store.folder) as is_free:
                assert is_free
            rounds.append(call("maintain", "--repo", repository))

        with called_on_return(maintain, RedisState.read):
            host.sharer.share_deferred()
        assert "segments removed" in rounds[0]
        assert read_deferred(host.writer.store)


def test_maintenance_waits_while_events_of_a_key_that_can_be_read_again_are_applied(repository, redis, state):
    with ThreadPoolExecutor(1) as pool, machine(find_live_folder(repository), redis.address) as host:
        key = spoil(redis, "no hash")
        host.buy((BAD, 1))
        redis.client.delete(key)
        rounds = []

        def maintain() -> None:
            rounds.append(pool.submit(call, "maintain", "--repo", repository))
            with pytest.raises(TimeoutError):
                rounds[0].result(timeout=0.3)

        with called_on_return(maintain, RedisState.change):
            host.sharer.share_deferred()
        assert "segments removed" in rounds[0].result()
        assert count_events(state, BAD) == 1


def test_a_user_who_is_erased_after_the_look_at_the_key_does_not_wait_again(host, redis, state, monkeypatch):
    monkeypatch.setattr("live.sharing.EVENTS_PER_STEP", 1)
    monkeypatch.setattr("live.sharing.STEPS_PER_RETRY", 1)
    key = spoil(redis, "no hash")
    host.buy((BAD, 1), (GOOD, 1), (BAD, 1))
    redis.client.delete(key)

    def erase() -> None:
        with lock(host.writer.store.folder) as is_free:
            assert is_free
        erase_user(host.writer, BAD, state)

    with called_on_return(erase, RedisState.read):
        host.sharer.share_deferred()
    assert not read_deferred(host.writer.store)
    assert not redis.client.exists(key)


def test_a_bad_key_of_the_project_itself_is_an_outage(host, redis, state):
    redis.client.set(state.positions_key, b"no hash")
    with pytest.raises(DependencyError, match=r"holds a key of the project shop that is no hash \(WRONGTYPE") as told:
        host.share_all()
    assert "HGETALL" not in str(told.value)
    redis.client.delete(state.positions_key)
    host.writer.append(purchase(GOOD, 1))
    host.share_all()  # at once, without a pause
    assert count_events(state, GOOD) == 1


@pytest.mark.parametrize("packed", [b"", b"1 2 3", b"1 2 3 4 5", b"v2 1 2 3"])
def test_a_position_of_another_version_is_an_outage(host, redis, state, packed):
    redis.client.hset(state.positions_key, "another machine", packed)
    with host.reader.users.snapshot() as snapshot, pytest.raises(DependencyError, match="Serve the same version on all"):
        snapshot.read_progress()
    with pytest.raises(DependencyError, match="remove the key recommender_live:shop"):
        host.buy((GOOD, 1))
    redis.client.delete(state.positions_key)
    host.share_all()
    assert count_events(state, GOOD) == 1
