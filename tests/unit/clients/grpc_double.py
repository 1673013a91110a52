"""Triton's gRPC protocol over a FakeTransport, in this process: real sockets and real statuses without a tritonserver."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent import futures

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, triton_to_np_dtype

from clients.fake import FakeTransport
from clients.models import Call
from serving.contract.tensors import ENSEMBLE, Axes, ContextColumn, ensemble_spec, stage_specs

AXES = Axes(history=4, exclusions=3, items_returned=5)
CONTEXT = (ContextColumn("store", "integer"), ContextColumn("device", "string"), ContextColumn("basket", "continuous"))


class GrpcDouble(service_pb2_grpc.GRPCInferenceServiceServicer):
    """`failures`: statuses and words to answer the next infer calls with, oldest first. `delay_s` slows every infer."""

    def __init__(self, handler: Callable) -> None:
        self.fake = FakeTransport(handler, axes=AXES, context=CONTEXT)
        self.failures: list[tuple[grpc.StatusCode, str]] = []
        self.model = ENSEMBLE
        self.delay_s = 0.0
        self.ready = True
        self.unready: set[str] = set()  # steps that are not
        self.parameters: list[dict] = []  # request parameters of every infer call
        self.config_calls = 0
        self.versions = ["2"]
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"localhost:{self._server.add_insecure_port('localhost:0')}"
        self._server.start()

    def stop(self) -> None:
        self._server.stop(0).wait()

    def ModelConfig(self, request, context):
        self.config_calls += 1
        if self.model != request.name:
            context.abort(grpc.StatusCode.NOT_FOUND, f"Request for unknown model: '{request.name}' is not found")
        spec = ensemble_spec(stage_specs(AXES, CONTEXT))
        config = model_config_pb2.ModelConfig(name=request.name, max_batch_size=2)
        for tensors, described in ((spec.inputs, config.input), (spec.outputs, config.output)):
            for tensor in tensors:
                name = "TYPE_STRING" if tensor.dtype == "BYTES" else f"TYPE_{tensor.dtype}"
                described.add(name=tensor.name, data_type=model_config_pb2.DataType.Value(name), dims=tensor.dims)
        config.ensemble_scheduling.step.add(model_name="rank", model_version=2)
        return service_pb2.ModelConfigResponse(config=config)

    def ModelInfer(self, request, context):
        self.parameters.append({name: value for name, value in request.parameters.items()})
        time.sleep(self.delay_s)
        if self.failures:
            context.abort(*self.failures.pop(0))
        inputs = {
            tensor.name: _array(tensor, raw) for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True)
        }
        response = service_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        for name, array in self.fake.infer(Call(inputs)).items():
            response.outputs.add(name=name, datatype=np_to_triton_dtype(array.dtype), shape=array.shape)
            response.raw_output_contents.append(array.tobytes())
        return response

    def ModelMetadata(self, request, context):
        return service_pb2.ModelMetadataResponse(name=request.name, versions=self.versions)

    def ModelReady(self, request, context):
        return service_pb2.ModelReadyResponse(ready=self.ready and request.name not in self.unready)


def _array(tensor, raw: bytes) -> np.ndarray:
    values = (
        deserialize_bytes_tensor(raw) if tensor.datatype == "BYTES" else np.frombuffer(raw, triton_to_np_dtype(tensor.datatype))
    )
    return values.reshape(tensor.shape)
