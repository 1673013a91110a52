"""gRPC: tritonclient's clients, blocking and asyncio. Retries are made in endpoints.py, where it is known what is safe."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as asynchronous
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from triton_recommender.errors import from_status
from triton_recommender.models import Call, ModelDescription, Tls
from triton_recommender.tensors import RECOMMEND
from triton_recommender.transports import is_loopback

MAX_RECONNECT_BACKOFF_MS = 1_000  # gRPC's 2 minutes would outlast any restart of the server


class _Grpc:
    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None, client) -> None:
        self.url = url
        self._headers = lower_names(headers or {})
        files = {}
        if tls is not None:
            names = {
                "root_certificates": "root_certificates",
                "private_key": "client_key",
                "certificate_chain": "client_certificate",
            }
            files = {name: str(path) for name, field in names.items() if (path := getattr(tls, field)) is not None}
        self._client = client(url, ssl=tls is not None, channel_args=channel_options(url), **files)

    @contextmanager
    def _translated(self, timeout_s: float | None, call: Call | None = None) -> Iterator[None]:
        """Turn what tritonclient raises into errors of this package."""
        try:
            yield
        except InferenceServerException as error:
            status = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
            raise from_status(status, error.message() or "", self.url, timeout_s, call) from error

    def _asked(self, timeout_s: float | None) -> dict:
        return {"headers": self._headers, "client_timeout": timeout_s}


class GrpcTransport(_Grpc):
    """Blocking. Safe to share between threads. url: host:port."""

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url, tls=tls, headers=headers, client=blocking.InferenceServerClient)

    def describe(self, model: str, timeout_s: float) -> ModelDescription:
        with self._translated(timeout_s):
            return describe_model(self._client.get_model_config(model, **self._asked(timeout_s)).config)

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        with self._translated(call.timeout_s, call):
            return outputs_of(self._client.infer(**infer_arguments(call, self._headers)))

    def is_ready(self, model: str, timeout_s: float) -> bool:
        with self._translated(timeout_s):
            return self._client.is_model_ready(model, **self._asked(timeout_s))

    def generation(self, timeout_s: float | None) -> int | None:
        with self._translated(timeout_s):
            return only_version(self._client.get_model_metadata(RECOMMEND, **self._asked(timeout_s)).versions)

    def close(self) -> None:
        self._client.close()


class AsyncGrpcTransport(_Grpc):
    """asyncio. Belongs to the event loop in which it is first used. url: host:port."""

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url, tls=tls, headers=headers, client=asynchronous.InferenceServerClient)

    async def describe(self, model: str, timeout_s: float) -> ModelDescription:
        with self._translated(timeout_s):
            return describe_model((await self._client.get_model_config(model, **self._asked(timeout_s))).config)

    async def infer(self, call: Call) -> dict[str, np.ndarray]:
        with self._translated(call.timeout_s, call):
            return outputs_of(await self._client.infer(**infer_arguments(call, self._headers)))

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        with self._translated(timeout_s):
            return await self._client.is_model_ready(model, **self._asked(timeout_s))

    async def generation(self, timeout_s: float | None) -> int | None:
        with self._translated(timeout_s):
            return only_version((await self._client.get_model_metadata(RECOMMEND, **self._asked(timeout_s))).versions)

    async def close(self) -> None:
        await self._client.close()


def channel_options(url: str) -> list[tuple[str, object]]:
    """Return gRPC channel arguments. A server of this machine is asked directly, whatever proxy the environment names."""
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", int(not is_loopback(url))),
    ]


def describe_model(config: model_config_pb2.ModelConfig) -> ModelDescription:
    def described(tensors) -> dict[str, tuple[str, int]]:
        return {
            tensor.name: (wire_dtype(model_config_pb2.DataType.Name(tensor.data_type)), tensor.dims[0]) for tensor in tensors
        }

    return ModelDescription(described(config.input), described(config.output), max(config.max_batch_size, 1))


def wire_dtype(name: str) -> str:
    """Return the wire name of a dtype, INT64 for TYPE_INT64. Text is BYTES on the wire and TYPE_STRING in a configuration."""
    name = name.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def infer_arguments(call: Call, headers: Mapping[str, str]) -> dict:
    """Return the arguments of tritonclient's `infer`, the same for both clients."""
    return {
        "model_name": call.model,
        "inputs": infer_inputs(call, blocking.InferInput),
        "client_timeout": call.timeout_s,
        "timeout": call.queue_timeout_us,
        "priority": call.priority,
        "request_id": call.request_id,
        "parameters": call.parameters,
        "headers": {**headers, **lower_names(call.headers)},
    }


def infer_inputs(call: Call, infer_input) -> list:
    """Build input tensors. infer_input: tritonclient's class for a tensor, of gRPC or of HTTP."""
    dtypes = {"i": "INT64", "f": "FP32", "O": "BYTES"}
    inputs = []
    for name, array in call.inputs.items():
        tensor = infer_input(name, list(array.shape), dtypes[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return inputs


def outputs_of(result: blocking.InferResult) -> dict[str, np.ndarray]:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def only_version(versions: Sequence[str]) -> int | None:
    """Return the version a model answers with; None while it has several, in the middle of a move."""
    return int(versions[0]) if len(versions) == 1 else None


def lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers with lower-case names, as gRPC requires of metadata."""
    return {name.lower(): value for name, value in headers.items()}
