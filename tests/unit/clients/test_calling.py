"""docs/calling.md, taken at its word: its curl bodies over HTTP and as plain generated gRPC stubs, and its test vectors."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from export.settings import PipelineSettings
from tests.unit.clients.conftest import ANSWER
from tests.unit.clients.grpc_double import GrpcDouble
from tests.unit.clients.http_double import HttpDouble
from triton_recommender import Event, Query, stable_id

PAGE = (Path(__file__).parents[3] / "docs" / "calling.md").read_text(encoding="utf-8")
CALLS = dict(re.findall(r"<!-- tested: (\w+) -->\n```\ncurl -s \S+ -d '\n(.*?)'\n```", PAGE, re.DOTALL))
PATHS = dict(re.findall(r"<!-- tested: (\w+) -->\n```\ncurl -s localhost:8000(\S+)", PAGE))
CONTENTS = {"INT64": "int64_contents", "BYTES": "bytes_contents"}


EXCLUSIONS = PipelineSettings().exclusions  # of a repository with default settings


@pytest.fixture
def server() -> Iterator[GrpcDouble]:
    double = GrpcDouble(lambda query: ANSWER, exclusions=EXCLUSIONS)
    yield double
    double.stop()


@pytest.fixture
def http() -> Iterator[HttpDouble]:
    double = HttpDouble(lambda query: ANSWER, exclusions=EXCLUSIONS)
    yield double
    double.stop()


def check(fake, answers: dict[str, dict[str, list]]) -> None:
    """Check what arrived, and what came back, of all calls."""
    item_id = stable_id("22423")
    assert fake.queries == [
        Query(17850, None, [item_id, stable_id("85048")], {}),
        Query(17850, None, [], {}, category="KITCHEN"),
    ]
    assert fake.events == [Event(17850, item_id, "purchase", event_id="order-2/22423")]
    assert fake.upserts == [("item", item_id, {"price": 9.5})]
    assert answers["recommend"]["item_ids"] == [*ANSWER.item_ids, -1]
    assert answers["recommend"]["degraded"] == [int(ANSWER.degraded)]
    assert (answers["observe"]["sequence"], answers["upsert"]["sequence"]) == ([1], [2])


def test_the_page_has_all_calls():
    assert list(CALLS) == list(PATHS) == ["recommend", "category", "observe", "upsert"]


def test_the_calls_have_the_shapes_of_a_repository_with_default_settings(server):
    """Triton refuses others."""
    for name, body in CALLS.items():
        inputs = server.fake.models[PATHS[name].split("/")[3]].inputs
        for tensor in json.loads(body)["inputs"]:
            assert tensor["shape"] == [1, inputs[tensor["name"]][1]]
            assert len(tensor["data"]) == tensor["shape"][1]


def test_the_curl_calls_over_http(http):
    answers = {}
    for name, body in CALLS.items():
        with urllib.request.urlopen(http.url + PATHS[name], body.encode(), timeout=10) as response:
            answers[name] = {output["name"]: output["data"] for output in json.load(response)["outputs"]}
    check(http.fake, answers)


def test_the_same_calls_by_a_plain_generated_stub(server):
    answers = {}
    with grpc.insecure_channel(server.url) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for name, body in CALLS.items():
            request = service_pb2.ModelInferRequest(model_name=PATHS[name].split("/")[3])
            for tensor in json.loads(body)["inputs"]:
                added = request.inputs.add(name=tensor["name"], datatype=tensor["datatype"], shape=tensor["shape"])
                values = [value.encode() if isinstance(value, str) else value for value in tensor["data"]]
                getattr(added.contents, CONTENTS[tensor["datatype"]]).extend(values)
            reply = stub.ModelInfer(request, timeout=10)
            dtypes = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}
            answers[name] = {
                output.name: np.frombuffer(raw, dtypes[output.datatype]).tolist()
                for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True)
            }
    check(server.fake, answers)


def test_the_test_vectors_of_the_page():
    rows = re.findall(r"^\| `([^`]+)` \| (\d+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 8
    for text, attempt, number in rows:
        assert stable_id(text, int(attempt)) == int(number)
