"""Queries to tensors and back, and every way to ask wrongly."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from serving.contract.tensors import Axes, ContextColumn, make_ensemble_spec, make_stage_specs
from triton_recommender import InvalidRequest, Query, Timeouts
from triton_recommender.models import ModelDescription
from triton_recommender.tensors import FROM_STORE, MISSING_INT, PAD_ID, Degraded, Sources
from triton_recommender.wire import Signature, check_k, decode, encode, validate_items

H, E, K, A = 3, 2, 4, 3
SIGNATURE = Signature(H, E, K, {"store": "INT64", "device": "BYTES", "basket": "FP32"}, max_batch=2)
HUGE = 2**63 - 1


def test_a_bare_user_sends_the_fill_of_everything_but_a_choice():
    """Only requests with the same tensors are batched, so all are sent, except `category` and `among`, which cost time."""
    tensors = encode([Query(17850)], dataclasses.replace(SIGNATURE, has_after=True, has_category=True, among=A))
    assert tensors["user_id"].dtype == np.int64
    assert tensors["user_id"].tolist() == [[17850]]
    axes = Axes(history=H, exclusions=E)
    context = tuple(ContextColumn(n, k) for n, k in (("store", "integer"), ("device", "string"), ("basket", "continuous")))
    inputs = make_ensemble_spec(make_stage_specs(axes, context)).inputs[1:]
    assert tensors.keys() == {"user_id", *(tensor.name for tensor in inputs)} - {"category", "among"}
    for tensor in (tensor for tensor in inputs if tensor.name in tensors):
        np.testing.assert_array_equal(tensors[tensor.name], tensor.make_filled(1), err_msg=tensor.name)
        assert tensors[tensor.name].dtype == tensor.numpy_dtype


def test_history_keeps_the_newest_and_tells_none_from_empty():
    rows = [encode([Query(1, history)], SIGNATURE)["history"][0].tolist() for history in ([9, 8, 7, 6], [5], [])]
    assert rows == [[9, 8, 7], [5, PAD_ID, PAD_ID], [PAD_ID] * 3]
    mixed = encode([Query(1), Query(2, [4])], SIGNATURE)["history"]
    assert mixed.tolist() == [[FROM_STORE] * 3, [4, PAD_ID, PAD_ID]]


def test_exclusions_are_padded_and_what_does_not_fit_is_dropped_from_the_answer():
    query = Query(1, exclude=[7, 8, 9])
    assert encode([query], SIGNATURE)["exclude"].tolist() == [[7, 8]]
    assert encode([Query(1, exclude=[7]), Query(2)], SIGNATURE)["exclude"].tolist() == [[7, PAD_ID], [PAD_ID] * 2]
    outputs = answer_tensors([[5, 9, 6, PAD_ID]])
    assert decode(outputs, [query], None, E)[0].item_ids == (5, 6)


def test_context_takes_its_dtype_from_the_server_and_missing_values_their_marker():
    context: Mapping[str, int | str] = {"store": "3", "device": "café", "basket": 2}
    tensors = encode([Query(1, context=context), Query(2, context={"store": HUGE, "basket": None})], SIGNATURE)
    assert tensors["store"].dtype == np.int64
    assert tensors["store"].tolist() == [[3], [HUGE]]
    assert tensors["device"].tolist() == [["café".encode()], [b""]]
    assert tensors["basket"].dtype == np.float32
    assert tensors["basket"][0, 0] == 2.0
    assert np.isnan(tensors["basket"][1, 0])
    assert encode([Query(1, context={"store": None})], SIGNATURE)["store"].tolist() == [[MISSING_INT]]


def test_anonymous_and_extreme_users_are_sent():
    users: tuple[Any, ...] = (None, -5, HUGE, np.int64(3))
    sent = [encode([Query(user)], SIGNATURE)["user_id"][0, 0] for user in users]
    assert sent == [MISSING_INT, -5, HUGE, 3]


def test_answers_come_without_padding_in_served_order():
    outputs = answer_tensors([[5, 3, 9, PAD_ID], [1, 2, 3, 4]])
    first, second = decode(outputs, [Query(1), Query(2)], 2, E)
    assert list(first) == [(5, 4.0), (3, 3.0)]
    assert len(second) == 2
    assert first.degraded == Degraded.RETRIEVE
    assert second.generation == 6
    assert decode(outputs, [Query(1)], None, E)[0].item_ids == (5, 3, 9)


def test_propensities_are_those_of_the_items_that_are_left():
    outputs = answer_tensors([[5, 9, 6, 8]]) | {"propensities": np.array([[1.0, 1.0, 0.25, 0.0]], np.float32)}
    assert decode(outputs, [Query(1)], 3, E)[0].propensities == (1.0, 1.0, 0.25)
    assert decode(outputs, [Query(1)], None, E)[0].propensities == (1.0, 1.0, 0.25, None)
    assert decode(outputs, [Query(1, exclude=[7, 8, 9])], None, E)[0].propensities == (1.0, None)
    assert decode(answer_tensors([[5, 9, 6, 8]]), [Query(1)], None, E)[0].propensities == ()


def test_sources_are_those_of_the_items_that_are_left():
    outputs = answer_tensors([[5, 9, 6, 8]]) | {"sources": np.array([[4, 12, 0, 64]], np.int32)}
    [answer] = decode(outputs, [Query(1, exclude=[5])], 2, E)
    assert answer.sources == (Sources.TWO_TOWER | Sources.BOUGHT_TOGETHER, Sources.NONE)
    assert decode(answer_tensors([[5, 9, 6, 8]]), [Query(1)], None, E)[0].sources == ()


def answer_tensors(item_ids: list[list[int]]) -> dict[str, np.ndarray]:
    batch = len(item_ids)
    return {
        "item_ids": np.array(item_ids, np.int64),
        "scores": np.tile(np.arange(K, 0, -1, dtype=np.float32), (batch, 1)),
        "degraded": np.full((batch, 1), 2, np.int32),
        "generation": np.full((batch, 1), 6, np.int64),
    }


HALF: Any = 1.5  # as a caller without a type checker may give it
NOTHING: Any = []


@pytest.mark.parametrize(
    ("queries", "message"),
    [
        ([], "no query in the call"),
        ([Query("ann")], "user_id is 'ann', a name"),
        ([Query(HALF)], "user_id is 1.5; expected a whole number"),
        ([Query(True)], "user_id is True"),
        ([Query(2**63)], "user_id is 9223372036854775808; expected a whole number from -9223372036854775808"),
        ([Query(1, history=["x"])], "history is 'x', a name"),
        ([Query(1, history=[-2])], "history is -2; expected a whole number from 0"),
        ([Query(1, exclude=[-1])], "exclude is -1; expected a whole number from 0"),
        ([Query(1, context={"shop": 3})], "no column 'shop'; this server knows store, device, basket"),
        ([Query(1, context={"store": "north"})], "context store is 'north'; expected a whole number"),
        ([Query(1, context={"store": 2.5})], "context store is 2.5; expected a whole number"),
        ([Query(1, context={"store": float("inf")})], "context store is inf"),
        ([Query(1, context={"store": 2**63})], "context store is 9223372036854775808"),
        ([Query(1, context={"basket": 1e300})], "context basket is 1e+300; expected a finite number of 32 bits"),
        ([Query(1, context={"basket": float("-inf")})], "context basket is -inf; expected a finite number"),
        ([Query(1, context={"basket": "much"})], "context basket is 'much'; expected a finite number"),
        ([Query(1, context={"basket": NOTHING})], "context basket is []; expected a finite number"),
    ],
)
def test_a_wrong_query_is_named(queries, message):
    with pytest.raises(InvalidRequest) as caught:
        encode(queries, SIGNATURE)
    assert message in str(caught.value)


def test_a_server_without_context_says_so():
    with pytest.raises(InvalidRequest, match="this server knows none at all"):
        encode([Query(1, context={"store": 3})], Signature(H, E, K, {}, 2))


@pytest.mark.parametrize("k", [0, -1, True, 1.5])
def test_k_counts_items(k):
    with pytest.raises(InvalidRequest, match="expected a whole number from 1 to 4"):
        check_k(k, SIGNATURE.items_returned)


def test_k_has_a_maximum_which_the_message_gives():
    check_k(K, SIGNATURE.items_returned)
    check_k(None, SIGNATURE.items_returned)
    with pytest.raises(InvalidRequest, match="k is 5; this server returns 4 items at most"):
        check_k(5, SIGNATURE.items_returned)


def test_another_model_is_recognised():
    with pytest.raises(InvalidRequest, match="no tensor history, exclude, item_ids"):
        Signature.of(
            ModelDescription(
                {"user_id": ("INT64", 1)}, {"scores": ("FP32", 4), "degraded": ("INT32", 1), "generation": ("INT64", 1)}, 1
            )
        )


def test_timeouts_say_what_they_limit():
    assert Timeouts(0.5, queue=0.05).queue_us == 50_000
    assert Timeouts(None).queue_us is None
    wrong: list[tuple[str, Any]] = [("request", 0), ("request", "2"), ("connect", None), ("queue", -1), ("attempt", True)]
    for name, value in [*wrong, ("request", float("inf")), ("request", 1e10)]:
        with pytest.raises(InvalidRequest, match=f"Timeouts {name} is"):
            Timeouts(**{name: value})


def test_after_is_sent_where_the_server_takes_it():
    live = dataclasses.replace(SIGNATURE, has_after=True)
    assert encode([Query(1, after=7), Query(2)], live)["after"].tolist() == [[7], [PAD_ID]]
    with pytest.raises(InvalidRequest, match="serves no live state"):
        encode([Query(1, after=7)], SIGNATURE)


def test_a_category_is_sent_where_a_query_names_one():
    signature = dataclasses.replace(SIGNATURE, has_category=True)
    sent = encode([Query(1, category=" Küche\n"), Query(2)], signature)["category"]
    assert (sent.dtype, sent.tolist()) == (np.object_, [["Küche".encode()], [b""]])
    assert "category" not in encode([Query(1)], signature)
    with pytest.raises(InvalidRequest, match=r"no such input: an older version exported its repository\. Leave `category` out"):
        encode([Query(1, category="bags"), Query(2)], SIGNATURE)


@pytest.mark.parametrize("category", ["", "  ", 3, b"bags", ["bags"], "\ud800"])
@pytest.mark.parametrize("has_category", [True, False])
def test_what_is_no_name_of_a_category_is_refused(category, has_category):
    with pytest.raises(InvalidRequest, match=r"^category is .*; expected the name of a category, or None for the whole"):
        encode([Query(1), Query(2, category=category)], dataclasses.replace(SIGNATURE, has_category=has_category))


def test_items_to_choose_from_are_sent_where_a_query_names_some():
    signature = dataclasses.replace(SIGNATURE, among=A)
    sent = encode([Query(1, among=[9, 8]), Query(2), Query(3, among=[7, 7, 6])], signature)["among"]
    assert (sent.dtype, sent.tolist()) == (np.int64, [[9, 8, PAD_ID], [PAD_ID] * 3, [7, 7, 6]])
    assert "among" not in encode([Query(1)], signature)
    with pytest.raises(InvalidRequest, match=r"^among is set, but .* Leave `among` out, or export again\."):
        encode([Query(1, among=[9])], SIGNATURE)


@pytest.mark.parametrize(
    ("among", "message"),
    [
        ([1, 2, 3, 4], "among has 4 items; expected 1 to 3. Send fewer."),
        ([], "among has 0 items; expected 1 to 3. Leave `among` out for the whole catalogue."),
        ([-1], "among is -1; expected a whole number from 0"),
        (["x"], "among is 'x', a name"),
    ],
)
def test_what_cannot_be_chosen_from_is_refused(among, message):
    with pytest.raises(InvalidRequest) as caught:
        encode([Query(1), Query(2, among=among)], dataclasses.replace(SIGNATURE, among=A))
    assert message in str(caught.value)


@pytest.mark.parametrize("items", ["SKU/0010-x", b"x", 3, {"a": 1}, None])
def test_what_is_no_list_of_items_is_refused(items):
    with pytest.raises(InvalidRequest, match=r"^exclude is .*expected a list of item ids"):
        validate_items(items, "exclude")


def test_any_list_of_items_is_taken():
    assert [validate_items(items, "exclude") for items in ([1], (1,), {1}, np.array([1]), iter([1]))] == [[1]] * 5
