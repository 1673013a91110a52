"""The client's cache in front of the real server, with a real Redis: every answer is the server's own."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from clients.warming import cluster_vectors, order_by_turns, pick_by_cluster, read_active_users, warm, warm_cache
from export.relayout import relayout
from server.generations import activate
from serving.stages.rules.config import RulesConfig
from tests.server.test_publication import answers_of, with_rules
from tests.unit.tables.redis_server import RedisServer
from triton_recommender import MemoryCache, Recommender, RedisCache
from triton_recommender.cache.transport import CachedTransport
from triton_recommender.models import Call
from triton_recommender.tensors import RECOMMEND
from triton_recommender.transports.grpc import GrpcTransport

TIMEOUT_S = 20.0
N_REQUESTS = 200


def memory_cache() -> MemoryCache:
    """Return a cache that asks for the generation with every request, so that a switch is seen at once."""
    return MemoryCache(ttl_s=3_600, generation_age_s=0.0)


def redis_cache(redis_server: RedisServer, namespace: str) -> RedisCache:
    """Return such a cache that no other test sees."""
    address = f"redis://{redis_server.address}"
    return RedisCache(address, ttl_s=3_600, namespace=namespace, timeout_s=TIMEOUT_S, generation_age_s=0.0)


@pytest.fixture(params=["memory", "redis"])
def cache(request, tmp_path):
    if request.param == "memory":
        return memory_cache()
    return redis_cache(request.getfixturevalue("redis_server"), str(tmp_path))


def ask_each(transport, inputs: dict[str, np.ndarray], rows) -> dict[str, np.ndarray]:
    """One call for each of the rows -> outputs [R, …]"""
    answers = [transport.infer(Call({name: array[row : row + 1] for name, array in inputs.items()}, TIMEOUT_S)) for row in rows]
    return {name: np.concatenate([answer[name] for answer in answers]) for name in answers[0]}


def test_cached_answers_are_the_servers_own_whatever_happens_between(repository, launch, tmp_path, redis_server):
    """By either kind of cache, each asking for the generation with every request."""
    repo = shutil.copytree(repository, tmp_path / "repo")
    recorded = answers_of(repo, 1)
    popular = np.unique(recorded.outputs["item_ids"][:60, :3])
    other = with_rules(repository, tmp_path / "other", RulesConfig(blocked_items=tuple(map(int, popular))))
    server = launch(repo)
    assert relayout(other, repo, "ensemble") == 2
    plain = GrpcTransport(server.grpc_url)
    caches = [memory_cache(), redis_cache(redis_server, str(tmp_path))]
    cached = [CachedTransport(GrpcTransport(server.grpc_url), cache) for cache in caches]
    inputs, rng, own = recorded.inputs, np.random.default_rng(0), {}
    for transport in cached:
        transport.describe(RECOMMEND, TIMEOUT_S)
    for generation in (1, 2, 1):
        activate(server.grpc_url, repo, generation)
        if generation not in own:
            own[generation] = ask_each(plain, inputs, range(N_REQUESTS))
        for cache, transport in zip(caches * 2, cached * 2, strict=True):
            cache.forget(rng.choice(inputs["user_id"][:N_REQUESTS, 0], 20).tolist())
            rows = rng.permutation(N_REQUESTS)
            got = ask_each(transport, inputs, rows)
            for name, array in own[generation].items():
                np.testing.assert_array_equal(got[name], array[rows], err_msg=f"{name}, generation {generation}")
    assert (own[1]["item_ids"] != own[2]["item_ids"]).any(axis=1).sum() > N_REQUESTS // 2
    for cache in caches:
        assert cache.counts.bypassed == cache.counts.failures == 0
        assert cache.counts.hits > 2 * N_REQUESTS
    for transport in (plain, *cached):
        transport.close()


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
