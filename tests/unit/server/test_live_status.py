"""`server status` says of Redis and Kafka, where the live settings name them, whether they are reachable and how far behind."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from server.helpers import generation_helpers
from server.helpers.live_status import read_values
from server.start.ports import find_free_ports
from server.state import ServerState
from serving.contract.artifacts import find_stage_folder
from serving.contract.tensors import OBSERVE
from tests.pages import serve_page
from tests.repositories import copy_lean_repository
from tests.tags import run_tagged
from tests.unit.server.conftest import call

KAFKA, REDIS = "Kafka at broker:9092, topic shop", "Redis at one:6379,two:6379"
WELL = {"kafka_broker_down": 0, "kafka_topic_missing": 0, "kafka_lag": 0, "kafka_silent_seconds": 1.5}
WELL |= {"redis_down": 0, "redis_lag": 0, "redis_deferred": 0, "redis_silent_seconds": 1.5}


def name_in_settings(repo: Path) -> None:
    """Let the live settings of generation 1 name Redis and Kafka."""
    path = find_stage_folder(repo, OBSERVE, 1) / "stage.json"
    facts = json.loads(path.read_text())
    facts["settings"] |= {"brokers": "broker:9092", "topic": "shop"}
    path.write_text(json.dumps(facts | {"live_redis": "one:6379,two:6379"}))


Told = Callable[[dict[str, float]], list[str]]


@pytest.fixture
def told(sleeping, run_dir) -> Iterator[Told]:
    """told(values) -> what `server status` says of Redis and Kafka while the server's metrics page has these values."""
    repo, values, tag = copy_lean_repository(run_dir / "repo"), dict[str, float](), sleeping.tag
    name_in_settings(repo)

    def render() -> bytes:
        labels = '{instance="observe_0_0",version="1"}'
        lines = [f"recommender_live_{name}{labels} {value}" for name, value in values.items()]
        lines += ['recommender_live_kafka_lag{instance="observe_0_0",version="7"} 99', ""]  # of another generation
        return "\n".join(lines).encode()

    def tell(now: dict[str, float]) -> list[str]:
        values.clear()
        values.update(now)
        lines = call("status").output.splitlines()
        return [line.strip() for line in lines if " Kafka at " in line or " Redis at " in line]

    with serve_page(render) as url:
        ports = replace(sleeping.ports, metrics=int(url.rpartition(":")[2]))
        state = replace(sleeping, repo=repo, ports=ports, generation=1)
        state.save(run_dir)
        helpers = generation_helpers.list_helpers(state)  # each command ends with the tag, which run_tagged adds
        supervisor = ["-m", "server.supervisor", str(run_dir), "python"]
        with (
            run_tagged(tag, *supervisor, *helpers["consume"].command[:-1]),
            run_tagged(tag, *supervisor, *helpers["share"].command[:-1]),
        ):
            yield tell


def test_each_is_reachable_and_so_many_behind(told):
    assert told(WELL) == [f"{KAFKA}: reachable, 0 messages behind", f"{REDIS}: reachable, 0 events behind"]
    behind = told(WELL | {"kafka_lag": 1200, "redis_lag": 7})
    assert behind == [f"{KAFKA}: reachable, 1,200 messages behind", f"{REDIS}: reachable, 7 events behind"]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"kafka_broker_down": 1, "kafka_lag": 3}, f"{KAFKA}: not reachable, so messages wait; 3 were waiting when it last"),
        ({"kafka_topic_missing": 1}, f"{KAFKA}: reachable, but it does not have the topic. Create it"),
        ({"kafka_silent_seconds": 300}, f"{KAFKA}: its consumer has given no sign of life for 300 s, so messages wait"),
        ({"redis_down": 1, "redis_lag": 40}, f"{REDIS}: not reachable, or it takes no events; at least 40 events wait."),
        ({"redis_down": 1}, f"{REDIS}: not reachable, or it takes no events; new events wait."),
        ({"redis_silent_seconds": 300}, f"{REDIS}: `python -m live share` has given no sign of life for 300 s, so events wait"),
        ({"redis_deferred": 2}, f"{REDIS}: reachable, 0 events behind; 2 keys cannot be read, so their events wait"),
    ],
)
def test_a_fault_is_a_warning_that_names_the_log(told, values, said, tmp_path):
    (warning,) = [line for line in told(WELL | values) if line.startswith("WARNING: ")]
    assert warning.startswith(f"WARNING: {said}")
    helper = "consume" if said.startswith("Kafka") else "share"
    assert f". See {tmp_path}/logs/live-{helper}-" in warning


def test_what_is_not_known_is_said_to_be_unknown(told):
    assert [line.partition(": not known, because ")[2][:20] for line in told({})] == ["the metrics page of "] * 2
    others = {"visible_seconds_sum": 0.1, "free_item_rows": 5}  # of other models than `observe`
    assert [line.partition(": not known, because ")[2][:20] for line in told(others)] == ["the metrics page of "] * 2
    without = {name: value for name, value in WELL.items() if not name.endswith("silent_seconds")}
    kafka, redis = told(without)
    assert "not known, because its consumer has not stated anything yet" in kafka
    assert "not known, because `python -m live share` has not stated anything yet" in redis


def test_a_page_that_is_not_http_says_nothing(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1_000)
                connection.sendall(b"-ERR unknown command\r\n\r\n")  # of a Redis that has the port by now

        threading.Thread(target=answer, daemon=True).start()
        ports = replace(find_free_ports(), metrics=listener.getsockname()[1])
        assert read_values(ServerState(1, "tag", tmp_path, tmp_path / "log", ports, generation=1)) == {}


def test_a_helper_that_does_not_run_is_told_where_the_settings_ask_for_it(sleeping, run_dir):
    repo = copy_lean_repository(run_dir / "repo")
    replace(sleeping, repo=repo, generation=1).save(run_dir)
    said = call("status").output
    assert "Kafka" not in said
    assert "Redis" not in said
    name_in_settings(repo)
    said = call("status").output
    assert f"WARNING: {KAFKA}: not known, because `python -m live consume` does not run. See " in said
    assert f"WARNING: {REDIS}: not known, because `python -m live share` does not run. See " in said
