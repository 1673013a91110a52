"""Answers off the wire against those that were recorded."""

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from perf.answers import compare_at_once, compare_messages, count_degraded, read_tensors
from repository.checks.recorded import Recorded
from serving.contract.errors import ServerError
from serving.contract.tensors import ModelSpec, TensorSpec
from tests.unit.perf.grpc_server import serving

RECOMMEND = ModelSpec(
    "recommend",
    inputs=(TensorSpec("user_id", "INT64", (1,)),),
    outputs=(TensorSpec("item_ids", "INT64", (3,)), TensorSpec("scores", "FP32", (3,))),
)


def random_answers(n_rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {"item_ids": rng.integers(0, 2**60, (n_rows, 3)), "scores": rng.random((n_rows, 3), np.float32)}


@pytest.fixture
def expected() -> dict[str, np.ndarray]:
    return random_answers(50)


def messages_of(answers: dict[str, np.ndarray], names=("item_ids", "scores")) -> list[bytes]:
    found = []
    for row in range(len(answers["item_ids"])):
        message = pb.ModelInferResponse(model_name="recommend")
        for name in names:
            values = answers[name][row]
            datatype = {"int64": "INT64", "float32": "FP32"}[str(values.dtype)]
            message.outputs.add(name=name, datatype=datatype, shape=[1, *values.shape])
            message.raw_output_contents.append(values.tobytes())
        found.append(message.SerializeToString())
    return found


@pytest.mark.parametrize("names", [("item_ids", "scores"), ("scores", "item_ids")])
def test_tensors_are_read_by_name(expected, names):
    got = read_tensors(RECOMMEND, messages_of(expected, names))
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(got[name], values)
        assert got[name].dtype == values.dtype


def test_degraded_answers_are_counted():
    model = ModelSpec("recommend", inputs=(), outputs=(TensorSpec("degraded", "INT32", (1,)),))
    messages = []
    for bits in (0, 16, 0, 4):
        message = pb.ModelInferResponse(model_name="recommend", raw_output_contents=[np.int32(bits).tobytes()])
        message.outputs.add(name="degraded", datatype="INT32", shape=[1, 1])
        messages.append(message.SerializeToString())
    assert count_degraded(model, messages) == 2
    assert count_degraded(model, []) == 0
    with pytest.raises(ServerError, match="an answer is none of recommend"):
        count_degraded(model, [*messages, b"no answer"])


def test_equal_answers_do_not_differ(expected):
    nearly = expected | {"scores": expected["scores"] + np.float32(1e-6)}
    assert compare_messages(RECOMMEND, messages_of(nearly), expected) == ""
    assert compare_messages(RECOMMEND, [], {name: rows[:0] for name, rows in expected.items()}) == ""


def test_one_answer_to_another_request_is_found(expected):
    messages = messages_of(expected)
    messages[7], messages[8] = messages[8], messages[7]
    assert compare_messages(RECOMMEND, messages, expected) == "2 of 50 id lists differ, first request 7"


@pytest.mark.parametrize(
    "message",
    [b"\xff", b"", pb.ModelInferResponse(outputs=[{"name": "temperature"}], raw_output_contents=[b"1234"]).SerializeToString()],
)
def test_what_is_no_answer_of_the_model_is_a_difference(expected, message):
    messages = messages_of(expected)
    messages[3] = message
    assert compare_messages(RECOMMEND, messages, expected).startswith("an answer is none of recommend: ")


def test_one_other_score_is_found(expected):
    other = expected | {"scores": expected["scores"].copy()}
    other["scores"][49, 2] += 0.25
    assert compare_messages(RECOMMEND, messages_of(other), expected) == "scores differ by up to 0.25"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (None, ""),
        ("other", "64 requests at once: 1 of 100 id lists differ, first request 70"),
        ("refuse", "36 requests at once: 1 were not answered, {'UNAVAILABLE: no': 1}"),
    ],
)
def test_requests_at_once_are_each_compared_with_their_own_answer(fault, said):
    """More than are sent at once: the fault is in the second part."""
    expected = random_answers(100)
    messages = messages_of(expected)

    def answer(body, context):
        row = int.from_bytes(pb.ModelInferRequest.FromString(body).raw_input_contents[0], "little")
        if row == 70 and fault == "refuse":
            context.abort(grpc.StatusCode.UNAVAILABLE, "no")
        return messages[71 if row == 70 and fault == "other" else row]

    recorded = Recorded({"user_id": np.arange(100)[:, None]}, expected)
    with serving(answer) as url:
        assert compare_at_once(url, RECOMMEND, recorded) == said
