"""Several servers, failures between them, and what is sent twice and what never."""

from __future__ import annotations

import asyncio
import time
from typing import Any, cast

import grpc
import pytest

from server.start.ports import find_free_ports
from tests.unit.clients.conftest import ANSWER, both, recommend, use
from tests.unit.clients.grpc_double import GrpcDouble
from triton_recommender import (
    AsyncRecommender,
    CircuitOpen,
    DeadlineExceeded,
    Event,
    InvalidRequest,
    Overloaded,
    Recommender,
    StageDied,
    Timeouts,
    Unavailable,
)
from triton_recommender.breaker import Breaker
from triton_recommender.endpoints import AsyncEndpoints, Endpoint, Policy
from triton_recommender.errors import make_status_error
from triton_recommender.models import Call

UNAVAILABLE = (grpc.StatusCode.UNAVAILABLE, "GOAWAY")
DEAD = (grpc.StatusCode.INTERNAL, "Stub process 'rank_0_0' is not healthy.")


@pytest.fixture
def other():
    double = GrpcDouble(lambda query: ANSWER)
    yield double
    double.stop()


@both
def test_the_next_server_is_asked_where_the_first_is_away(kind, server):
    urls = [f"localhost:{find_free_ports().grpc}", server.url]
    assert use(kind, urls, recommend, timeouts=10.0) == [ANSWER]


