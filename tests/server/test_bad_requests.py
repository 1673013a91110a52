"""The real server answers a malformed request with a coded error for that request alone, or with a served cold start."""

from collections import Counter

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from experiments.forged import Known, forge_fields, forge_http, forge_request, forge_stage_request
from experiments.malformed import send_grpc, send_http
from server.processes import find_server_members
from serving.contract.tensors import LIVE_MODELS, PAD_ID, STAGES, make_ensemble_spec, make_live_specs, pack_records
from serving.pipeline import Pipeline
from tests.server.support.requests import ask_together, infer, tensor

HUGE = np.iinfo(np.int64).max


def refused(client, inputs) -> InferenceServerException:
    with pytest.raises(InferenceServerException) as caught:
        client.infer("recommend", inputs)
    return caught.value


def test_wrong_dtype(client):
    error = refused(client, [tensor("user_id", np.array([[1]], np.int32), "INT32")])
    assert "INVALID_ARGUMENT" in error.status()
    assert "user_id" in error.message()


def test_a_category_that_is_no_text(client):
    error = refused(client, [tensor("user_id", np.array([[1]])), tensor("category", np.array([[1]]))])
    assert "INVALID_ARGUMENT" in error.status()
    assert "category" in error.message()


def test_a_category_that_is_not_utf_8_is_one_that_no_item_has(client):
    assert (infer(client, user_id=[1], category=np.array([[b"\xff\xfe"]], object))["item_ids"] == PAD_ID).all()


def test_request_parameters_that_are_not_utf_8_are_ignored(server):
    """Over HTTP, tritonserver takes any bytes in them. They failed the batch, and so other requests too."""
    user_id = b'{"name": "user_id", "datatype": "INT64", "shape": [1, 1], "data": [1]}'
    body = b'{"id": "\xfe", "parameters": {"deadline_unix_ms": "\xff"}, "inputs": [' + user_id + b"]}"
    head = f"POST /v2/models/recommend/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    assert send_http(server.ports.http, [head.encode() + body]) == Counter({"200": 1})


def test_wrong_shape(client):
    error = refused(client, [tensor("user_id", np.array([[1, 2]]))])
    assert "INVALID_ARGUMENT" in error.status()
    assert "user_id" in error.message()


def test_missing_user_id(client, info):
    error = refused(client, [tensor("exclude", np.full((1, info.axes.exclusions), PAD_ID))])
    assert "INVALID_ARGUMENT" in error.status()


def test_batch_over_the_limit(client, limit):
    error = refused(client, [tensor("user_id", np.ones((limit + 1, 1), np.int64))])
    assert "INVALID_ARGUMENT" in error.status()
    assert str(limit) in error.message()


def test_a_tensor_nobody_knows(client):
    error = refused(client, [tensor("user_id", np.array([[1]])), tensor("horoscope", np.array([[1]]))])
    assert "horoscope" in error.message()


@pytest.mark.parametrize("user_id", [-1, -2, 0, HUGE, -HUGE - 1])
def test_unknown_negative_and_huge_users_are_cold_starts(client, user_id):
    answer = infer(client, user_id=[user_id])
    ids = answer["item_ids"][0]
    assert (ids >= 0).all()
    assert len(set(ids.tolist())) == len(ids)
    assert answer["degraded"].item() == 0


def test_an_empty_history_is_a_new_session(client, info):
    history = np.full((1, info.axes.history), PAD_ID)
    assert (infer(client, user_id=[HUGE], history=history)["item_ids"] >= 0).all()


@pytest.mark.parametrize("length", [0, 1, 1_000])
@pytest.mark.parametrize(("name", "axis"), [("history", "history"), ("among", "candidates")])
def test_a_list_of_another_length_is_refused_with_the_right_one(client, info, name, axis, length):
    error = refused(client, [tensor("user_id", np.array([[1]])), tensor(name, np.zeros((1, length), np.int64))])
    assert "INVALID_ARGUMENT" in error.status()
    assert str(getattr(info.axes, axis)) in error.message()


def test_of_items_that_nobody_knows_none_can_be_recommended(client, info):
    assert (infer(client, user_id=[1], among=np.full((1, info.axes.candidates), HUGE))["item_ids"] == PAD_ID).all()


def test_unknown_items_in_a_history_are_ignored(client, info):
    unknown = np.full((1, info.axes.history), HUGE)
    empty = np.full((1, info.axes.history), PAD_ID)
    np.testing.assert_array_equal(
        infer(client, user_id=[HUGE], history=unknown)["item_ids"], infer(client, user_id=[HUGE], history=empty)["item_ids"]
    )


def test_excluded_items_do_not_come_back_and_the_list_stays_whole(client, info):
    first = infer(client, user_id=[HUGE])["item_ids"][0]
    exclude = np.full((1, info.axes.exclusions), PAD_ID)
    exclude[0, : len(first)] = first
    second = infer(client, user_id=[HUGE], exclude=exclude)["item_ids"][0]
    assert not set(first.tolist()) & set(second.tolist())
    assert (second >= 0).all()


