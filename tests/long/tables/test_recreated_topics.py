"""Topics that are deleted and created again while the updater follows them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.fault_backends import Broker
from serving.tables.config import UpdateConfig
from serving.tables.updates import updater as updater_module
from serving.tables.updates.publisher import Publisher
from tests.unit.tables.updating import WIDTH, updating, versions
from tests.waiting import until

OFTEN, SELDOM = np.array([7]), np.array([8])  # keys of two Kafka partitions


@pytest.fixture
def broker():
    with Broker() as started:
        yield started


def publish_one_by_one(broker: Broker, keys: np.ndarray, numbers: range) -> None:
    """Publish each version in a message of its own."""
    publisher = Publisher(broker.address, "rank", {"items": WIDTH})
    for version in numbers:
        publisher.publish("items", keys, versions(keys, version))
        publisher.flush()


def test_all_partitions_of_a_shorter_topic_are_read_from_the_beginning(broker, config, instances, monkeypatch, caplog):
    """Also a partition that is as long as before. It is noticed without a restart and without further messages."""
    monkeypatch.setattr(updater_module, "TOPICS_EVERY_S", 0.2)
    tiers = instances()

    def shows(keys: np.ndarray, version: int) -> bool:
        return bool((tiers.lookup("items", keys).values == versions(keys, version)).all())

    with updating(replace(config, updates=UpdateConfig(broker.address))):
        publish_one_by_one(broker, OFTEN, range(1, 6))
        publish_one_by_one(broker, SELDOM, range(1, 2))
        until(lambda: shows(OFTEN, 5) and shows(SELDOM, 1))
        broker.kill()
        broker.start()  # it keeps nothing
        publish_one_by_one(broker, OFTEN, range(20, 22))
        publish_one_by_one(broker, SELDOM, range(20, 21))
        until(lambda: shows(OFTEN, 21) and shows(SELDOM, 20))
    assert "created again" in caplog.text
    np.testing.assert_array_equal(tiers.lookup("items", OFTEN).values, versions(OFTEN, 21))
