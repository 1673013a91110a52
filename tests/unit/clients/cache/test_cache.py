"""Questions that the cache answers, those that go to the server, and answers that are never kept: both caches, both clients."""

from __future__ import annotations

import asyncio
import dataclasses

import prometheus_client
import pytest

from triton_recommender import (
    InvalidRequest,
    MemoryCache,
    Overloaded,
    Query,
    Recommendations,
    Recommender,
    RedisCache,
    Unavailable,
)
from triton_recommender.tensors import Degraded


def test_a_question_is_asked_once(recommend, shop, cache):
    first = recommend([7])
    assert recommend([7]) == first
    assert shop.asked == [7]
    assert (cache.counts.hits, cache.counts.misses, cache.counts.stored) == (1, 1, 1)


def test_k_is_applied_to_what_was_kept(recommend, shop):
    assert recommend([7], k=1)[0].item_ids == (710,)
    assert recommend([7], k=2)[0].item_ids == (710, 720)
    assert recommend([7])[0].item_ids == (710, 720, 730)
    assert shop.asked == [7]


@pytest.mark.parametrize(
    "other",
    [
        Query(8),
        Query(None),
        Query(7, history=[]),
        Query(7, history=[1]),
        Query(7, exclude=[720]),
        Query(7, context={"store": 3}),
        Query(7, context={"device": "phone"}),
        Query(7, context={"basket": 9.5}),
        Query(7, category="bags"),
        Query(7, among=[720]),
    ],
    ids=str,
)
def test_whatever_changes_the_answer_is_another_question(recommend, shop, other):
    recommend([7])
    recommend([other])
    recommend([other])
    assert len(shop.asked) == 2


def test_only_users_that_are_not_cached_are_asked(recommend, shop, cache):
    recommend([1, 3])
    answers = recommend([1, 2, 3, 2, 4])
    assert [answer.item_ids[1] for answer in answers] == [120, 220, 320, 220, 420]
    assert shop.asked == [1, 3, 2, 4]
    assert (cache.counts.hits, cache.counts.misses, cache.counts.joined) == (2, 4, 1)


def test_a_forgotten_user_is_asked_again_and_others_are_not(recommend, shop, cache):
    recommend([7, 8])
    shop.version = 1
    cache.forget([7])
    assert [answer.item_ids[0] for answer in recommend([7, 8])] == [711, 810]
    assert shop.asked == [7, 8, 7]
    assert cache.counts.forgotten == 1


def test_many_users_are_forgotten_by_a_task_as_well(recommend, shop, cache):
    async def forget():
        await cache.forget_async(range(1, 40))
        if isinstance(cache, RedisCache):
            await cache.close_async()

    recommend([1, 2, 50])
    asyncio.run(forget())
    recommend([1, 2, 50])
    assert shop.asked == [1, 2, 50, 1, 2]
    assert cache.counts.forgotten == 39


def test_another_generation_is_another_answer_and_going_back_finds_the_old_ones(recommend, shop):
    before = recommend([7])
    shop.served_generation, shop.version = 2, 5
    after = recommend([7])
    assert (after[0].generation, after[0].item_ids[0]) == (2, 715)
    assert recommend([7]) == after
    shop.served_generation = 1
    assert recommend([7]) == before
    assert shop.asked == [7, 7]


def test_an_answer_of_another_generation_than_was_believed_is_kept_as_its_own(recommend, shop):
    """The server moved between the probe and the answer."""
    shop.read_generation = lambda timeout_s: 1
    shop.served_generation = 2
    assert recommend([7])[0].generation == 2
    assert recommend([7])[0].generation == 2
    assert shop.asked == [7, 7]
    shop.read_generation = lambda timeout_s: 2
    assert recommend([7])[0].generation == 2
    assert shop.asked == [7, 7]


def test_the_answers_of_one_call_are_of_one_generation(recommend, shop):
    """The server moved to a generation with shorter lists, and the cache has not heard of it."""
    recommend([7])
    shop.read_generation = lambda timeout_s: 1
    shop.served_generation = 2
    shop.handler = lambda query: Recommendations((1,), (1.0,), generation=2)
    shop.items_returned = 1
    assert [answer.generation for answer in recommend([7, 8])] == [2, 2]


def test_a_server_that_is_between_two_generations_is_asked_itself(recommend, shop, cache):
    recommend([7])
    shop.read_generation = lambda timeout_s: None
    recommend([7])
    assert shop.asked == [7, 7]
    assert cache.counts.bypassed == 1


def test_a_server_that_says_nothing_gives_its_own_error(recommend, shop):
    recommend([7])

    def silent(timeout_s):
        raise Unavailable("nobody there")

    shop.read_generation, shop.error = silent, Unavailable("nobody there, really")
    with pytest.raises(Unavailable, match="really"):
        recommend([7])


def test_fallbacks_are_not_kept(recommend, shop, cache):
    shop.degraded = Degraded.RANK
    assert recommend([7])[0].degraded == Degraded.RANK
    shop.degraded = Degraded.NONE
    assert not recommend([7])[0].degraded
    assert shop.asked == [7, 7]
    assert (cache.counts.degraded, cache.counts.stored) == (1, 1)


def test_errors_are_not_kept(recommend, shop, cache):
    shop.error = Overloaded("try later")
    with pytest.raises(Overloaded, match="try later"):
        recommend([7])
    shop.error = None
    assert recommend([7])[0].item_ids[0] == 710
    assert cache.counts.stored == 1


def test_a_model_of_other_sizes_is_not_answered_with_old_lists(cache, shop):
    Recommender(transport=shop, cache=cache).recommend(7)
    smaller = type(shop)(items_returned=2)
    answers = [Recommender(transport=smaller, cache=cache).recommend_many([7, 8]) for _ in range(2)]
    assert [len(answer) for answer in answers[1]] == [2, 2]
    assert smaller.asked == [7, 8]


def test_two_clients_of_one_cache(cache, shop):
    Recommender(transport=shop, cache=cache).recommend(7)
    Recommender(transport=shop, cache=cache).recommend(7)
    assert shop.asked == [7]


def test_the_counts_are_published_for_prometheus(recommend, cache):
    recommend([7, 8])
    recommend([7])
    registry = prometheus_client.CollectorRegistry()
    registry.register(cache)
    assert registry.get_sample_value("recommendation_cache_hits_total") == 1
    assert registry.get_sample_value("recommendation_cache_misses_total") == 2
    names = {metric.name for metric in registry.collect()}
    public = {field.name for field in dataclasses.fields(cache.counts) if not field.name.startswith("_")}
    assert names == {f"recommendation_cache_{name}" for name in public}
    assert cache.counts.hit_rate == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MemoryCache(ttl_s=0), "ttl_s is 0; expected seconds above 0"),
        (lambda: MemoryCache(generation_age_s=-1), "generation_age_s is -1; expected seconds from 0"),
        (lambda: MemoryCache(max_bytes=1000), "max_bytes is 1000; expected 1,048,576"),
        (lambda: RedisCache("localhost:6379"), "cache is 'localhost:6379'.*Expected redis://host:port"),
        (lambda: RedisCache("http://me:secret@redis:6379"), "cache is 'http://redis:6379'"),
    ],
)
def test_wrong_settings_are_refused(make, message):
    with pytest.raises(InvalidRequest, match=message):
        make()
