"""The server as Go, Java and curl see it: docs/calling.md writes what a real server takes, and it answers as to our client."""

from __future__ import annotations

import json
import urllib.request

import grpc
import numpy as np
import pytest
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc

from triton_recommender import Recommender

USER = 7
DTYPES = {"INT64": "<i8", "INT32": "<i4", "FP32": "<f4"}


@pytest.fixture
def stub(server):
    """Yield the stub that protoc generates from KServe's definition, with no code of ours."""
    with grpc.insecure_channel(server.grpc_url) as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


@pytest.fixture
def expected(server):
    """expected(excluded) -> the items that our own client gets."""
    with Recommender(server.grpc_url) as shop:
        yield lambda excluded: list(shop.recommend(USER, exclude=excluded).item_ids)


def padded_exclusions(stub, excluded: list[int]) -> list[int]:
    """Return as many places as the server's configuration says, as the page asks of callers."""
    config: model_config_pb2.ModelConfig = stub.ModelConfig(service_pb2.ModelConfigRequest(name="recommend")).config
    (size,) = [tensor.dims[0] for tensor in config.input if tensor.name == "exclude"]
    return excluded + [-1] * (size - len(excluded))


def ask(stub, excluded: list[int]) -> dict[str, list]:
    request = service_pb2.ModelInferRequest(model_name="recommend", id="go-1")
    places = padded_exclusions(stub, excluded)
    for name, values in (("user_id", [USER]), ("exclude", places)):
        request.inputs.add(name=name, datatype="INT64", shape=[1, len(values)]).contents.int64_contents.extend(values)
    reply = stub.ModelInfer(request, timeout=10)
    assert reply.id == "go-1"
    outputs = zip(reply.outputs, reply.raw_output_contents, strict=True)
    return {output.name: np.frombuffer(raw, DTYPES[output.datatype]).tolist() for output, raw in outputs}


def test_a_generated_stub_gets_what_our_client_gets(stub, expected):
    first = ask(stub, [])
    assert [item for item in first["item_ids"] if item != -1] == expected([])
    excluded = first["item_ids"][:2]
    second = ask(stub, excluded)
    assert [item for item in second["item_ids"] if item != -1] == expected(excluded)
    assert not set(excluded) & set(second["item_ids"])
    assert second["degraded"] == [0]


def test_curl_gets_what_our_client_gets(server, stub, expected):
    places = padded_exclusions(stub, [])
    inputs = [
        {"name": "user_id", "datatype": "INT64", "shape": [1, 1], "data": [USER]},
        {"name": "exclude", "datatype": "INT64", "shape": [1, len(places)], "data": places},
    ]
    url = f"http://{server.http_url}/v2/models/recommend/infer"
    with urllib.request.urlopen(url, json.dumps({"inputs": inputs}).encode(), timeout=10) as response:
        outputs = {output["name"]: output["data"] for output in json.load(response)["outputs"]}
    assert [item for item in outputs["item_ids"] if item != -1] == expected([])


def test_a_wrong_request_is_named_to_any_language(stub):
    request = service_pb2.ModelInferRequest(model_name="recommend")
    request.inputs.add(name="user_id", datatype="INT32", shape=[1, 1]).contents.int_contents.append(USER)
    with pytest.raises(grpc.RpcError) as refusal:
        stub.ModelInfer(request, timeout=10)
    assert refusal.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert "INT64" in refusal.value.details()
