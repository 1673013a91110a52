"""A consumer of events for tests, messages for it, and a process that consumes until it is killed."""

from __future__ import annotations

import threading
from contextlib import closing
from pathlib import Path
from typing import cast

from confluent_kafka import Message

from live.consumer import EventConsumer
from live.messages import MessageDecoder
from serving.contract.tensors import OBSERVE, ContextColumn, make_live_specs
from serving.live.admission import ChangeAdmission, EventAdmission
from serving.live.layout import Layout
from serving.live.writer import Writer
from tests.unit.live.batches import KINDS, START_MS

TOPIC = "events"
CONTEXT = (ContextColumn("device", "string"), ContextColumn("floor", "integer"), ContextColumn("price", "continuous"))


class MessageDouble:
    """A message as a consumer gives it."""

    def __init__(self, value: bytes | None, offset: int, partition: int = 0) -> None:
        self._value, self._offset, self._partition = value, offset, partition

    def value(self) -> bytes | None:
        return self._value

    def offset(self) -> int:
        return self._offset

    def partition(self) -> int:
        return self._partition

    def timestamp(self) -> tuple[int, int]:
        return 1, START_MS


def make_message(value: bytes | None, offset: int, partition: int = 0) -> Message:
    return cast(Message, MessageDouble(value, offset, partition))


def consumer_of(writer: Writer, brokers: str = "") -> EventConsumer:
    context = tuple(column.tensor for column in CONTEXT)
    changes = ChangeAdmission({"item": {"price": "number", "title": "text"}, "user": {"age": "number"}}, {})
    decoder = MessageDecoder(EventAdmission(KINDS, CONTEXT), changes, make_live_specs(context)[OBSERVE].inputs, writer.codes)
    return EventConsumer(writer, decoder, brokers, TOPIC)


def consume_until_killed(folder: Path, brokers: str) -> None:
    with closing(Writer(folder, Layout(), KINDS.names)) as writer:
        consumer_of(writer, brokers).run(threading.Event())
