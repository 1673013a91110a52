"""Each store when memory is full, when time passes, and when Redis is gone, slow, emptied or confused."""

from __future__ import annotations

import asyncio
import tracemalloc

import pytest

from tests.unit.clients.cache.conftest import AsyncShop
from triton_recommender import AsyncRecommender, CacheUnavailable, MemoryCache, Recommender, RedisCache
from triton_recommender.cache.base import Entry
from triton_recommender.cache.entries import Key, make_keys
from triton_recommender.cache.generation import KnownGeneration
from triton_recommender.cache.memory import MIB


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_answers_in_memory_end_after_their_time(shop):
    clock = Clock()
    client = Recommender(transport=shop, cache=MemoryCache(ttl_s=60, clock_s=clock))
    client.recommend(7)
    clock.now_s = 59.9
    client.recommend(7)
    assert shop.asked == [7]
    clock.now_s = 60.0
    client.recommend(7)
    assert shop.asked == [7, 7]


def test_memory_is_bounded_and_what_was_used_last_stays():
    value = bytes(240)
    tracemalloc.start()
    cache = MemoryCache(max_bytes=MIB)
    for user in range(5_000):
        key = Key(user, user.to_bytes(16, "little"))
        [token], _ = cache.read([key], 1)
        cache.write([Entry(key, token, 1, bytes(bytearray(value)))])
        cache.read([Key(0, bytes(16))], 1)
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.5 * MIB < used < MIB
    newest, oldest = Key(4_999, (4_999).to_bytes(16, "little")), Key(1, (1).to_bytes(16, "little"))
    _, values = cache.read([Key(0, bytes(16)), newest, oldest], 1)
    assert [found is not None for found in values] == [True, True, False]


def test_news_of_the_generation_counts_for_a_while_and_older_news_never_replaces_newer():
    clock = Clock()
    known_generation = KnownGeneration(1.0, clock)
    assert known_generation.generation is None
    known_generation.record(1, asked_s=0.0)
    known_generation.record(2, asked_s=0.5)
    known_generation.record(1, asked_s=0.4)  # an answer that took long
    clock.now_s = 1.4
    assert known_generation.generation == 2
    clock.now_s = 1.5
    assert known_generation.generation is None


@pytest.fixture
def clock() -> Clock:
    """Return the clock of the breaker's pauses, which end when a test says so."""
    return Clock()


@pytest.fixture
def cache(empty_redis, clock) -> RedisCache:
    return RedisCache(f"redis://{empty_redis.address}", timeout_s=0.2, clock_s=clock)


@pytest.fixture
def client(shop, cache) -> Recommender:
    return Recommender(transport=shop, cache=cache)


def test_everything_in_redis_ends_by_itself(client, empty_redis):
    client.recommend(7)
    keys = empty_redis.client.keys()
    assert sorted(key.split(b":")[1] for key in keys) == [b"{7}", b"{7}"]
    left_ms = sorted(empty_redis.client.pttl(key) for key in keys)
    assert 299_000 < left_ms[0] <= 300_000
    assert 599_000 < left_ms[1] <= 600_000


def test_without_redis_requests_go_on_and_it_is_found_again(client, cache, shop, empty_redis, clock):
    client.recommend(7)
    empty_redis.stop()
    assert client.recommend(7).item_ids[0] == 710
    assert shop.asked == [7, 7]
    assert (cache.counts.failures, cache.counts.bypassed) == (1, 1)
    with pytest.raises(
        CacheUnavailable, match=r"1 user was not forgotten: Redis at 127\.0\.0\.1.*refused.*again when it is back"
    ):
        cache.forget([7])
    empty_redis.start()
    clock.now_s += 1.0  # its pause is over
    client.recommend(7)
    client.recommend(7)
    assert shop.asked == [7, 7, 7]
    assert cache.counts.hits == 1


def test_a_redis_that_hangs_is_waited_for_once(client, cache, shop, empty_redis):
    client.recommend(7)
    empty_redis.freeze()
    for _ in range(5):
        assert client.recommend(7).item_ids[0] == 710
    empty_redis.thaw()
    assert cache.counts.failures == 1
    assert cache.counts.bypassed == 5


def test_a_redis_that_lost_a_token_does_not_bring_old_answers_back(client, shop, empty_redis):
    """Evicted, expired or flushed: whatever is left of the user's answers no longer counts."""
    client.recommend(7)
    assert empty_redis.client.delete("recommend:{7}:token") == 1
    shop.version = 1
    assert client.recommend(7).item_ids[0] == 711


@pytest.mark.parametrize("value", [b"", b"nonsense", "somebody else's"], ids=["empty", "short", "foreign"])
def test_a_value_that_is_no_answer_to_the_question_is_none(client, shop, empty_redis, value):
    client.recommend_many([7, 8])
    seven, eight = (
        f"recommend:{{{key.user_id}}}:1:{key.question.hex()}"
        for key in make_keys(shop.calls[0].inputs, shop.models["recommend"])
    )
    other = empty_redis.client.get(eight)
    token = empty_redis.client.get("recommend:{7}:token")
    assert other is not None
    empty_redis.client.set(seven, token + other[16:] if value == "somebody else's" else value)
    assert client.recommend(7).item_ids[0] == 710
    assert shop.asked == [7, 8, 7]


def test_one_cache_serves_the_event_loops_of_several_jobs(shop, cache):
    """As of a worker that runs each job by `asyncio.run`, and closes nothing between them."""

    async def ask() -> tuple[int, ...]:
        return (await AsyncRecommender(transport=AsyncShop(shop), cache=cache).recommend(7)).item_ids

    assert asyncio.run(ask()) == asyncio.run(ask())
    assert shop.asked == [7]


def test_shops_that_share_a_redis_keep_apart(shop, empty_redis):
    one, other = (RedisCache(f"redis://{empty_redis.address}", namespace=name) for name in ("one", "other"))
    Recommender(transport=shop, cache=one).recommend(7)
    Recommender(transport=shop, cache=other).recommend(7)
    assert shop.asked == [7, 7]
    other.forget([7])
    Recommender(transport=shop, cache=one).recommend(7)
    assert shop.asked == [7, 7]


def test_importing_the_client_does_not_import_redis():
    import subprocess
    import sys

    code = "import sys, clients; print([name for name in ('redis', 'faiss', 'confluent_kafka', 'grpc') if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
