"""forget and follow from the command line, against a real Redis."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from server.ports import find_free_ports
from tests.waiting import until
from triton_recommender import Recommender, RedisCache
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
    assert f"error: Nobody is known as 8 in {repo}" in result.stderr  # ids are text there, and no user is named 8
    result = run("forget", "ann", "--repo", repo, *options)
    assert (result.exit_code, result.stdout) == (0, "forgotten: ann\n")
    client.recommend_many([7, 8, 9])
    assert shop.asked == [7, 8, 9, 7]


def test_forget_without_redis_ends_with_1(tmp_path):
    result = run("forget", "7", "--cache", f"redis://127.0.0.1:{find_free_ports().grpc}", "--repo", tmp_path)
    assert result.exit_code == 1
    assert "1 users were not forgotten" in result.stderr


@pytest.mark.parametrize(
    "sources",
    [
        [],
        ["--topic", "events"],
        ["--brokers", "b:1", "--data", "."],
        ["--brokers", "b:1", "--topic", "events", "--data", "."],
    ],
)
def test_follow_requires_exactly_one_source(options, sources):
    result = run("follow", *sources, *options)
    assert result.exit_code == 2
    assert "expected --brokers and --topic, or --data" in result.stderr


def test_follow_the_log_of_a_data_set_until_interrupted(options, client, shop, tmp_path):
    (tmp_path / "dataset.toml").write_text(
        'name = "s"\n[interactions]\npath = "log.csv"\nuser_id = "who"\nitem_id = "what"\ntimestamp = "when"\n'
    )
    (tmp_path / "log.csv").write_text("who,what,when\n")
    command = [sys.executable, "-m", "clients", "follow", "--data", str(tmp_path), "--repo", str(tmp_path), *options]
    with subprocess.Popen(command, cwd=PROJECT, stdout=subprocess.PIPE, text=True) as follower:
        client.recommend_many([7, 8])
        with (tmp_path / "log.csv").open("a") as log:
            log.write("7,3,2020-01-01\n,3,2020-01-01\n")
        until(lambda: client.recommend(8) and client.recommend(7) and shop.asked == [7, 8, 7])
        follower.send_signal(signal.SIGTERM)
        assert follower.communicate(timeout=20)[0] == "2 events, 1 users forgotten, 1 events named nobody\n"
    assert follower.returncode == 0
