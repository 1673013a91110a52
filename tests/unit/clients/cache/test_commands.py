"""forget, follow and warm from the command line, against a real Redis."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.start.ports import find_free_ports
from tests.unit.clients.conftest import write_store
from tests.unit.clients.grpc_double import GrpcDouble
from tests.waiting import until
from triton_recommender import Query, Recommendations, Recommender, RedisCache
from triton_recommender.cli import app

PROJECT = Path(__file__).parents[4]


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "120"})


@pytest.fixture
def options(redis_server, tmp_path) -> list[str]:
    """Return the options of a cache that no other test uses."""
    return ["--cache", f"redis://{redis_server.address}", "--namespace", tmp_path.name]


@pytest.fixture
def client(redis_server, tmp_path, shop) -> Recommender:
    cache = RedisCache(f"redis://{redis_server.address}", namespace=tmp_path.name, timeout_s=20.0)
    return Recommender(transport=shop, cache=cache)


def test_forget(options, client, shop, repo):
    client.recommend_many([7, 8, 9])
    result = run("forget", "ann", "8", "--repo", repo, *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert f"error: {repo} has no user 8." in result.stderr  # ids are text there, and no user is named 8
    result = run("forget", "ann", "--repo", repo, *options)
    assert (result.exit_code, result.stdout) == (0, "forgotten: ann\n")
    client.recommend_many([7, 8, 9])
    assert shop.asked == [7, 8, 9, 7]


def test_forget_without_redis_ends_with_1(tmp_path):
    result = run("forget", "7", "--cache", f"redis://127.0.0.1:{find_free_ports().grpc}", "--repo", tmp_path)
    assert result.exit_code == 1
    assert "1 user was not forgotten" in result.stderr


def test_follow_a_topic_until_interrupted(options, client, shop, broker):
    broker.create("events")
    source = ["--brokers", broker.address, "--topic", "events", "--field", "who"]
    command = [sys.executable, "-m", "clients", "follow", *source, *options]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as follower:
        client.recommend_many([7, 8])

        def is_asked_again() -> bool:
            broker.send("events", b'{"who": 7}')  # again, until the follower is there: the mock broker knows no times
            client.recommend_many([7, 8])
            return shop.asked[:3] == [7, 8, 7]

        until(is_asked_again)
        follower.send_signal(signal.SIGTERM)
        assert re.fullmatch(r"\d+ events, \d+ users forgotten, 0 events named no user\n", follower.communicate(timeout=20)[0])
    assert follower.returncode == 0
    assert set(shop.asked[2:]) == {7}


def test_warm_asks_for_the_most_active_users_once(options, repo):
    write_store(repo / "preprocess" / "10", [3, 5, 7, 8, 9], [10, 2, 50, 1, 4])
    server = GrpcDouble(lambda query: Recommendations((30, 10), (4.0, 3.0), generation=2))
    command = ("warm", "--users", 3, "--context", "store=1", "--repo", repo, "--url", f"{server.url},{server.url}", *options)
    try:
        first, again = (run(*command) for _ in range(2))
    finally:
        server.stop()
    assert server.fake.queries == [Query(user, None, [], {"store": 1}) for user in (7, 3, 9)]
    assert first.stdout == "3 users: 3 cached now, 0 before, 0 got fallbacks\n"
    assert again.stdout == "3 users: 0 cached now, 3 before, 0 got fallbacks\n"
