"""Rows learned from new events, for a merlin repository: what the cpu profile publishes, under HPS's topic and keys."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from confluent_kafka import Consumer
from rich.console import Console

from export.build import build_repository
from export.nvidia.publish import publish_merlin
from export.settings import Settings
from export.stream import StreamSettings, stream_updates
from hps_config.reader import read_ps_json
from serving.contract.artifacts import read_stage
from serving.contract.errors import ConfigError
from serving.tables.config import read_config
from tests.unit.hps.oracle import read_message
from tests.unit.nvidia.merlin.conftest import source_of
from tests.unit.tables.kafka_broker import MockBroker
from training.dataset import load_dataset, split_by_time

STEPS = StreamSettings()


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """Both flavours and the cpu profile of one training, each with a broker of its own: what a run said, what it sent."""
    folder = tmp_path_factory.mktemp("stream")
    dataset = load_dataset("synthetic:users=120,items=80,events=3000,seed=5")
    train, later = split_by_time(dataset.interactions)
    brokers = {name: MockBroker() for name in ("cpu", "24.03")}
    tables = {"state": str(folder / "state"), "brokers": brokers["cpu"].address}
    settings = Settings.model_validate({"tables": tables, "pipeline": {"candidates": 64, "recorded_requests": 64}})
    build_repository(replace(dataset, interactions=train), folder / "cpu", settings, Console(quiet=True))
    for triton in ("24.03", "modern"):
        publish_merlin(source_of(folder / "cpu"), folder / triton, settings.model_copy(update={"merlin": merlin(triton)}))
    point_to(folder / "24.03" / "ps.json", brokers["cpu"], brokers["24.03"])
    runs = {}
    for name in ("cpu", "24.03", "modern"):
        result = stream_updates(folder / name, later, 0, STEPS, lambda _: None)
        # the modern one's rows go where the cpu profile's go: the tables are the same
        sent = {} if name == "modern" else messages(brokers[name], sum(result.rows.values()))
        runs[name] = SimpleNamespace(result=result, sent=sent)
    yield SimpleNamespace(folder=folder, runs=runs)
    for broker in brokers.values():
        broker.stop()


def merlin(triton):
    return Settings.model_validate({"merlin": {"triton": triton}}).merlin


def point_to(ps, old, new):
    ps.write_text(ps.read_text().replace(old.address, new.address))


def messages(broker: MockBroker, n_rows: int) -> dict[str, dict[int, tuple[float, ...]]]:
    """-> topic -> key -> the last row sent, read off the wire by a reader that shares nothing with the writer."""
    consumer = Consumer(
        {"bootstrap.servers": broker.address, "group.id": "test", "auto.offset.reset": "earliest", "log_level": 0}
    )
    consumer.subscribe(["^hps_et.*"])
    found: dict[str, dict[int, tuple[float, ...]]] = {}
    read = 0
    while read < n_rows:
        message = consumer.poll(30)
        assert message is not None, f"{read} of {n_rows} rows came"
        assert message.error() is None
        assert message.key() is None
        rows = read_message(message.value())
        assert message.value()[:4] == b"HCTR"
        found.setdefault(message.topic(), {}).update(rows)
        read += len(rows)
    consumer.close()
    return found


def test_hps_gets_the_cpu_profiles_rows_under_its_own_keys(streamed):
    first_keys = read_stage(streamed.folder / "24.03" / "rank_features" / "1").settings["first_keys"]
    (name,) = read_ps_json(streamed.folder / "24.03" / "ps.json").model("rank_embeddings").embedding_table_names
    firsts = {topic: first_keys[topic.rsplit(".", 1)[1]] for topic in streamed.runs["cpu"].sent}
    expected = {key + firsts[topic]: row for topic, rows in streamed.runs["cpu"].sent.items() for key, row in rows.items()}
    ((topic, sent),) = streamed.runs["24.03"].sent.items()
    assert topic == f"hps_et.rank_embeddings.{name}"
    assert sent.keys() == expected.keys()
    assert {len(row) for row in sent.values()} == {len(row) for row in expected.values()}
    np.testing.assert_allclose([sent[key] for key in expected], list(expected.values()), atol=1e-5)


@pytest.mark.parametrize("triton", ["24.03", "modern"])
def test_it_learns_what_the_cpu_profile_learns(streamed, triton):
    result, expected = streamed.runs[triton].result, streamed.runs["cpu"].result
    assert (result.events, result.requests, result.rows) == (expected.events, expected.requests, expected.rows)
    np.testing.assert_allclose(result.loss, expected.loss, atol=1e-4)


def test_the_next_run_begins_where_rows_can_be_read(streamed):
    """Our own tiers hold what was learned; HPS keeps it to itself, and the next run learns all of it again."""
    runs = streamed.runs
    assert runs["modern"].result.last_event_s == runs["cpu"].result.last_event_s
    assert runs["24.03"].result.last_event_s == 0


def test_our_own_tiers_read_the_topics_that_are_written(streamed):
    config = read_config(streamed.folder / "modern" / "rank_rows" / "1" / "tables" / "tiers.json")
    assert {topic.rsplit(".", 1)[0] for topic in streamed.runs["cpu"].sent} == {f"hps_et.{config.model}"}


def test_without_brokers(exported):
    for repository in exported.values():
        with pytest.raises(ConfigError, match="no update source"):
            stream_updates(repository, load_dataset("synthetic:users=20,items=20,events=100").interactions, 0, STEPS, print)
