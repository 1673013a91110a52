"""Events, answers and questions that cross each other: no answer from before an event is given after it, and none twice."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Thread

import pytest

from tests.unit.clients.cache.conftest import WAIT_S, AsyncShop
from tests.waiting import until
from triton_recommender import AsyncRecommender, DeadlineExceeded, Overloaded, Query, Recommendations, Recommender, Timeouts


@pytest.fixture
def client(shop, cache) -> Recommender:
    return Recommender(transport=shop, cache=cache, timeouts=WAIT_S)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(16) as pool:
        yield pool


def ask_slowly(pool, client, shop):
    """A question that has reached the server, whose answer waits for shop.gate."""
    shop.gate.clear()
    shop.arrived.clear()
    asked = pool.submit(client.recommend, 7)
    assert shop.arrived.wait(WAIT_S)
    return asked


def test_an_answer_computed_before_an_event_is_not_kept_after_it(pool, client, shop, cache):
    before = ask_slowly(pool, client, shop)
    shop.version = 1
    cache.forget([7])
    shop.gate.set()
    assert before.result().item_ids[0] == 710
    assert client.recommend(7).item_ids[0] == 711
    assert client.recommend(7).item_ids[0] == 711
    assert shop.asked == [7, 7]


def test_a_question_after_an_event_does_not_wait_for_an_answer_from_before_it(pool, client, shop, cache):
    before = ask_slowly(pool, client, shop)
    shop.version = 1
    cache.forget([7])
    after = pool.submit(client.recommend, 7)
    until(lambda: shop.asked == [7, 7])
    shop.gate.set()
    assert (before.result().item_ids[0], after.result().item_ids[0]) == (710, 711)
    assert cache.counts.joined == 0


def test_an_old_answer_that_is_written_last_does_not_count(cache, client, shop):
    from triton_recommender.cache.base import Entry
    from triton_recommender.cache.entries import make_keys

    client.recommend(7)
    [key] = make_keys(shop.calls[0].inputs, shop.models["recommend"])
    [old_token], [old_value] = cache.read([key], 1)
    shop.version = 1
    cache.forget([7])
    client.recommend(7)
    cache.write([Entry(key, old_token, 1, old_value)])
    assert client.recommend(7).item_ids[0] == 711


def test_no_answer_is_older_than_the_last_event_whatever_crosses(client, shop, cache):
    """Threads ask while others make events; whoever asks after an event is through must see it."""
    users, through = range(3), [0, 0, 0]
    world = [0, 0, 0]
    shop.handler = lambda query: Recommendations((world[query.user_id],), (1.0,), generation=1)
    late: list[tuple[int, int]] = []

    def ask() -> None:
        for turn in range(150):
            user = turn % 3
            at_least = through[user]
            seen = client.recommend(user).item_ids[0]
            if seen < at_least:
                late.append((seen, at_least))

    def happen(user: int) -> None:
        for version in range(1, 40):
            world[user] = version
            cache.forget([user])
            through[user] = version
            time.sleep(0.001)

    threads = [Thread(target=ask) for _ in range(4)] + [Thread(target=happen, args=[user]) for user in users]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert late == []
    assert cache.counts.hits > 0
    assert [client.recommend(user).item_ids[0] for user in users] == [39, 39, 39]


def test_many_threads_with_one_question_ask_once(pool, client, shop, cache):
    first = ask_slowly(pool, client, shop)
    others = [pool.submit(client.recommend, 7) for _ in range(8)]
    until(lambda: cache.counts.joined == 8)
    shop.gate.set()
    assert {answer.result() for answer in others} == {first.result()}
    assert shop.asked == [7]


def test_many_tasks_with_one_question_ask_once(shop, cache):
    async def call():
        shop.gate.clear()
        client = AsyncRecommender(transport=AsyncShop(shop), cache=cache, timeouts=WAIT_S)
        tasks = [asyncio.create_task(client.recommend(7)) for _ in range(9)]
        while cache.counts.joined < 8:
            await asyncio.sleep(0.001)
        shop.gate.set()
        return await asyncio.gather(*tasks)

    assert len({answer.item_ids for answer in asyncio.run(call())}) == 1
    assert shop.asked == [7]


def test_who_waited_for_an_answer_that_failed_asks_for_itself(pool, client, shop, cache):
    first = ask_slowly(pool, client, shop)
    waiting = pool.submit(client.recommend_many, [Query(7), Query(8)])
    until(lambda: cache.counts.joined == 1)
    shop.error = Overloaded("the first one's")
    shop.gate.set()
    with pytest.raises(Overloaded, match="the first one's"):
        first.result()
    with pytest.raises(Overloaded):
        waiting.result()
    shop.error = None
    assert client.recommend(7).item_ids[0] == 710


def test_a_task_that_is_given_up_leaves_nobody_without_an_answer(shop, cache):
    async def call():
        shop.gate.clear()
        client = AsyncRecommender(transport=AsyncShop(shop), cache=cache, timeouts=WAIT_S)
        first = asyncio.create_task(client.recommend(7))
        while not shop.arrived.is_set():
            await asyncio.sleep(0.001)
        second = asyncio.create_task(client.recommend(7))
        while cache.counts.joined < 1:
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        shop.gate.set()
        return await second

    assert asyncio.run(call()).item_ids[0] == 710
    assert shop.asked == [7, 7]


def test_waiting_for_another_request_ends_at_the_own_deadline(pool, client, shop, cache):
    first = ask_slowly(pool, client, shop)
    client.timeouts = Timeouts(0.05)
    with pytest.raises(DeadlineExceeded, match=r"within 0\.0\d+ s.*another request with the same query"):
        client.recommend(7)
    shop.gate.set()
    assert first.result().item_ids[0] == 710
