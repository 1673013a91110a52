"""Both clients over the public test double, and what the package offers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triton_recommender
from tests.present import present
from triton_recommender import (
    Catalogue,
    DeadlineExceeded,
    Event,
    InvalidRequest,
    MemoryCache,
    Overloaded,
    Query,
    Recommender,
    Timeouts,
    UnknownId,
    stable_id,
)
from triton_recommender.ids import FIRST_USER_ID, session_id
from triton_recommender.testing import AsyncFakeRecommender, FakeRecommender, FakeTransport, describe_models

CLIENTS = Path(__file__).parents[3] / "clients"


def test_the_fake_shows_the_query_as_the_server_would_see_it():
    seen = list[Query]()

    def answer_query(query: Query) -> list[int]:
        seen.append(query)
        return [3, 1, 2]

    fake = FakeTransport(
        answer_query, history=2, exclusions=4, items_returned=3, candidates=2, context={"store": "INT64", "device": "BYTES"}
    )
    with Recommender(transport=fake, priority=2, timeouts=Timeouts(0.5, queue=0.1)) as shop:
        context: Mapping[str, int | str] = {"store": 3, "device": "phone"}
        answer = shop.recommend(
            5, history=[7, 8, 9], exclude=[4], context=context, category="bags", among=[9, 8], request_id="a-1"
        )
        shop.recommend(None)
    assert answer.item_ids == (3, 1, 2)
    assert seen == [Query(5, [7, 8], [4], context, category="bags", among=[9, 8]), Query(None, None, [], {})]
    call = fake.calls[0]
    assert (call.priority, call.queue_timeout_us, call.request_id) == (2, 100_000, "a-1")
    assert 0.4 < present(call.timeout_s) <= 0.5


def test_the_fake_raises_what_its_handler_raises():
    def refuse(query):
        raise Overloaded("try later")

    with pytest.raises(Overloaded):
        Recommender(transport=FakeTransport(refuse)).recommend(1)


def test_the_fake_serves_asyncio_as_well():
    async def call():
        async with AsyncFakeRecommender(lambda query: [int(query.user_id or 0)]) as shop:
            assert (await shop.health())[0].ready
            return await shop.recommend_many([4, Query(5)])

    assert [answer.item_ids for answer in asyncio.run(call())] == [(4,), (5,)]


def test_health_of_the_fake():
    [said] = FakeRecommender(lambda query: [3]).health()
    assert (said.ready, said.generation) == (True, 1)
    [said] = FakeRecommender(lambda query: []).health()
    assert (said.ready, said.reason) == (False, "it answers without a single item")


def test_names_are_translated_by_the_catalogue_and_unknown_ones_reported(repo):
    shop = FakeRecommender(lambda query: [10, 30], catalogue=Catalogue.load(repo))
    answer = shop.recommend("ann", history=["twenty", "never heard of"], exclude=["ten", 40, "tn"], among=["tenn"])
    assert shop.queries == [Query(7, [20, stable_id("never heard of")], [10, 40, stable_id("tn")], among=[stable_id("tenn")])]
    unknown = [("history", "never heard of"), ("exclude", "tn"), ("among", "tenn")]
    assert [(notice.field, notice.value) for notice in answer.warnings] == unknown
    assert shop.recommend("bob").warnings[0].message.startswith("user_id: no user is called 'bob' in generation 10")
    assert shop.recommend("7").warnings == shop.recommend("ann").warnings == ()
    assert [query.user_id for query in shop.queries[1:]] == [stable_id("bob"), 7, 7]


def test_spaces_around_a_name_do_not_count_as_in_an_export(repo):
    shop = FakeRecommender(lambda query: [10, 30], catalogue=Catalogue.load(repo))
    assert shop.recommend(" ann ", history=["twenty\n"], exclude=["\tten"]).warnings == ()
    assert shop.queries == [Query(7, [20], [10], {})]
    shop.observe("bob ", " cup ")
    assert (shop.events[0].user_id, shop.events[0].item_id) == (stable_id("bob"), stable_id("cup"))


def test_a_new_item_is_upserted_with_its_text_where_ids_are_text(repo):
    """Without it, the item would have no name, and the next export would leave its events out."""
    names = FakeRecommender(lambda query: [10], catalogue=Catalogue.load(repo))
    for item in ("cup ", "ten", 10, "10"):
        names.upsert("item", item, {"price": 2})
    names.upsert("user", "cup", {"country": "DE"})
    assert names.upserts == [
        ("item", stable_id("cup"), {"item_id": "cup", "price": 2}),
        *3 * [("item", 10, {"price": 2})],
        ("user", stable_id("cup"), {"country": "DE"}),
    ]
    numbers = FakeRecommender(lambda query: [10], catalogue=Catalogue(item_ids=frozenset([10])))
    numbers.upsert("item", "11", {"price": 2})
    assert numbers.upserts == [("item", 11, {"price": 2})]


@pytest.mark.parametrize("catalogue", [Catalogue(text_ids=True), Catalogue(item_names={"cup": 3})], ids=["no names", "names"])
def test_a_blank_name_is_refused(catalogue):
    shop = FakeRecommender(lambda query: [3], catalogue=catalogue)
    for act in (
        lambda: shop.recommend(1, exclude=[""]),
        lambda: shop.observe(7, " "),
        lambda: shop.upsert("item", "", {"a": 1}),
    ):
        with pytest.raises(InvalidRequest, match="more than spaces"):
            act()


def test_a_number_where_ids_are_text_is_reported_as_well():
    """Item "22423" has another id on the wire: as a number it would exclude nothing."""
    shop = FakeRecommender(lambda query: [3], catalogue=Catalogue(item_names={"22423": 3}, item_ids=frozenset([3])))
    assert [notice.value for notice in shop.recommend(1, exclude=[22423, 3]).warnings] == ["22423"]
    assert shop.recommend(1, exclude=["22423"]).item_ids == ()


def test_an_unknown_item_is_reported_also_where_ids_are_numbers():
    catalogue = Catalogue(generation=4, item_ids=frozenset([3, 5]))
    shop = FakeRecommender(lambda query: [3], catalogue=catalogue)
    answer = shop.recommend(1, history=[5, 22424], exclude=["3", "33"])
    assert [(notice.field, notice.value) for notice in answer.warnings] == [("history", "22424"), ("exclude", "33")]
    assert answer.warnings[0].message == "history: no item is called 22424 in generation 4; treated as a new item."
    with pytest.raises(UnknownId, match="no item is called 6 in generation 4"):
        FakeRecommender(lambda query: [3], catalogue=catalogue, strict=True).recommend(1, exclude=[6])
    wrong_items: tuple[Any, ...] = ("mug", [3])
    for wrong in wrong_items:
        with pytest.raises(InvalidRequest, match="exclude is"):
            shop.recommend(1, exclude=[wrong])


def test_strict_refuses_unknown_names(repo):
    shop = FakeRecommender(lambda query: [30], catalogue=Catalogue.load(repo), strict=True)
    for question in (Query("bob"), Query("ann", history=["tn"]), Query("ann", exclude=["tn"])):
        with pytest.raises(UnknownId, match=r"no (user|item) is called '(bob|tn)'"):
            shop.recommend_many([question])
    assert shop.queries == []


def test_answers_have_names_and_titles(repo):
    answer = FakeRecommender(lambda query: [10, 30, 99], catalogue=Catalogue.load(repo)).recommend("ann")
    assert [(item.rank, item.item_id, item.name, item.title) for item in answer.items] == [
        (1, 10, "ten", "new item 10 [red] café"),
        (2, 30, None, "new item 30 [red] café"),
        (3, 99, None, None),
    ]
    assert FakeRecommender(lambda query: [10]).recommend(1).items == ((1, 10, 1.0, None, None),)


@pytest.mark.parametrize("catalogue", [None, Catalogue(item_names={"SKU/0010-x": 3})])
@pytest.mark.parametrize("field", ["exclude", "history"])
def test_a_bare_text_is_no_list_of_items(field, catalogue):
    """Read letter by letter, a forbidden item would come back."""
    shop = FakeRecommender(lambda query: [3], catalogue=catalogue)
    wrong: tuple[Any, ...] = ("SKU/0010-x", 3)
    for items in wrong:
        with pytest.raises(InvalidRequest, match=f"^{field} is .*expected a list of item ids"):
            shop.recommend(1, **{field: items})
    assert shop.queries == []


def test_more_queries_than_a_request_takes_are_sent_in_several():
    shop = FakeRecommender(lambda query: [int(query.user_id or 0)])
    answers = shop.recommend_many(list(range(150)), request_id="a")
    assert [answer.item_ids for answer in answers] == [(user,) for user in range(150)]
    assert [len(call.inputs["user_id"]) for call in shop.server.calls] == [64, 64, 22]
    assert {answer.request_id for answer in answers} == {"a"}
    wrong: tuple[Any, ...] = ([], "17850", Query(1))
    for nothing in wrong:
        with pytest.raises(InvalidRequest):
            shop.recommend_many(nothing)


def test_wrong_settings_are_refused():
    with pytest.raises(InvalidRequest, match="priority is -1"):
        Recommender(transport=FakeTransport(lambda query: []), priority=-1)
    with pytest.raises(InvalidRequest, match="retries is 99; expected 0 to 10"):
        Recommender("localhost:8001", retries=99)
    for url in ("localhost", "ftp://localhost:8000", "localhost:http", ":8001", "localhost:70000"):
        with pytest.raises(InvalidRequest, match="expected host:port"):
            Recommender(url)


def test_a_text_that_utf8_cannot_encode_is_refused():
    shop, text = FakeRecommender(lambda query: [3], catalogue=Catalogue(text_ids=True)), "ann\ud800"
    for call in (
        lambda: shop.recommend(text),
        lambda: shop.recommend(session=text),
        lambda: shop.observe(text, 3),
        lambda: shop.upsert("item", 3, {"title": text}),
    ):
        with pytest.raises(InvalidRequest, match="surrogate"):
            call()


def test_everything_public_can_be_imported():
    assert sorted(triton_recommender.__all__) == triton_recommender.__all__
    assert all(hasattr(triton_recommender, name) for name in triton_recommender.__all__)


def test_the_fake_needs_no_grpc():
    code = "import sys; from triton_recommender.testing import FakeRecommender; FakeRecommender(lambda q: []).recommend(1); "
    code += "sys.exit('grpc' in sys.modules or 'tritonclient' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=CLIENTS).returncode == 0


def test_no_time_left_is_not_taken_for_the_usual_timeout():
    with pytest.raises(DeadlineExceeded):
        FakeRecommender(lambda query: [3]).recommend(7, timeout_s=0.0)


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), 1e10, "1", True])
def test_a_timeout_that_no_call_can_wait_for_is_refused(timeout_s):
    with pytest.raises(InvalidRequest, match="expected a number of seconds"):
        FakeRecommender(lambda query: [3]).recommend(7, timeout_s=timeout_s)


NOTHING: Any = None  # arguments as a caller without a type checker may give them
FIVE: Any = 5
HALF: Any = 1.5
ONE_EVENT: Any = Event(1, 3)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda shop: shop.recommend(1, request_id=FIVE), "request_id is 5; expected a text"),
        (lambda shop: shop.recommend(1, request_id="\ud800"), "expected a text that UTF-8 can encode"),
        (lambda shop: shop.recommend(1, generation=0), "generation is 0; expected a whole number from 1"),
        (lambda shop: shop.recommend(1, generation=HALF), "generation is 1.5; expected a whole number from 1"),
        (lambda shop: shop.recommend(1, generation=True), "generation is True; expected a whole number from 1"),
        (lambda shop: shop.recommend_many(NOTHING), "queries is None; expected a list of queries or user ids"),
        (lambda shop: shop.recommend_many(FIVE), r"queries is 5; .* Write \[5\]"),
        (lambda shop: shop.observe_many(ONE_EVENT), "expected a list of events"),
        (lambda shop: shop.observe(1, 3, ""), "event is ''; expected a name of the data set's"),
        (lambda shop: shop.observe(1, 3, event_id=""), "event_id is ''; expected a text by which the server knows"),
        (lambda shop: shop.observe(1, 3, value=1e300), r"value is 1e\+300; expected a finite number of 32 bits"),
        (lambda shop: shop.observe(1, 3, value=float("inf")), r"value is inf; expected a finite number of 32 bits"),
        (lambda shop: shop.observe(1, 3, value=True), r"value is True; expected a finite number, or None"),
        (lambda shop: shop.observe(1, 3, value=float("nan")), r"value is nan; expected a finite number, or None"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_sent(ask, message):
    shop = FakeRecommender(lambda query: [3])
    with pytest.raises(InvalidRequest, match=message):
        ask(shop)
    assert shop.server.calls == []


def test_strict_needs_a_catalogue_that_knows_users_or_items():
    with pytest.raises(InvalidRequest, match="strict is set without a catalogue"):
        FakeRecommender(lambda query: [3], strict=True)


def test_an_event_of_a_numpy_user_id_forgets_the_users_cached_answers():
    shop = FakeRecommender(lambda query: [3], cache=MemoryCache())
    user_id: Any = np.int64(7)
    for _ in range(2):
        shop.recommend(user_id)
    shop.observe(user_id, 3)
    shop.recommend(7)
    assert len(shop.queries) == 2


def test_a_changed_user_is_forgotten_by_the_cache_and_a_changed_item_is_not():
    shop = FakeRecommender(lambda query: [3], cache=MemoryCache())
    shop.recommend(7)
    shop.upsert("item", 7, {"price": 9.5})
    shop.recommend(7)
    assert len(shop.queries) == 1
    shop.upsert("user", 7, {"country": "FR"})
    shop.recommend(7)
    assert len(shop.queries) == 2


def test_a_changed_user_is_forgotten_by_the_cache_of_an_asyncio_client():
    async def ask_before_and_after() -> int:
        shop = AsyncFakeRecommender(lambda query: [3], cache=MemoryCache())
        await shop.recommend(7)
        await shop.upsert("user", 7, {"country": "FR"})
        await shop.recommend(7)
        return len(shop.queries)

    assert asyncio.run(ask_before_and_after()) == 2


def test_a_session_is_observed_and_asked_for_by_an_id_below_those_of_users():
    shop = FakeRecommender(lambda query: [3])
    shop.observe(None, 5, session="a3f9")
    shop.recommend(session="a3f9")
    assert session_id("a3f9") == -6367890295312838753 < FIRST_USER_ID
    assert [shop.events[0].user_id, shop.queries[0].user_id] == [session_id("a3f9")] * 2
    with pytest.raises(InvalidRequest, match="Both user_id and session"):
        shop.recommend(7, session="a3f9")
    reserved: tuple[Any, ...] = (session_id("a3f9"), np.int64(session_id("a3f9")))
    for session in reserved:
        with pytest.raises(InvalidRequest, match="reserved for sessions"):
            shop.recommend(session)
        with pytest.raises(InvalidRequest, match="reserved for sessions"):
            shop.upsert("user", session, {"country": "FR"})
    with pytest.raises(InvalidRequest, match="session is ''; expected a text that is not empty"):
        shop.recommend(session="")


def test_a_wrong_call_while_another_thread_reads_the_description_is_refused_as_usual():
    shop = FakeRecommender(lambda query: [3])

    class Descriptions(dict):
        def __setitem__(self, model, description):
            super().__setitem__(model, description)
            with pytest.raises(InvalidRequest, match="k is 0"):  # as from another thread, at this very moment
                shop.recommend(7, k=0)

    shop.models = Descriptions()
    assert shop.recommend(7).item_ids == (3,)


def test_calls_at_the_same_time_share_one_description_also_where_the_server_moves_on():
    shop = AsyncFakeRecommender(lambda query: [1, 2, 3])
    server: Any = shop.server  # whose asyncio side the fake makes
    describe, infer, described = server.describe, server.infer, list[str]()

    async def describe_slowly(model, timeout_s):
        described.append(model)
        await asyncio.sleep(0.05)
        return await describe(model, timeout_s)

    async def refuse_other_tensors(call):
        await asyncio.sleep(0.001 * (len(shop.server.calls) % 100))  # some are refused while others read the description
        if set(call.inputs) != set(shop.server.models[call.model].inputs) - {"category", "among"}:
            raise InvalidRequest("unexpected inputs")
        return await infer(call)

    async def ask_all():
        answers = await asyncio.gather(*(shop.recommend(user) for user in range(50)))
        assert [answer.item_ids for answer in answers] == [(1, 2, 3)] * 50

    async def run():
        await ask_all()
        assert described == ["recommend"]
        shop.server.models = describe_models(64, 64, 30, {"store": "INT64"}, 64)
        shop.server.items_returned = 30
        await ask_all()
        assert described == ["recommend"] * 2

    server.describe, server.infer = describe_slowly, refuse_other_tensors
    asyncio.run(run())


@pytest.mark.parametrize("fake", [FakeRecommender, AsyncFakeRecommender])
def test_a_long_lived_client_takes_what_a_newer_generation_takes(fake, monkeypatch):
    shop = fake(lambda query: list(range(1, 31)))

    def call(step):
        return asyncio.run(step) if fake is AsyncFakeRecommender else step

    def refuse(ask):
        with pytest.raises(InvalidRequest):
            call(ask())

    refuse(lambda: shop.recommend(7, context={"store": 3}))
    refuse(lambda: shop.observe(7, 1, context={"store": 3}))
    shop.server.models = describe_models(64, 64, 30, {"store": "INT64"}, 64)
    shop.server.items_returned = 30
    now_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + 5.0)
    assert len(call(shop.recommend(7, context={"store": 3}, k=30))) == 30
    assert call(shop.observe(7, 1, context={"store": 3}))
    refuse(lambda: shop.recommend(7, context={"shop": 3}))
    shop.server.models = describe_models(64, 64, 30, {}, 64)
    monkeypatch.setattr(time, "monotonic", lambda: now_s() + 10.0)
    assert len(call(shop.recommend(7))) == 30