def test_nan_context_is_a_missing_value_and_infinite_context_is_refused(client):
    absent = infer(client, user_id=[1])
    for name in ("item_ids", "scores"):
        np.testing.assert_array_equal(
            infer(client, user_id=[1], temperature=np.array([[np.nan]], np.float32))[name], absent[name]
        )
    for value in (np.inf, -np.inf):
        error = refused(client, [tensor("user_id", np.array([[1]])), tensor("temperature", np.array([[value]], np.float32))])
        assert "INVALID_ARGUMENT" in error.status()
        assert "temperature" in error.message()


def batches_of(client, model: str) -> Counter:
    """Return how often the model has run each batch size."""
    [statistics] = client.get_inference_statistics(model).model_stats
    return Counter({batch.batch_size: batch.compute_infer.count for batch in statistics.batch_stats})


def test_a_megabyte_of_string_is_refused_and_costs_nobody_else_anything(client, limit):
    """Its batch mates get what they get alone. Only requests with the same set of optional inputs ever share a batch."""
    known = np.array([[b"fridge"]], object)
    alone = infer(client, user_id=[1], device=known)
    busy = [tensor("user_id", np.arange(limit).reshape(-1, 1))]  # as long as it runs, what arrives waits together
    bad = [tensor("user_id", np.array([[1]])), tensor("device", np.array([[b"x" * 1_000_000]], object))]
    mate = [tensor("user_id", np.array([[1]])), tensor("device", known)]
    before = batches_of(client, "preprocess")
    for _ in range(50):
        *_, error, answer = ask_together(client, "recommend", [busy] * 4 + [bad, mate])
        assert "INVALID_ARGUMENT" in error.status()
        assert "device has 1000000 bytes" in error.message()
        for name, expected in alone.items():
            np.testing.assert_array_equal(answer.as_numpy(name), expected)
        if (batches_of(client, "preprocess") - before)[2]:  # nobody else asks: a batch of two is these two
            return
    pytest.fail("The two never shared a batch.")


def test_an_unknown_context_value_is_served(client):
    assert (infer(client, user_id=[1], device=np.array([[b"fridge"]], object))["item_ids"] >= 0).all()


def test_no_message_shows_the_servers_paths(client):
    error = refused(client, [tensor("user_id", np.array([[1]])), tensor("temperature", np.array([[np.inf]], np.float32))])
    assert "Traceback" not in error.message()
    assert "/" not in error.message()


def test_forged_records_never_show_a_score_that_is_no_number(client, repository):
    rng, pipeline = np.random.default_rng(0), Pipeline.load(repository)
    spec, shown_ids, known = (
        pipeline.specs["rerank"],
        infer(client, user_id=[1])["item_ids"][0],
        Known.read(repository, pipeline),
    )
    outcomes = Counter[str]()
    for number in range(60):
        fields = forge_fields(spec, pipeline.info.generation, known, rng)
        if number % 2:  # what an honest ranker could have said, but for repeated items
            fields["candidate_ids"][:] = rng.choice(shown_ids, fields["candidate_ids"].shape)
        if number % 3 == 0:
            fields["rank_scores"][:] = np.nan
        record = pack_records(spec.inputs, fields)["ranked"]
        try:
            answer = client.infer("rerank", [tensor("ranked", record, "UINT8")])
        except InferenceServerException as error:
            outcomes[error.status()] += 1
            continue
        item_ids, scores = answer.as_numpy("item_ids")[0], answer.as_numpy("scores")[0]
        shown = item_ids != PAD_ID
        assert np.isfinite(scores[shown]).all()
        outcomes["answered"] += 1
    pipeline.close()
    assert set(outcomes) <= {"answered", "StatusCode.INVALID_ARGUMENT"}, outcomes
    assert outcomes["answered"] > 0


def test_malformed_requests_and_forged_records_harm_nobody(server, client, repository):
    """A slice of `python -m experiments.malformed`: coded errors or answers, no process ends, valid answers stay the same."""
    rng, pipeline = np.random.default_rng(0), Pipeline.load(repository)
    before, answer = {process.pid for process in find_server_members(server.state.tag)}, infer(client, user_id=[1])
    recommend, generation = make_ensemble_spec(pipeline.specs), pipeline.info.generation
    known = Known.read(repository, pipeline)
    broken = [forge_request(recommend, known, rng) for _ in range(200)]
    forged = [forge_stage_request(pipeline.specs[STAGES[i % 4]], generation, known, rng) for i in range(200)]
    live = make_live_specs(tuple(column.tensor for column in pipeline.info.context))
    writes = [forge_request(live[LIVE_MODELS[i % 2]], known, rng) for i in range(200)]
    pipeline.close()
    of_writes = send_grpc(server.grpc_url, writes)
    assert of_writes["OK"] == 0, of_writes
    assert of_writes["INVALID_ARGUMENT"] > 100
    statuses = of_writes + send_grpc(server.grpc_url, broken) + send_grpc(server.grpc_url, forged)
    statuses += send_http(server.ports.http, [forge_http(rng) for _ in range(100)])
    assert statuses["DEADLINE_EXCEEDED"] == statuses["no reply"] == statuses["UNKNOWN"] == 0, statuses
    assert statuses["INVALID_ARGUMENT"] > 100
    assert {process.pid for process in find_server_members(server.state.tag)} == before
    for name, values in infer(client, user_id=[1]).items():
        np.testing.assert_array_equal(values, answer[name])
