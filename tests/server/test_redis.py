"""Redis as L2 of a real server: a cluster of real nodes, which die, are paused and come back while it serves."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest
import tritonclient.grpc as grpcclient

from experiments.fault_backends import depend_on, keep_paused
from export.settings import TableSettings
from perf.observe import read_samples
from server import supervisor
from server.helpers import generation_helpers
from server.launcher import TritonServer
from server.processes import runs_module
from serving.contract.tensors import OBSERVE, Degraded
from serving.pipeline import Pipeline
from serving.stages.live.measurements import PREFIX, REDIS_SILENT
from serving.tables.formats.redis_layout import name_value_hash
from serving.tables.updates.publisher import Publisher
from tests.monitoring import BACKEND_METRICS, named_metrics
from tests.present import present
from tests.repositories import copy_small_fused_repository
from tests.server.support.requests import infer, infer_tensors
from tests.server.test_tables import settings_of, table_metrics, with_tables
from tests.unit.tables.kafka_broker import MockBroker
from tests.unit.tables.redis_server import RedisCluster
from tests.waiting import until

if shutil.which("redis-server") is None:
    pytest.skip("redis-server is not installed (Debian: apt-get install redis-server)", allow_module_level=True)

USERS = list(range(8))
STRANGER = 10**6  # whom no export knows
LITTLE = "30 KiB"  # of L1, in which a fourth of the rows of items have room: the others are read from below


@pytest.fixture
def cluster(tmp_path) -> Iterator[RedisCluster]:
    cluster = RedisCluster(tmp_path / "redis")
    yield cluster
    cluster.stop()


@pytest.fixture
def over_redis(fused_repository, info, tmp_path, cluster) -> Path:
    """The same models, their rows in the cluster."""
    copy = tmp_path / "over_redis"
    shutil.copytree(fused_repository, copy)
    return with_tables(copy, info.generation, TableSettings.model_validate({"redis": cluster.address, "l1": LITTLE}))


@pytest.fixture(scope="module")
def expected(repository) -> dict[str, np.ndarray]:
    """Return the answers of the same models whose rows are in memory."""
    with closing(Pipeline.load(repository)) as pipeline:
        return pipeline.recommend(USERS)


class Watched:
    """Answers of a server that must be the expected ones, whatever happens below."""

    def __init__(self, client: grpcclient.InferenceServerClient, expected: dict[str, np.ndarray]) -> None:
        self._client, self._expected = client, expected

    def degraded(self) -> bool:
        answer = infer(self._client, user_id=USERS)
        np.testing.assert_array_equal(answer["item_ids"], self._expected["item_ids"])
        np.testing.assert_allclose(answer["scores"], self._expected["scores"], atol=1e-6)
        assert set(np.unique(answer["degraded"])) <= {0, Degraded.RANK}
        return bool(answer["degraded"].any())

    def sound(self) -> bool:
        return not self.degraded()


def from_redis(server: TritonServer) -> float:
    """Rows of items that Redis gave so far."""
    return table_metrics(server).get(("rows_total", "l2", "item_0"), 0.0)


def test_answers_are_the_same_while_nodes_die_are_paused_and_come_back(over_redis, launch, expected, cluster):
    server = launch(over_redis)
    with grpcclient.InferenceServerClient(server.grpc_url) as own:
        watched = Watched(own, expected)
        until(watched.sound)
        until(lambda: cluster.fields() > 0)
        until(lambda: watched.sound() and from_redis(server) > 0)

        cluster.nodes[1].kill()  # a third of the rows
        until(watched.degraded)
        until(lambda: table_metrics(server).get(("level_down", "redis")) == 1)  # told once a second, the first time now
        cluster.nodes[1].launch()
        cluster.wait_ready()
        until(watched.sound)

        cluster.nodes[0].freeze()
        until(watched.degraded)
        cluster.nodes[0].thaw()
        until(watched.sound)

        cluster.kill()
        until(watched.degraded)
        before = from_redis(server)
        cluster.start()
        until(watched.sound)
        until(lambda: watched.sound() and from_redis(server) > before)
        # Requests go on: a level counts as down until a call succeeds, and one that fills the cluster may still fail.
        until(lambda: watched.sound() and table_metrics(server)["level_down", "redis"] == 0)
    assert cluster.fields() > 0  # filled again


def test_a_pipeline_in_process_reads_the_same_cluster(over_redis, expected, cluster):
    pipeline = Pipeline.load(over_redis)

    def right(degraded: int) -> bool:
        answer = pipeline.recommend(USERS)
        np.testing.assert_array_equal(answer["item_ids"], expected["item_ids"])
        np.testing.assert_allclose(answer["scores"], expected["scores"], atol=1e-6)
        return (answer["degraded"] == degraded).all()

    def filled() -> bool:
        return right(0) and pipeline.stages["rank"].tables.read_metrics().tables["item_0"].counts.l2_hits > 0

    until(filled)
    cluster.kill()
    until(lambda: right(Degraded.RANK))
    cluster.start()
    until(lambda: right(0))
    pipeline.close()


def test_updates_reach_the_cluster_and_the_answers(fused_repository, info, tmp_path, cluster, launch):
    broker, copy = MockBroker(), tmp_path / "live"
    shutil.copytree(fused_repository, copy)
    tables = TableSettings.model_validate(
        {"redis": cluster.address, "l1": LITTLE, "brokers": broker.address, "state": str(tmp_path / "state")}
    )
    config = settings_of(with_tables(copy, info.generation, tables, own_rows=True), info.generation)
    items = next(table for table in config.tables if table.name == "item_0")
    publisher = Publisher(broker.address, config.model, {table.name: table.width for table in config.tables})
    rows = np.random.default_rng(0).standard_normal((items.rows, items.width), dtype=np.float32)
    server = launch(copy)
    with grpcclient.InferenceServerClient(server.grpc_url) as own:
        before = infer(own, user_id=USERS)
        publisher.publish("item_0", np.arange(items.rows), rows)
        publisher.flush()
        until(lambda: table_metrics(server).get(("updates_applied_total", "item_0")) == items.rows)
        pipeline = Pipeline.load(copy)
        until(lambda: (infer(own, user_id=USERS)["degraded"] == 0).all())
        after, expected = infer(own, user_id=USERS), pipeline.recommend(USERS)
        pipeline.close()
    assert not np.array_equal(after["scores"], before["scores"])
    np.testing.assert_allclose(after["scores"], expected["scores"], atol=1e-5)

    def held_rows() -> dict[bytes, bytes]:
        held: dict[bytes, bytes] = {}
        for node in cluster.nodes:
            for partition in range(present(config.redis).num_partitions):
                name = name_value_hash(config.model, "item_0", partition)
                if node.client.execute_command("CLUSTER", "COUNTKEYSINSLOT", node.client.cluster("KEYSLOT", name)):
                    held |= node.client.hgetall(name)
        return held

    published = {int(key).to_bytes(8, "little"): row.tobytes() for key, row in enumerate(rows)}
    until(lambda: held_rows() == published, lambda: "Redis never got all rows")  # late, where it answers too slowly
    server.stop()
    broker.stop()


def silent_s(server: TritonServer) -> float:
    """Return how long `live share` has been silent, as the metrics page says; -1 before its first sign of life."""
    values = {name: value for (name, _), value in read_samples(server.metrics_url).items()}
    return values.get(f"{PREFIX}_{REDIS_SILENT}", -1.0)


def find_sharing(server: TritonServer) -> psutil.Process | None:
    """Return the process `live share` of a server, without its supervisor."""
    helpers = generation_helpers.find_helpers(server.state.tag)
    own = (each for each in helpers if "share" in each.cmdline() and not runs_module(each, supervisor.__name__))
    return next(own, None)


@pytest.fixture(scope="module")
def users_in_redis(tmp_path_factory) -> Iterator[tuple[TritonServer, RedisCluster]]:
    """Yield a server that reads its users from a cluster, and the cluster."""
    folder = tmp_path_factory.mktemp("shared")
    repo, nodes = copy_small_fused_repository(folder / "repository"), RedisCluster(folder / "redis")
    depend_on(repo, brokers="", nodes=nodes.address)
    with TritonServer(repo, run_dir=folder / "run") as server:
        yield server, nodes
    nodes.stop()


def test_the_metrics_say_that_sharing_is_silent_and_an_alert_asks_for_them(users_in_redis):
    server, _ = users_in_redis
    until(lambda: 0 <= silent_s(server) < 3)
    with keep_paused(present(find_sharing(server)).pid):
        until(lambda: silent_s(server) > 7)  # while it runs, it gives a sign of life every 5 s
    until(lambda: 0 <= silent_s(server) < 3)
    assert f"{PREFIX}_{REDIS_SILENT}" in named_metrics() & BACKEND_METRICS


def test_without_the_users_of_redis_answers_say_so_and_no_event_is_lost(users_in_redis):
    """The cluster is paused first; then it is killed, and comes back empty."""
    server, nodes = users_in_redis
    with grpcclient.InferenceServerClient(server.grpc_url) as client:

        def ask() -> tuple[list[int], int]:
            answer = infer(client, user_id=[STRANGER])
            return answer["item_ids"][0].tolist(), int(answer["degraded"].item())

        def buy(item: int) -> None:
            infer_tensors(client, OBSERVE, user_id=[[STRANGER]], item_id=[[item]])

        until(lambda: ask()[1] == 0)
        first, second, third = ask()[0][:3]
        buy(first)
        until(lambda: first not in ask()[0])
        for node in nodes.nodes:
            node.freeze()
        until(lambda: ask()[1] == Degraded.LIVE)
        assert first in ask()[0]  # the generation knows nothing of this user
        buy(second)
        for node in nodes.nodes:
            node.thaw()
        until(lambda: ask()[1] == 0 and not {first, second} & set(ask()[0]))
        nodes.kill()
        until(lambda: ask()[1] == Degraded.LIVE)
        buy(third)
        nodes.start()
        until(lambda: ask()[1] == 0 and not {first, second, third} & set(ask()[0]))