@both
@pytest.mark.parametrize("failure", [UNAVAILABLE, DEAD, (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")])
def test_the_next_server_is_asked_where_the_first_fails(kind, server, other, failure):
    server.failures = [failure]
    assert use(kind, [server.url, other.url], recommend, timeouts=10.0) == [ANSWER]
    assert (len(server.parameters), len(other.parameters)) == (1, 1)


def ask_at_once(urls: list[str]) -> list:
    """Return the answers or errors of 50 calls that are all under way before the first one fails."""

    async def run():
        async with AsyncRecommender(urls, timeouts=10.0) as shop:
            await shop.signature()
            return await asyncio.gather(*(shop.recommend(1) for _ in range(50)), return_exceptions=True)

    return asyncio.run(run())


def test_all_calls_that_a_server_leaves_when_it_goes_are_answered_by_the_next(server):
    assert ask_at_once([f"localhost:{find_free_ports().grpc}", server.url]) == 50 * [ANSWER]


def test_few_calls_that_a_busy_server_refuses_are_sent_to_the_next(server, other):
    """If both are busy, the others would only make it worse."""
    server.failures = 50 * [(grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size")]
    answers = ask_at_once([server.url, other.url])
    assert 1 <= answers.count(ANSWER) == len(other.parameters) < 10


class Gone:
    url, asked = "gone", 0

    async def infer(self, call: Call) -> dict:
        self.asked += 1
        raise Unavailable("gone")


def test_a_server_that_a_call_asked_before_is_asked_again_at_the_expense_of_the_budget():
    """Also if its breaker keeps the call from the server between the two."""
    first, between, last = Gone(), Gone(), Gone()
    opened = Breaker(threshold=1, first_pause_s=600.0)
    opened.record_failure()
    call = Call({}, timeout_s=20.0)
    patient = {call.model: Breaker(threshold=1_000)}
    endpoints = [Endpoint(first, dict(patient)), Endpoint(between, {call.model: opened}), Endpoint(last, dict(patient))]

    async def run() -> None:
        client = AsyncEndpoints(endpoints, Policy(2, None, None))
        for _ in range(20):
            with pytest.raises(Unavailable):
                await client.infer(call)

    asyncio.run(run())
    assert between.asked == 0
    assert last.asked == 20
    assert 20 < first.asked < 26  # half of ten tokens


@both
def test_an_attempt_that_takes_too_long_goes_to_the_next_server(kind, server, other):
    server.delay_s = 3.0
    assert use(kind, [server.url, other.url], recommend, timeouts=Timeouts(20.0, attempt=0.5)) == [ANSWER]
    assert len(other.parameters) == 1


@both
def test_a_dead_stage_with_one_server_is_not_tried_again(kind, server):
    server.failures = [DEAD]
    with pytest.raises(StageDied):
        use(kind, server.url, recommend)
    assert len(server.parameters) == 1


@both
def test_a_hedged_call_takes_the_first_answer(kind, server, other):
    server.delay_s = 3.0
    started_s = time.monotonic()
    [answer] = use(kind, [server.url, other.url], recommend, timeouts=20.0, hedge_after_s=0.1)
    assert answer == ANSWER
    assert len(other.parameters) == 1
    assert time.monotonic() - started_s < 3.0 or kind == "blocking"  # closing waits for nothing that the answer did not need


@both
def test_a_hedge_is_not_sent_where_the_first_answers(kind, server, other):
    use(kind, [server.url, other.url], recommend, timeouts=20.0, hedge_after_s=10.0)
    assert (len(server.parameters), len(other.parameters)) == (1, 0)


@both
def test_an_event_is_not_hedged(kind, server, other):
    """Each machine keeps its own log, so it would count on both."""
    server.delay_s = 0.5
    urls, event = [server.url, other.url], Event(1, 2, event_id="a")
    use(kind, urls, lambda shop: [lambda: shop.observe_many([event])], timeouts=20.0, hedge_after_s=0.01)
    assert (server.fake.events, other.fake.events) == ([event], [])


def test_of_two_hedged_attempts_that_end_together_the_answer_counts():
    class Waiting:
        def __init__(self, url: str, ended: asyncio.Event) -> None:
            self.url, self._ended = url, ended

        async def infer(self, call: Call) -> dict:
            await self._ended.wait()
            if self.url == "first":
                raise Overloaded("busy")
            return {"item_ids": 3}

    async def hedge() -> dict:
        ended = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, ended.set)
        endpoints = [Endpoint(Waiting("first", ended)), Endpoint(Waiting("second", ended))]
        return await AsyncEndpoints(endpoints, Policy(0, None, hedge_after_s=0.001)).infer(Call({}))

    assert [asyncio.run(hedge()) for _ in range(10)] == [{"item_ids": 3}] * 10  # the order of ended attempts is random


@both
def test_events_without_a_key_are_never_sent_twice(kind, server, other):
    for ask in (
        lambda shop: [lambda: shop.observe(1, 2)],
        lambda shop: [lambda: shop.observe_many([Event(1, 2, event_id="a"), Event(1, 3)])],
        lambda shop: [lambda: shop.upsert("item", 2, {"price": 1.0})],
    ):
        server.failures = [UNAVAILABLE]
        with pytest.raises(Unavailable):
            use(kind, [server.url, other.url], ask)
    assert (other.fake.events, other.fake.upserts) == ([], [])


@both
def test_events_with_a_key_are_sent_again(kind, server):
    server.failures = [UNAVAILABLE]
    event = Event(1, 2, "view", 1_700_000_000_000, 2.5, "e-1", "r-1", {"device": "phone"})
    assert use(kind, server.url, lambda shop: [lambda: shop.observe_many([event, event])], timeouts=10.0) == [[1, 1]]
    assert server.fake.events == [event]


@both
def test_many_changes_are_sent_in_parts_once_all_of_them_are_checked(kind, server):
    changes = [(item, {"price": item}) for item in range(5)]
    assert use(kind, server.url, lambda shop: [lambda: shop.upsert_many("item", changes)]) == [[1, 2, 3, 4, 5]]
    with pytest.raises(InvalidRequest, match="id is -1; expected a whole number from 0"):
        use(kind, server.url, lambda shop: [lambda: shop.upsert_many("item", [*changes, (-1, {"price": 1})])])
    assert server.fake.upserts == [("item", *change) for change in changes]


@both
@pytest.mark.parametrize("changes", [{"22423": {"price": 1}}, {1: {"price": 1}}, [22_423], 22_423, None], ids=str)
def test_changes_that_are_no_pairs_are_refused(kind, server, changes):
    with pytest.raises(InvalidRequest, match=r"expected (a pair|pairs) of id and columns.* items\(\)"):
        use(kind, server.url, lambda shop: [lambda: shop.upsert_many("item", changes)])
    assert server.fake.upserts == []


@both
def test_an_answer_may_wait_for_an_event(kind, server):
    use(kind, server.url, lambda shop: [lambda: shop.recommend(1, after=7), lambda: shop.recommend(1)])
    assert [query.after for query in server.fake.queries] == [7, None]


def test_wrong_events_are_refused(server):
    number, text = cast(Any, 3), cast(Any, "now")
    with Recommender(server.url) as shop:
        for event, message in (
            (Event("ann", 2), "user_id is 'ann', a name"),
            (Event(1, -1), "item_id is -1; expected a whole number from 0"),
            (Event(1, 2, number), "event is 3; expected text"),
            (Event(1, 2, timestamp_ms=text), "timestamp_ms is 'now'; expected a whole number"),
            (Event(1, 2, timestamp_ms=-(1 << 63)), "timestamp_ms is -9223372036854775808; expected milliseconds since 1970"),
            (Event(1, 2, context={"shop": 3}), "context has no column 'shop'; this server knows store, device, basket"),
        ):
            with pytest.raises(InvalidRequest, match=message):
                shop.observe_many([event])
        with pytest.raises(InvalidRequest, match="reserved for sessions"):
            shop.upsert("user", -(1 << 62) - 1, {})
        for arguments in (("shop", 2, {}), ("item", -1, {}), ("item", 2, "price"), ("item", 2, {"price": float("nan")})):
            with pytest.raises(InvalidRequest):
                shop.upsert(*arguments)
    assert (server.fake.events, server.fake.upserts) == ([], [])


def test_who_fails_again_and_again_is_left_alone(server):
    server.failures = [UNAVAILABLE] * 5
    with Recommender(server.url, retries=0) as shop:
        for _ in range(5):
            with pytest.raises(Unavailable):
                shop.recommend(1)
        with pytest.raises(CircuitOpen, match=r"failed several times in a row.*GOAWAY"):
            shop.recommend(1)
        assert len(server.parameters) == 5


def test_a_model_that_refuses_again_and_again_leaves_the_others_asked(server):
    server.failures = [UNAVAILABLE] * 5
    with Recommender(server.url, retries=0) as shop:
        for _ in range(5):
            with pytest.raises(Unavailable, match="GOAWAY"):
                shop.observe(1, 2)
        with pytest.raises(CircuitOpen, match=r"`observe` at .* failed several times in a row.*GOAWAY"):
            shop.observe(1, 2)
        assert shop.recommend(1).item_ids


class Hanging:
    url = "hanging"

    async def describe(self, model, timeout_s):
        await asyncio.sleep(timeout_s)
        raise DeadlineExceeded("late")

    async def infer(self, call):
        return await self.describe(call.model, call.timeout_s)


class Answering:
    url = "answering"

    async def describe(self, model, timeout_s):
        return model

    async def infer(self, call):
        await asyncio.sleep(0.005)
        if call.timeout_s < 0.005:
            raise DeadlineExceeded("late")
        return {}


def test_callers_in_a_hurry_do_not_open_the_breaker_for_others():
    async def run():
        endpoints = AsyncEndpoints([Endpoint(Answering())], Policy(0, None, None, fair_s=60.0))
        hasty = [endpoints.infer(Call({}, timeout_s=0.001)) for _ in range(10)]
        failures = await asyncio.gather(*hasty, return_exceptions=True)
        assert all(isinstance(failure, DeadlineExceeded) for failure in failures)
        assert await endpoints.infer(Call({}, timeout_s=5.0)) == {}

    asyncio.run(run())


@both
def test_a_clients_own_timeout_counts_however_short(kind, server):
    server.delay_s = 1.0
    if kind == "blocking":
        with Recommender(server.url, timeouts=Timeouts(0.04, connect=5.0), retries=0) as shop:
            for _ in range(5):
                with pytest.raises(DeadlineExceeded):
                    shop.recommend(1)
            with pytest.raises(CircuitOpen):
                shop.recommend(1)
        return

    async def run():
        async with AsyncRecommender(server.url, timeouts=Timeouts(0.04, connect=5.0), retries=0) as shop:
            for _ in range(5):
                with pytest.raises(DeadlineExceeded):
                    await shop.recommend(1)
            with pytest.raises(CircuitOpen):
                await shop.recommend(1)

    asyncio.run(run())


def test_a_hanging_first_server_is_given_up_although_hedged_calls_are_answered():
    async def run():
        hanging = Endpoint(Hanging())
        endpoints = AsyncEndpoints([hanging, Endpoint(Answering())], Policy(0, None, hedge_after_s=0.01))
        for _ in range(5):
            assert await endpoints.infer(Call({}, timeout_s=5.0)) == {}
        await asyncio.sleep(0.2)  # the losing attempts had a fair time
        assert not hanging.find_breaker(Call({}).model).closed

    asyncio.run(run())


def test_a_short_call_is_hedged_after_half_of_its_time():
    async def run():
        endpoints = AsyncEndpoints([Endpoint(Hanging()), Endpoint(Answering())], Policy(0, None, hedge_after_s=60.0))
        assert await endpoints.infer(Call({}, timeout_s=1.0)) == {}

    asyncio.run(run())


def test_a_hanging_first_server_is_given_up_by_callers_who_stop_waiting():
    async def run():
        endpoints = AsyncEndpoints([Endpoint(Hanging()), Endpoint(Answering())], Policy(0, None, None))
        for _ in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await endpoints.describe("recommend", 5.0)
        assert await endpoints.describe("recommend", 5.0) == "recommend"

    asyncio.run(run())


def test_a_description_comes_from_the_second_server_at_once_where_the_first_hangs():
    async def run():
        endpoints = AsyncEndpoints([Endpoint(Hanging()), Endpoint(Answering())], Policy(0, None, None))
        begun_s = time.monotonic()
        assert await endpoints.describe("recommend", 2.0) == "recommend"
        assert time.monotonic() - begun_s < 2.0

    asyncio.run(run())


def test_a_breaker_opens_tries_and_closes():
    now_s = [0.0]
    breaker = Breaker(threshold=2, first_pause_s=1.0, longest_pause_s=3.0, clock_s=lambda: now_s[0])
    breaker.record_failure()
    assert breaker.admit()
    breaker.record_failure()
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        now_s[0] += pause_s - 0.01
        assert not breaker.admit()
        now_s[0] += 0.01
        assert [breaker.admit(), breaker.admit()] == [True, False]  # one trial
        breaker.record_failure()
    now_s[0] += 3.0
    assert breaker.admit()
    breaker.record_success()
    assert [breaker.admit(), breaker.admit()] == [True, True]


def test_calls_that_fail_together_open_a_breaker_for_one_pause():
    now_s = [0.0]
    breaker = Breaker(threshold=2, first_pause_s=1.0, longest_pause_s=8.0, clock_s=lambda: now_s[0])
    for _ in range(10):  # all of them were made before it opened
        breaker.record_failure()
    now_s[0] += 1.0
    assert [breaker.admit(), breaker.admit()] == [True, False]


@both
def test_headers_are_sent(kind, server, http):
    for double, sent in ((server, server.metadata), (http, http.headers)):
        use(kind, double.url, recommend, headers={"Authorization": "Bearer x"})
        assert {name.lower(): value for name, value in sent[-1].items()}["authorization"] == "Bearer x"


def test_a_message_states_long_timeouts_in_plain_seconds():
    assert "No answer from shop:8001 within 120 s." in str(make_status_error("DEADLINE_EXCEEDED", "", "shop:8001", 120.0))
