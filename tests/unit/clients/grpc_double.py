"""Serve a fake over Triton's gRPC protocol in this process: real sockets and statuses without a tritonserver."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, triton_to_np_dtype

from triton_recommender.models import Call
from triton_recommender.tensors import RECOMMEND
from triton_recommender.testing import FakeTransport

SIZES = {"history": 4, "exclusions": 3, "items_returned": 5, "max_batch": 2, "candidates": 6}
CONTEXT = {"store": "INT64", "device": "BYTES", "basket": "FP32"}


class GrpcDouble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """A gRPC server over a FakeTransport.

    failures: statuses and messages that the next infer calls get, first to last; delay_s: added to every infer call
    describe_delay_s: added to every description of a model
    """

    def __init__(self, handler: Callable, credentials: grpc.ServerCredentials | None = None, **sizes: int) -> None:
        """sizes: instead of those of SIZES"""
        self.fake = FakeTransport(handler, context=CONTEXT, **SIZES | sizes)
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        self.missing: set[str] = set()  # models that are not served
        self.delay_s = self.describe_delay_s = 0.0
        self.ready = True
        self.parameters: list[dict] = []  # request parameters of every infer call
        self.metadata: list[dict[str, str]] = []  # headers of every infer call
        self.config_calls = 0
        self.n_ended = self.n_cancelled = 0  # infer calls that ended after delay_s, and those of them that were cancelled
        self.versions = ["2"]
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        port = (
            self._server.add_insecure_port("localhost:0")
            if credentials is None
            else self._server.add_secure_port("localhost:0", credentials)
        )
        self.url = f"localhost:{port}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def ModelConfig(self, request, context):
        self.config_calls += 1
        time.sleep(self.describe_delay_s)
        if request.name in self.missing:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        model = self.fake.models[request.name]
        config = model_config_pb2.ModelConfig(name=request.name, max_batch_size=model.max_batch)
        for tensors, described in ((model.inputs, config.input), (model.outputs, config.output)):
            for name, (dtype, length) in tensors.items():
                enum_name = "TYPE_STRING" if dtype == "BYTES" else f"TYPE_{dtype}"
                described.add(name=name, data_type=model_config_pb2.DataType.Value(enum_name), dims=[length])
        return service_pb2.ModelConfigResponse(config=config)

    def ModelInfer(self, request, context):
        self.parameters.append({name: value for name, value in request.parameters.items()})
        self.metadata.append(dict(context.invocation_metadata()))
        time.sleep(self.delay_s)
        self.n_cancelled += not context.is_active()
        self.n_ended += 1
        if self.failures:
            context.abort(*self.failures.pop(0))
        raws = request.raw_input_contents or [None] * len(request.inputs)
        inputs = {tensor.name: _array(tensor, raw) for tensor, raw in zip(request.inputs, raws, strict=True)}
        response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        for name, array in self.fake.infer(Call(inputs, model=request.model_name, version=request.model_version)).items():
            response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
            response.raw_output_contents.append(array.tobytes())
        return response

    def ModelMetadata(self, request, context):
        return service_pb2.ModelMetadataResponse(name=request.name, versions=self.versions)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=self.ready and request.name == RECOMMEND)


def _array(tensor, raw: bytes | None) -> np.ndarray:
    """Return an input tensor as an array. raw: its bytes; None where the request holds typed values."""
    if raw is None:
        contents = tensor.contents.bytes_contents if tensor.datatype == "BYTES" else tensor.contents.int64_contents
        return np.array(list(contents), triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)
    values = (
        deserialize_bytes_tensor(raw) if tensor.datatype == "BYTES" else np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
    )
    return values.reshape(tensor.shape)


def require_callers_certificate(key: Path, certificate: Path) -> grpc.ServerCredentials:
    """Return what makes a double require a certificate that `certificate` signed, such as itself (mutual TLS)."""
    pair = (key.read_bytes(), certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], root_certificates=pair[1], require_client_auth=True)
