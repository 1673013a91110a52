"""Users whose state is in Redis are erased there too, and a store that was restored or cut off shares each event once."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, closing

import numpy as np
import pytest

from live.archive import compact, drop_segments
from live.backup import back_up, restore
from live.erase import erase_user
from serving.contract.errors import DependencyError, RecommenderError
from serving.live.sequences import hash_machine
from serving.live.shared.feast_layout import make_entity_key
from serving.live.shared.feast_views import USERS_VIEW
from serving.live.shared.redis_state import PATIENT_S, TIMEOUT_S, RedisState
from tests.unit.live.batches import purchase
from tests.unit.live.redis.redis_machines import PROJECT, count_events, machine, sharing
from tests.unit.tables.redis_server import RedisCluster
from tests.waiting import until


def test_an_erased_user_is_gone_from_redis_too_and_does_not_come_back(tmp_path, state, redis, monkeypatch):
    monkeypatch.setattr("live.erase.SHARED_WITHIN_S", 0.1)
    with machine(tmp_path / "a", redis.address) as host:
        for item in range(5):
            host.writer.append(purchase(1, item))
            host.writer.append(purchase(2, item))
        compact(host.writer, older_than_ms=host.writer.now_ms() + 1)
        host.writer.append(purchase(1, 9))
        with pytest.raises(RecommenderError, match="up to 0 of 11"):
            erase_user(host.writer, 1, state)
        host.share_all()
        host.buy((1, 10))
        assert len(redis.client.keys(b"*user_id*")) == 2
        erasure = erase_user(host.writer, 1, state)
        assert erasure.removed["fields in Redis"] > 10
        assert not any(erasure.left.values())
        assert "fields in Redis" in erasure.left
        assert len(redis.client.keys(b"*user_id*")) == 1
        redis.client.flushall()
        host.share_all()
        assert [count_events(state, user) for user in (1, 2)] == [None, 5]


def test_events_that_were_removed_before_they_were_shared_are_skipped(tmp_path, state, redis):
    with machine(tmp_path / "a", redis.address) as host:
        host.writer.append(purchase(1, 0))
        compact(host.writer, older_than_ms=host.writer.now_ms() + 1)
        drop_segments(tmp_path / "a", None, most_bytes=0)
        host.share_all()
        assert host.sharer.read_shared_sequence() == 1


@pytest.mark.parametrize("losers", [(0,), (1,), (0, 1)])
def test_what_nodes_lost_is_applied_again_while_events_come(tmp_path, losers):
    cluster, posted = RedisCluster(tmp_path / "redis", n_nodes=2), Counter[int]()
    with (
        closing(RedisState(cluster.address, PROJECT, PATIENT_S)) as state,
        machine(tmp_path / "a", cluster.address) as host,
        sharing(host),
    ):

        def post(number: int) -> None:
            user = number % 20
            host.writer.append(purchase(user, number))
            posted[user] += 1

        def is_whole() -> bool:
            return {user: count_events(state, user) for user in posted} == posted

        for number in range(30):
            post(number)
        until(is_whole)
        for node in losers:
            cluster.nodes[node].client.flushall()
        for number in range(30, 90):
            post(number)
            time.sleep(0.01)
        until(is_whole)
    cluster.stop()


def test_a_position_that_redis_lost_is_written_again_without_an_event(tmp_path, state, redis, monkeypatch):
    monkeypatch.setattr("live.sharing.STATUS_EVERY_S", 0.05)
    with machine(tmp_path / "a", redis.address) as host, sharing(host):
        host.writer.append(purchase(1, 0))
        until(lambda: count_events(state, 1))
        # The position is written after the events. After the loss it would hide the loss.
        until(lambda: state.read_positions()[host.sharer.machine].shared_sequence == 1)
        for key in (state.positions_key, *redis.client.keys(b"*user_id*")):
            redis.client.delete(key)
        until(lambda: count_events(state, 1) == 1 and host.sharer.machine in state.read_positions())


def test_what_a_replica_lacked_at_a_failover_is_applied_again_once_a_mark_is_removed(tmp_path, state, redis):
    """As docs/live.md says."""
    with machine(tmp_path / "a", redis.address) as host:
        host.buy((1, 0), (2, 0))
        key = make_entity_key(PROJECT, USERS_VIEW.join_key, 1)
        at_replica = redis.client.dump(key)
        host.buy((1, 1))
        redis.client.restore(key, 0, at_replica, replace=True)
        host.buy((2, 1))
        assert [count_events(state, user) for user in (1, 2)] == [1, 2]
        assert redis.client.delete(f"recommender_live:{{0}}:{PROJECT}") == 1
        host.share_all()
        assert [count_events(state, user) for user in (1, 2)] == [2, 2]


def test_a_restored_store_shares_each_event_once_under_its_new_name(tmp_path, state, redis):
    with machine(tmp_path / "a", redis.address) as host:
        host.buy((1, 0), (1, 1), (1, 2))
        back_up(tmp_path / "a", tmp_path / "backup")
        host.buy((1, 5), (2, 5))
        former = host.sharer.machine
    restore(tmp_path / "backup", tmp_path / "b")
    with machine(tmp_path / "b", redis.address) as host:
        assert hash_machine(host.sharer.machine) != hash_machine(former)
        assert host.sharer.read_shared_sequence() == 3  # of five that Redis has, three are in this log
        host.writer.append(purchase(1, 6))
        host.buy((2, 7))
        assert [count_events(state, user) for user in (1, 2)] == [3 + 1 + 1, 2]
        host.sharer.share(0)  # the part under the former name
        assert count_events(state, 1) == 3 + 1 + 1
        redis.client.flushall()
        host.share_all()
        assert [count_events(state, user) for user in (1, 2)] == [3 + 1, 1]


def test_a_restored_store_with_nothing_new_says_that_redis_has_all_of_it(tmp_path, state, redis):
    with machine(tmp_path / "a", redis.address) as host:
        host.buy((1, 0))
    back_up(tmp_path / "a", tmp_path / "backup")
    restore(tmp_path / "backup", tmp_path / "b")
    with machine(tmp_path / "b", redis.address) as host, sharing(host):
        until(lambda: host.sharer.machine in state.read_positions())
        assert not any(erase_user(host.writer, 1, state).left.values())


def test_sharing_survives_an_outage_and_says_that_there_is_one(tmp_path, redis, state, monkeypatch, caplog):
    monkeypatch.setattr("live.sharing.PAUSE_S", 0.05)
    monkeypatch.setattr("live.sharing.STATUS_EVERY_S", 0.05)
    monkeypatch.setattr("serving.live.shared.redis_state.PAUSE_S", 0.05)
    redis.freeze()
    with machine(tmp_path / "a", redis.address, TIMEOUT_S) as host:
        host.writer.append(purchase(1, 7))

        def has_counted(name: str, value: int) -> bool:
            return host.writer.store.read_counters().get(name) == value

        with sharing(host):
            until(lambda: has_counted("redis_down", 1))
            with pytest.raises(DependencyError, match="did not answer"):
                host.sharer.read_shared_sequence()
            redis.thaw()
            until(lambda: has_counted("redis_down", 0))
            host.writer.append(purchase(1, 8))
            until(lambda: state.read_positions()[host.sharer.machine].shared_sequence == 2)
            until(lambda: has_counted("redis_lag", 0))
            caplog.clear()
            redis.freeze()
            for item in (9, 10):
                host.writer.append(purchase(2, item))
            until(lambda: has_counted("redis_lag", 2))
            seen_ms = host.writer.store.read_counters()["redis_seen_ms"]
            until(lambda: host.writer.store.read_counters()["redis_seen_ms"] > seen_ms)
            redis.thaw()
            until(lambda: has_counted("redis_lag", 0))
            told = [record.getMessage() for record in caplog.records if record.name == "live.sharing"]
            assert told
            assert len(told) == len(set(told))  # however long the outage takes
    (entity,) = state.read(USERS_VIEW, np.array([1]))
    assert entity.values["seen_ids"] == [7, 8]


def test_a_key_of_another_shape_has_a_fault_and_fails_no_other(state, redis):
    key = make_entity_key(PROJECT, USERS_VIEW.join_key, 19)
    redis.client.set(key, b"no hash")
    bad, good = state.read(USERS_VIEW, np.array([19, 20]))
    assert (bad.fault, bad.values) == ("The key is no hash.", {})  # not the key, because keys hold ids of users
    assert (good.fault, good.values) == ("", {})
    assert state.read(USERS_VIEW, np.array([20]))[0].values == {}  # at once, without a pause


def test_a_full_redis_is_named_and_still_read(tmp_path, state, redis):
    with machine(tmp_path / "a", redis.address) as host:
        host.buy((1, 7))
        redis.client.config_set("maxmemory", 1)
        host.writer.append(purchase(1, 8))
        with pytest.raises(DependencyError, match=r"is full \(.*Raise maxmemory"):
            host.share_all()
        assert host.sharer.read_shared_sequence() == 1
        redis.client.config_set("maxmemory", 0)
        host.share_all()
    assert count_events(state, 1) == 2


def test_a_refused_password_is_told_from_an_outage(redis, monkeypatch):
    monkeypatch.setenv("LIVE_REDIS_PASSWORD", "wrong")
    redis.client.config_set("requirepass", "right")
    with ExitStack() as ending:
        ending.callback(redis.client.config_set, "requirepass", "")
        state = ending.enter_context(closing(RedisState(redis.address, PROJECT)))
        with pytest.raises(DependencyError, match=r"invalid username-password pair.*LIVE_REDIS_PASSWORD are its credentials"):
            state.read_positions()
