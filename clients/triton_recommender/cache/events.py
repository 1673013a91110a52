"""Forget users as events about them arrive in a Kafka topic.

    message ─▶ user id ─▶ cache.forget, repeated until the store has done it

No offset is stored: no answer is kept longer than its ttl, so a follower starts with the events of the last ttl. Forgetting a
user twice does no harm.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

from triton_recommender.cache.base import Cache
from triton_recommender.catalogue import Catalogue
from triton_recommender.errors import CacheUnavailable, CatalogueMissing, InvalidRequest
from triton_recommender.tensors import ANONYMOUS

BATCH = 1_000  # events whose users are forgotten together
POLL_S = 0.2  # longest wait for messages
RETRY_S = 0.5  # after the store failed, and while the topic is not there
REFRESH_S = 5.0  # between looks for new partitions and for new names; also the timeout of such a look
WHOLE_FLOAT = re.compile(r"-?\d+\.0")  # an integer as pandas writes it if its column has missing values

log = logging.getLogger(__name__)


@dataclass
class FollowCounts:
    """Counts of a follower. events: read; users: forgotten, counted once per batch; unusable: events that name no user"""

    events: int = 0
    users: int = 0
    unusable: int = 0


class Names:
    """Translates user ids as events spell them into ids on the wire.

    source: where `Catalogue.load` finds the names of a shop whose user ids are text. It is read again for an unknown name, at
        most every REFRESH_S.
    """

    def __init__(self, source: str | Path | None = None, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._source, self._catalogue, self._read_s = source, Catalogue(), float("-inf")
        self._clock_s = clock_s

    def find_id(self, value: object) -> int | None:
        """Return the id on the wire for 17850, "17850.0" or "ann", as events spell it. None for a value that is no user id."""
        if not isinstance(value, str | int | float) or not (text := str(value).strip()):
            return None
        if text not in self._catalogue.user_names and self._source and self._clock_s() - self._read_s > REFRESH_S:
            self._catalogue, self._read_s = _load_catalogue(self._source), self._clock_s()
        if text not in self._catalogue.user_names and WHOLE_FLOAT.fullmatch(text):
            text = text.removesuffix(".0")
        user_id = self._catalogue.user_id(text)
        return user_id if isinstance(user_id, int) and user_id != ANONYMOUS else None

    def knows(self, text: str) -> bool:
        """Return whether a text is a user id or a published name."""
        user_id = self.find_id(text)
        names = self._catalogue.user_names
        return user_id is not None and (not names or text in names or text == str(user_id))


def _load_catalogue(source: str | Path) -> Catalogue:
    """Return the catalogue of a source, an empty one where the source does not exist or publishes none."""
    try:
        return Catalogue.load(source)
    except CatalogueMissing:
        return Catalogue()


def follow_topic(
    cache: Cache, brokers: str, topic: str, field: str, names: Names, stop: Event, counts: FollowCounts | None = None
) -> None:
    """Forget the users that JSON messages name in `field`, until `stop`. Wait for brokers that are down, or a missing topic."""
    from confluent_kafka import Consumer, KafkaException  # only who follows a topic needs it

    settings = {"bootstrap.servers": brokers, "group.id": "recommendation-cache", "enable.auto.commit": False, "log_level": 0}
    settings["auto.offset.reset"] = "earliest"  # if the next message was removed; the default would skip those that are left
    consumer, refreshed_s = Consumer(settings), float("-inf")
    assigned: set[int] = set()
    reported = ""  # the fault in the log: one line for each, however often it is met
    try:
        while not stop.is_set():
            if time.monotonic() - refreshed_s > (REFRESH_S if assigned else RETRY_S):
                refreshed_s = time.monotonic()
                try:
                    assign_new(consumer, topic, assigned, cache.ttl_s)
                    reported = ""
                except KafkaException as error:
                    if (fault := error.args[0].str()) != reported:
                        log.warning("waiting for the topic %s of Kafka at %s: %s", topic, brokers, fault)
                    reported = fault
            messages = consumer.consume(BATCH, POLL_S)
            for fault in {fault.str() for message in messages if (fault := message.error()) is not None}:
                log.warning("topic %s: %s", topic, fault)
            bodies = [message.value() for message in messages if message.error() is None]
            _forget(cache, [_read_user_id(body, field, names) for body in bodies], stop, counts)
    finally:
        consumer.close()


def assign_new(consumer, topic: str, assigned: set[int], ttl_s: float) -> None:
    """Assign new partitions: at first from one ttl ago, later ones from their beginning.

    Raises KafkaException when the brokers do not answer, or do not have the topic.
    """
    from confluent_kafka import OFFSET_BEGINNING, KafkaException, TopicPartition

    metadata = consumer.list_topics(topic, timeout=RETRY_S).topics[topic]
    if metadata.error is not None:
        raise KafkaException(metadata.error)
    new = sorted(set(metadata.partitions) - assigned)
    if not new:
        return
    if assigned:
        consumer.incremental_assign([TopicPartition(topic, partition, OFFSET_BEGINNING) for partition in new])
    else:
        ends = {partition: consumer.get_watermark_offsets(TopicPartition(topic, partition), REFRESH_S)[1] for partition in new}
        since_ms = int((time.time() - ttl_s) * 1e3)
        offsets = consumer.offsets_for_times(
            [TopicPartition(topic, partition, since_ms) for partition in new], timeout=REFRESH_S
        )
        for partition in offsets:
            if partition.error is not None:
                raise KafkaException(partition.error)
            if partition.offset < 0:  # no event since then: begin at the end that was read above
                partition.offset = ends[partition.partition]
        consumer.incremental_assign(offsets)
    assigned.update(new)


def _read_user_id(body: bytes | None, field: str, names: Names) -> int | None:
    try:
        return names.find_id(json.loads(body or b"")[field])
    except (TypeError, ValueError, KeyError, IndexError, RecursionError, InvalidRequest):
        return None


def _forget(cache: Cache, user_ids: Iterable[int | None], stop: Event, counts: FollowCounts | None) -> None:
    user_ids = list(user_ids)
    users = {user for user in user_ids if user is not None}
    while users:
        try:
            cache.forget(users)
            break
        except CacheUnavailable as error:
            log.warning("%s", error)
            if stop.wait(RETRY_S):
                return
    if counts is not None:
        counts.events += len(user_ids)
        counts.users += len(users)
        counts.unusable += user_ids.count(None)


def run_until_interrupted(follow: Callable[[Event], None]) -> None:
    """Follow until Ctrl-C or SIGTERM."""
    import signal

    stop = Event()
    received: SimpleQueue[int] = SimpleQueue()

    def set_stop() -> None:
        received.get()
        stop.set()

    # The handler must not set the event: it may have interrupted `stop.wait`, which holds its lock. A SimpleQueue has none.
    Thread(target=set_stop, daemon=True).start()
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, lambda number, _: received.put(number))
    follow(stop)
