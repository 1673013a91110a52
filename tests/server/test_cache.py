"""The client's cache in front of the real server, with a real Redis, warmed (its answers: tests/server/test_publication.py)."""

from __future__ import annotations

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from clients.warming import cluster_vectors, order_by_turns, pick_by_cluster, read_active_users, warm, warm_cache
from tests.server.caches import TIMEOUT_S, memory_cache, redis_cache
from triton_recommender import Recommender


@pytest.fixture(params=["memory", "redis"])
def cache(request, tmp_path):
    if request.param == "memory":
        return memory_cache()
    return redis_cache(request.getfixturevalue("redis_server"), str(tmp_path))


def test_popular_users_of_every_cluster_come_first(repository):
    user_ids, activity, vectors = read_active_users(repository)
    clusters = cluster_vectors(vectors, 8)
    chosen = pick_by_cluster(repository, 8, 8)
    places = {user: place for place, user in enumerate(user_ids.tolist())}
    found = {int(clusters[places[user]]): int(activity[places[user]]) for user in chosen.tolist()}
    most = {cluster: int(activity[clusters == cluster].max()) for cluster in np.unique(clusters).tolist()}
    assert found == most
    assert len(found) == 8
    everybody = pick_by_cluster(repository, 10**6, 8)
    assert sorted(everybody.tolist()) == sorted(user_ids.tolist())


def test_turns_go_round_the_clusters():
    clusters, activity = np.array([0, 0, 1, 2, 2, 2]), np.array([5, 9, 1, 7, 8, 2])
    assert order_by_turns(clusters, activity).tolist() == [1, 4, 2, 3, 0, 5]


def test_warm_users_are_hits(server, repository, cache):
    users = pick_by_cluster(repository, 100, 10)
    done: list[int] = []
    with Recommender(server.grpc_url, cache=cache, timeouts=TIMEOUT_S) as shop:
        answers = list(warm(shop, users.tolist(), {"store": 1}, done.append))
        asked = cache.counts.misses
        again = [shop.recommend(user, context={"store": 1}) for user in users.tolist()]
    assert done[-1] == len(answers) == asked == 100
    assert cache.counts.misses == asked
    assert again == answers


def test_warm_from_the_command_line(server, repository, redis_server, tmp_path):
    options = ["--cache", f"redis://{redis_server.address}", "--namespace", tmp_path.name, "--url", server.grpc_url]
    command = ["--users", "50", "--clusters", "5", "--context", "store=1", "--repo", str(repository), *options]
    app = typer.Typer()
    app.command()(warm_cache)
    first, again = (CliRunner().invoke(app, command) for _ in range(2))
    assert first.stdout == "50 users: 50 asked and kept, 0 were warm, 0 got fallbacks\n"
    assert again.stdout == "50 users: 0 asked and kept, 50 were warm, 0 got fallbacks\n"
