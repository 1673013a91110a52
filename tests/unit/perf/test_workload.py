"""Requests in the forms load needs them: drawn by Zipf, as perf_analyzer's JSON, as gRPC bytes."""

import json

import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as pb

from perf.load.workload import draw, read_requests, serialise, write_analyzer_json
from serving.contract.errors import ArtifactError
from serving.contract.tensors import (
    FROM_STORE,
    MISSING_INT,
    PAD_ID,
    Axes,
    ContextColumn,
    make_ensemble_spec,
    make_stage_specs,
    pack_records,
)

AXES = Axes(candidates=8, history=4, exclusions=3, items_returned=2, user_categorical=1, user_continuous=1)
CONTEXT = (ContextColumn("store", "integer"), ContextColumn("device", "string"), ContextColumn("hour", "continuous"))
STAGES = make_stage_specs(AXES, CONTEXT)
SPEC = make_ensemble_spec(STAGES)


@pytest.fixture
def requests():
    """Row 0 sends everything, row 1 the user alone, rows 2 and 3 are the same user's."""
    rows = SPEC.fill_optional(4) | {"user_id": np.array([[17], [23], [42], [42]])}
    rows["store"][0], rows["device"][0], rows["hour"][0] = 5, "Łódź".encode(), 3.5
    rows["history"][0] = [9, 8, PAD_ID, PAD_ID]
    rows["exclude"][0] = [7, PAD_ID, PAD_ID]
    return rows


def parsed(body: bytes) -> dict[str, np.ndarray]:
    """A slow reading of the wire form, by the official protobuf."""
    request = pb.ModelInferRequest.FromString(body)
    tensors = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        if tensor.datatype == "BYTES":
            assert int.from_bytes(raw[:4], "little") == len(raw) - 4
            tensors[tensor.name] = np.array([raw[4:]], object).reshape(tensor.shape)
        else:
            dtype = {"INT64": np.int64, "FP32": np.float32}[tensor.datatype]
            tensors[tensor.name] = np.frombuffer(raw, dtype).reshape(tensor.shape)
    return tensors


@pytest.mark.parametrize("choice", [{}, {"category": "Küche".encode()}, {"among": 7}], ids=str)
def test_serialised_requests_carry_every_tensor_but_a_choice_that_no_row_has(requests, choice):
    for name, value in choice.items():
        requests[name][2] = value
    for row, sent in enumerate(parsed(body) for body in serialise(SPEC, requests)):
        assert sent.keys() == requests.keys() - ({"category", "among"} - choice.keys())
        for name, tensor in sent.items():
            np.testing.assert_array_equal(tensor, requests[name][row : row + 1])


def test_analyzer_json_says_the_same(requests, tmp_path):
    write_analyzer_json(tmp_path / "in.json", SPEC, requests)
    steps = json.loads((tmp_path / "in.json").read_text())["data"]
    assert len(steps) == 4
    assert steps[1]["user_id"] == {"content": [23], "shape": [1]}
    assert steps[0]["history"] == {"content": [9, 8, -1, -1], "shape": [4]}
    assert steps[0]["device"]["content"] == ["Łódź"]
    assert steps[0]["hour"]["content"] == [3.5]


def test_every_tensor_is_written_in_numbers_json_has(requests, tmp_path):
    write_analyzer_json(tmp_path / "in.json", SPEC, requests)
    text = (tmp_path / "in.json").read_text()
    assert "NaN" not in text
    steps = json.loads(text)["data"]
    assert all(step.keys() == requests.keys() - {"category", "among"} for step in steps)
    assert steps[1]["history"]["content"] == [FROM_STORE] * 4
    assert steps[1]["store"]["content"] == [MISSING_INT]


def test_records_are_sent_as_their_bytes(tmp_path):
    spec = STAGES["retrieve"]
    numbers = [tensor for tensor in spec.input_fields if tensor.dtype != "BYTES"]
    fields = {t.name: np.arange(np.prod(t.dims)).reshape(1, *t.dims).astype(t.numpy_dtype) for t in numbers}
    fields["category"] = np.array([["Küche".encode()]], object)
    rows = pack_records(spec.inputs, fields)
    write_analyzer_json(tmp_path / "in.json", spec, rows)
    [step] = json.loads((tmp_path / "in.json").read_text())["data"]
    assert (bytes(step["user"]["content"]), step["user"]["shape"]) == (rows["user"].tobytes(), list(spec.inputs[0].dims))
    assert step["category"] == {"content": ["Küche"], "shape": [1]}


def test_users_are_drawn_by_zipf(requests):
    drawn = draw(requests, 60_000, np.random.default_rng(0))
    share = {user: np.mean(drawn["user_id"] == user) for user in (42, 17, 23)}
    total = 1 + 1 / 2 + 1 / 3  # user 42 has most rows: rank 1; then 17 and 23
    assert share == pytest.approx({42: 1 / total, 17: 1 / 2 / total, 23: 1 / 3 / total}, abs=0.01)


def test_rows_stay_together_and_cold_users_are_unknown(requests):
    drawn = draw(requests, 5_000, np.random.default_rng(1), cold_share=0.3)
    cold = ~np.isin(drawn["user_id"], [17, 23, 42])[:, 0]
    assert cold.mean() == pytest.approx(0.3, abs=0.03)
    assert (drawn["store"][drawn["user_id"][:, 0] == 17] == 5).all()
    assert (drawn["store"][drawn["user_id"][:, 0] == 23] == MISSING_INT).all()
    again = draw(requests, 5_000, np.random.default_rng(1), cold_share=0.3)
    np.testing.assert_array_equal(again["user_id"], drawn["user_id"])


def test_a_repository_without_recorded_requests(tmp_path):
    with pytest.raises(ArtifactError, match="make export"):
        read_requests(tmp_path, 1)
