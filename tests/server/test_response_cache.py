"""Triton's own response cache: whose answers it keeps, across generations, and what it cannot know."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import tritonclient.grpc as grpcclient

from repository.triton.models import read_config, write_config
from server.generations.activation import activate
from server.status.health import open_local_client
from tests.server.support import toys
from tests.waiting import until

MIB = 1 << 20
COUNTS_ITS_CALLS = toys.MODEL.replace(
    "    def execute",
    "    calls = 0\n\n    def count(self):\n        self.calls += 1\n        return self.calls\n\n    def execute",
).replace("a * 1000 + self.version", "a * 0 + self.count()")


def cached(repo: Path, *models: str) -> Path:
    for model in models:
        path = repo / model / "config.pbtxt"
        config = read_config(path)
        config.response_cache.enable = True
        write_config(path, config)
    return repo


def lookups(client: grpcclient.InferenceServerClient, model: str, generation: int = 1) -> tuple[int, int]:
    """Return (hits, misses)"""
    [stats] = client.get_inference_statistics(model, str(generation)).model_stats
    return stats.inference_stats.cache_hit.count, stats.inference_stats.cache_miss.count


def count_hits(client: grpcclient.InferenceServerClient, generation: int) -> int:
    return lookups(client, "recommend", generation)[0]


def expect(client: grpcclient.InferenceServerClient, counts: dict[str, tuple[int, int]]) -> None:
    """model -> (hits, misses): the server counts a moment after it has answered"""
    until(lambda: {model: lookups(client, model) for model in counts} == counts)


def test_a_hit_of_the_ensemble_asks_no_step_and_says_again_what_was_said_once(tmp_path, launch):
    """The cache knows no time and does not look into answers: one of a fallback, or of yesterday's rows, is kept like any."""
    repo = toys.publish(tmp_path / "repo", 1, COUNTS_ITS_CALLS)
    server = launch(cached(repo, "recommend", "second"), cache_bytes=8 * MIB)
    with open_local_client(server.grpc_url) as client:
        assert [toys.ask(client, x) for x in (5, 5, 6, 5)] == [1, 1, 2, 1]
        expect(client, {"recommend": (2, 2), "first": (0, 0), "second": (0, 2)})


def test_a_step_alone_can_be_cached(repo, launch):
    server = launch(cached(repo, "first"), cache_bytes=8 * MIB)
    with open_local_client(server.grpc_url) as client:
        assert [toys.ask(client, x) for x in (5, 5)] == [toys.expected(5, generation=1)] * 2
        expect(client, {"recommend": (0, 0), "first": (1, 1)})


def test_a_server_without_a_cache_serves_models_that_ask_for_one(repo, launch):
    server = launch(cached(repo, "recommend"))
    with open_local_client(server.grpc_url) as client:
        assert toys.ask(client, 5) == toys.ask(client, 5) == toys.expected(5, generation=1)
        expect(client, {"recommend": (0, 0)})


def test_a_generation_never_answers_with_what_another_one_said(repo, launch):
    toys.publish(repo, 2)
    server = launch(cached(repo, "recommend"), cache_bytes=8 * MIB)
    with open_local_client(server.grpc_url) as client:
        for generation in (1, 2, 1):
            activate(server.grpc_url, repo, generation)
            assert [toys.ask(client, 5) for _ in range(2)] == [toys.expected(5, generation)] * 2
            until(partial(count_hits, client, generation))  # something was a hit
