"""The wire itself: tritonclient's gRPC clients, blocking and asyncio, behind five methods each.

Retries are gRPC's own (service config): only UNAVAILABLE, with exponential backoff and jitter, inside the call's deadline,
and throttled, so that a struggling server is not buried under its clients' second attempts.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence

import numpy as np
import tritonclient.grpc as blocking
import tritonclient.grpc.aio as asynchronous
from tritonclient.grpc import model_config_pb2
from tritonclient.utils import InferenceServerException

from clients.errors import ClientError, InvalidRequest, from_status
from clients.health import health_of, steps_of
from clients.models import Call, Health
from clients.wire import Signature
from serving.contract.tensors import ENSEMBLE

MAX_RECONNECT_BACKOFF_MS = 1_000  # gRPC's 2 minutes would outlast any restart of the server


def channel_options(url: str, retries: int) -> list[tuple[str, object]]:
    """gRPC channel arguments; retries: attempts after the first, 0 to 4 (gRPC makes five attempts at most).

    A server of this machine is asked itself, whatever proxy the environment names.
    """
    if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= 4:
        raise InvalidRequest(f"retries is {retries!r}; expected 0 to 4, the most that gRPC makes.")
    options: list[tuple[str, object]] = [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.enable_retries", int(retries > 0)),
        ("grpc.enable_http_proxy", int(not is_loopback(url))),
    ]
    if retries:
        policy = {
            "maxAttempts": retries + 1,
            "initialBackoff": "0.05s",
            "maxBackoff": "0.5s",
            "backoffMultiplier": 2,
            "retryableStatusCodes": ["UNAVAILABLE"],
        }
        service = {
            "methodConfig": [{"name": [{"service": "inference.GRPCInferenceService"}], "retryPolicy": policy}],
            "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1},
        }
        options.append(("grpc.service_config", json.dumps(service)))
    return options


class GrpcTransport:
    """Blocking. Safe to share between threads."""

    def __init__(self, url: str, retries: int = 2) -> None:
        self.url = checked_url(url)
        self._client = blocking.InferenceServerClient(url, channel_args=channel_options(url, retries))

    def signature(self, timeout_s: float) -> Signature:
        try:
            return _signature(self._client.get_model_config(ENSEMBLE, client_timeout=timeout_s).config)
        except InferenceServerException as error:
            raise _translated(error, self.url, timeout_s) from error

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        try:
            return _outputs(self._client.infer(ENSEMBLE, **_arguments(call)))
        except InferenceServerException as error:
            raise _translated(error, self.url, call.timeout_s, call) from error

    def health(self, timeout_s: float) -> Health:
        try:
            if not self._client.is_model_ready(ENSEMBLE, client_timeout=timeout_s):
                return health_of("", False, {})
            version = _only(self._client.get_model_metadata(ENSEMBLE, client_timeout=timeout_s).versions)
            steps = steps_of(self._client.get_model_config(ENSEMBLE, client_timeout=timeout_s).config)
            ready = {step: self._client.is_model_ready(*step, client_timeout=timeout_s) for step in steps}
            return health_of(str(version or ""), True, ready)
        except InferenceServerException as error:
            raise _translated(error, self.url, timeout_s) from error

    def generation(self, timeout_s: float | None) -> int | None:
        """The generation that answers; None while it is not one alone."""
        try:
            return _only(self._client.get_model_metadata(ENSEMBLE, client_timeout=timeout_s).versions)
        except InferenceServerException as error:
            raise _translated(error, self.url, timeout_s) from error

    def close(self) -> None:
        self._client.close()


class AsyncGrpcTransport:
    """asyncio. Belongs to the event loop in which it is first used."""

    def __init__(self, url: str, retries: int = 2) -> None:
        self.url = checked_url(url)
        self._client = asynchronous.InferenceServerClient(url, channel_args=channel_options(url, retries))

    async def signature_async(self, timeout_s: float) -> Signature:
        try:
            return _signature((await self._client.get_model_config(ENSEMBLE, client_timeout=timeout_s)).config)
        except InferenceServerException as error:
            raise _translated(error, self.url, timeout_s) from error

    async def infer_async(self, call: Call) -> dict[str, np.ndarray]:
        try:
            return _outputs(await self._client.infer(ENSEMBLE, **_arguments(call)))
        except InferenceServerException as error:
            raise _translated(error, self.url, call.timeout_s, call) from error

    async def health_async(self, timeout_s: float) -> Health:
        try:
            if not await self._client.is_model_ready(ENSEMBLE, client_timeout=timeout_s):
                return health_of("", False, {})
            version = _only((await self._client.get_model_metadata(ENSEMBLE, client_timeout=timeout_s)).versions)
            steps = steps_of((await self._client.get_model_config(ENSEMBLE, client_timeout=timeout_s)).config)
            ready = {step: await self._client.is_model_ready(*step, client_timeout=timeout_s) for step in steps}
            return health_of(str(version or ""), True, ready)
        except InferenceServerException as error:
            raise _translated(error, self.url, timeout_s) from error

    async def generation_async(self, timeout_s: float | None) -> int | None:
        try:
            return _only((await self._client.get_model_metadata(ENSEMBLE, client_timeout=timeout_s)).versions)
        except InferenceServerException as error:
            raise _translated(error, self.url, timeout_s) from error

    async def close_async(self) -> None:
        await self._client.close()


def is_loopback(url: str) -> bool:
    """Is host:port this machine's own, by its name or address?"""
    host = url.rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False


def checked_url(url: str) -> str:
    """host:port, or InvalidRequest."""
    host, colon, port = url.rpartition(":")
    if "/" in url or not (host and colon and port.isdigit() and 0 < int(port) < 65_536):
        raise InvalidRequest(f"url is {url!r}; expected host:port of the server's gRPC endpoint, such as localhost:8001.")
    return url


def _signature(config: model_config_pb2.ModelConfig) -> Signature:
    def described(tensors) -> dict[str, tuple[str, int]]:
        return {tensor.name: (_dtype(tensor.data_type), tensor.dims[0]) for tensor in tensors}

    return Signature.of(described(config.input), described(config.output), max(config.max_batch_size, 1))


def _dtype(data_type: int) -> str:
    """TYPE_INT64 -> INT64. Triton spells text BYTES on the wire and TYPE_STRING in a configuration."""
    name = model_config_pb2.DataType.Name(data_type).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _arguments(call: Call) -> dict:
    """Keyword arguments of tritonclient's `infer`, the same for both clients."""
    dtypes = {"i": "INT64", "f": "FP32", "O": "BYTES"}
    inputs = []
    for name, array in call.inputs.items():
        tensor = blocking.InferInput(name, list(array.shape), dtypes[array.dtype.kind])
        tensor.set_data_from_numpy(array)
        inputs.append(tensor)
    return {
        "inputs": inputs,
        "client_timeout": call.timeout_s,
        "timeout": call.queue_timeout_us,
        "priority": call.priority,
        "request_id": call.request_id,
    }


def _outputs(result: blocking.InferResult) -> dict[str, np.ndarray]:
    return {output.name: result.as_numpy(output.name) for output in result.get_response().outputs}


def _only(versions: Sequence[str]) -> int | None:
    return int(versions[0]) if len(versions) == 1 else None


def _translated(error: InferenceServerException, url: str, timeout_s: float | None, call: Call | None = None) -> ClientError:
    status = (error.status() or "UNKNOWN").removeprefix("StatusCode.")
    return from_status(status, error.message() or "", url, timeout_s, call)
