"""Users of a topic (Kafka's own protocol) are forgotten."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import OFFSET_BEGINNING, OFFSET_END, KafkaError, KafkaException

from tests.waiting import until
from triton_recommender import CacheUnavailable, MemoryCache
from triton_recommender.cache.events import FollowCounts, Names, assign_new, follow_topic
from triton_recommender.ids import stable_id


class Forgotten(MemoryCache):
    """Notes who was forgotten. `down`: how many calls fail first."""

    def __init__(self) -> None:
        super().__init__()
        self.users: list[int] = []
        self.down = 0

    def forget(self, user_ids) -> None:
        if self.down:
            self.down -= 1
            raise CacheUnavailable("down")
        self.users += sorted(user_ids)


@pytest.fixture
def cache() -> Forgotten:
    return Forgotten()


@pytest.fixture
def running() -> Iterator:
    """running(function, *arguments, counts) starts it in a thread with a stop of its own, ended after the test."""
    stop, threads = Event(), []

    def start(function, *arguments) -> FollowCounts:
        counts = FollowCounts()
        threads.append(Thread(target=function, args=[*arguments, stop, counts]))
        threads[-1].start()
        return counts

    yield start
    stop.set()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_users_of_messages_are_forgotten(cache, broker, running):
    broker.create("events")
    counts = running(follow_topic, cache, broker.address, "events", "customer", Names())
    sent = 0
    while not cache.users:  # until the follower is there; the mock broker knows no times
        broker.send("events", json.dumps({"customer": 1}).encode())
        sent += 1
        time.sleep(0.1)
    cache.users.clear()
    for user, partition in ((17850, 0), ("12583", 1), (14911.0, 2)):
        broker.send("events", json.dumps({"customer": user, "item": 3}).encode(), partition)
    deep = b'{"customer": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
    for nobody in (b"\xff", b"[]", b"{}", b'{"customer": null}', b'{"customer": "ann"}', deep):
        broker.send("events", nobody)
    until(lambda: counts.unusable == 6)
    until(lambda: {17850, 12583, 14911} <= set(cache.users))


def test_a_topic_that_appears_later_is_read_and_a_store_that_is_down_is_tried_again(cache, broker, running):
    cache.down = 1
    running(follow_topic, cache, broker.address, "later", "user_id", Names())
    time.sleep(0.5)
    while not cache.users:
        broker.send("later", b'{"user_id": 7}')
        time.sleep(0.1)
    assert set(cache.users) == {7}
    assert cache.down == 0


def test_a_topic_that_is_missing_is_named_once(cache, broker, running, caplog):
    running(follow_topic, cache, broker.address, "evnets", "user_id", Names())
    until(lambda: caplog.messages)
    time.sleep(1.2)  # two more looks for it
    assert caplog.messages == [f"waiting for the topic evnets of Kafka at {broker.address}: Broker: Unknown topic or partition"]


class Partitions:
    """Stands in for a consumer whose broker knows times, as the mock broker does not."""

    def __init__(self) -> None:
        self.partitions = {0: None, 1: None}
        self.assigned: list[tuple[int, int]] = []
        self.since_ms: set[int] = set()
        self.error: KafkaError | None = None

    def list_topics(self, topic, timeout):
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=self.partitions)})

    def get_watermark_offsets(self, partition, timeout):
        return 0, 40

    def offsets_for_times(self, asked, timeout):
        self.since_ms = {partition.offset for partition in asked}
        offsets = {0: 33, 1: OFFSET_END}
        return [SimpleNamespace(partition=p.partition, offset=offsets[p.partition], error=self.error) for p in asked]

    def incremental_assign(self, partitions):
        self.assigned += [(partition.partition, partition.offset) for partition in partitions]


def test_a_topic_is_read_from_one_ttl_ago_and_later_partitions_whole():
    consumer, assigned = Partitions(), set[int]()
    before_ms = time.time() * 1e3
    assign_new(consumer, "events", assigned, ttl_s=60.0)
    [since_ms] = consumer.since_ms
    assert before_ms - 60_001 <= since_ms <= time.time() * 1e3 - 60_000
    assert consumer.assigned == [(0, 33), (1, 40)]  # the second had nothing since: from its end at that moment
    consumer.partitions[2] = None
    assign_new(consumer, "events", assigned, ttl_s=60.0)
    assert consumer.assigned[2:] == [(2, OFFSET_BEGINNING)]
    assert assigned == {0, 1, 2}


def test_a_partition_whose_offset_is_unknown_is_not_taken_for_one_without_events():
    consumer, assigned = Partitions(), set[int]()
    consumer.error = KafkaError(KafkaError.LEADER_NOT_AVAILABLE)
    with pytest.raises(KafkaException, match="LEADER_NOT_AVAILABLE"):
        assign_new(consumer, "events", assigned, ttl_s=60.0)
    assert (consumer.assigned, assigned) == ([], set())


def test_only_numbers_lose_the_fraction_that_missing_values_gave_them(repo):
    (repo / "recommend" / "10" / "user_names.json").write_text('{"v1.0": 5, "v1": 6, "7.0": 8}')
    names = Names(repo)
    assert [names.find_id(value) for value in ("v1.0", "v1", "7.0")] == [5, 6, 8]
    assert [Names().find_id(value) for value in ("17850.0", 17850.0, "-3.0")] == [17850, 17850, -3]
    missing: tuple[Any, ...] = (None, [], {})
    assert [names.find_id(value) for value in missing] == [None] * 3


def test_names_of_users_are_known_from_the_repository_also_later(repo):
    now_s = [0.0]
    names = Names(repo, lambda: now_s[0])
    assert [names.find_id(value) for value in ("ann", "7", 7, "")] == [7, 7, 7, None]
    assert names.find_id("bob") == stable_id("bob")  # new: the id that the next export gives it
    assert [names.knows(text) for text in ("ann", "7", "bob", "12")] == [True, True, False, False]
    (repo / "recommend" / "10" / "user_names.json").write_text('{"ann": 7, "bob": 8}')
    assert names.find_id("bob") == stable_id("bob")  # read a moment ago
    now_s[0] += 6.0
    assert names.find_id("bob") == 8
    (repo / "recommend" / "10" / "user_names.json").write_text('{"ann": 7, "bob": 8, "12": 4, "12.0": 5}')
    now_s[0] += 6.0
    assert [names.find_id(value) for value in ("12.0", "12")] == [5, 4]
