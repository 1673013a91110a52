"""Call Triton by gRPC, blocking or by asyncio, with Triton's generated stubs on channels of grpcio.

Requests are made here from the bytes of arrays, because tritonclient's own clients copy every tensor several times. Retries
are made in endpoints.py, which knows the calls that are safe to repeat.

Inferences whose time is over are left alone, not cancelled: tritonserver before 2.53 may crash when a call is cancelled that it
has just begun or answered (server issue 7368). Neither does gRPC's own timeout end them before LATE_S more.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc
from tritonclient.utils import deserialize_bytes_tensor, serialize_byte_tensor, triton_to_np_dtype

from triton_recommender.errors import make_status_error
from triton_recommender.models import Call, ModelDescription, Tls
from triton_recommender.tensors import RECOMMEND
from triton_recommender.transports import is_loopback, make_ssl_context

MAX_RECONNECT_BACKOFF_MS = 1_000  # gRPC's default of 2 minutes would outlast any restart of the server
LATE_S = 10.0  # a server that has not answered an inference so long after its time hangs: the call is cancelled
CLOSE_S = 1.0  # how long a client that closes waits for answers, because closing the channel cancels calls
LATE = "DEADLINE_EXCEEDED"
CONNECT_MS = 5_000  # for one attempt to connect: to a busy or distant server, TCP, TLS and HTTP/2 take their time
# A server whose machine or network is gone closes no connection: gRPC would send to the dead one for a quarter of an hour.
# So a call that reads nothing for KEEPALIVE_MS sends a ping, and without a reply in KEEPALIVE_TIMEOUT_MS gRPC connects again.
KEEPALIVE_MS, KEEPALIVE_TIMEOUT_MS = 10_000, 10_000
GRPC_ROOTS = "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH"  # environment variable of gRPC: a file of root certificates
DTYPES = {"i": "INT64", "f": "FP32", "O": "BYTES"}  # kind of a NumPy dtype -> Triton's dtype, for inputs


class _Grpc:
    """Base of both transports, with the options of channels and calls."""

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        self.url = url
        self._headers = lower_names(headers or {})
        self._credentials = None if tls is None else make_credentials(tls)

    def _open_channel(self, channels) -> Any:
        """Return a new channel. channels: module that opens it, grpc or grpc.aio"""
        options = make_channel_options(self.url)
        if self._credentials is None:
            return channels.insecure_channel(self.url, options=options)
        return channels.secure_channel(self.url, self._credentials, options=options)

    @contextmanager
    def _translate_errors(self, timeout_s: float | None, call: Call | None = None) -> Iterator[None]:
        """Raise errors of grpcio as errors of this package. call: the call that may fail, if it is an inference"""
        try:
            yield
        except grpc.RpcError as error:
            raise make_status_error(error.code().name, error.details() or "", self.url, timeout_s, call) from error
        except asyncio.CancelledError as error:
            if (task := asyncio.current_task()) is None or task.cancelling():
                raise
            # Nobody cancelled the caller: an asyncio channel that is closed cancels its calls.
            raise make_status_error("CANCELLED", "the channel was closed", self.url, timeout_s, call) from error

    def _make_options(self, timeout_s: float | None, headers: Mapping[str, str] | None = None) -> dict:
        """Return a call's metadata and timeout, as arguments of a stub's method."""
        return {"metadata": tuple((self._headers | lower_names(headers or {})).items()), "timeout": timeout_s}


class GrpcTransport(_Grpc):
    """Blocking transport. Safe to share between threads. url: host:port"""

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url, tls=tls, headers=headers)
        self._channel = self._open_channel(grpc)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)
        self._under_way: set[grpc.Future] = set()  # inferences; those that nobody waits for any more as well

    def describe(self, model: str, timeout_s: float) -> ModelDescription:
        with self._translate_errors(timeout_s):
            request = service_pb2.ModelConfigRequest(name=model)
            return describe_model(self._stub.ModelConfig(request, **self._make_options(timeout_s)).config)

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        options = self._make_options(add_late(call.timeout_s), call.headers)
        with self._translate_errors(call.timeout_s, call):
            answering = self._stub.ModelInfer.future(make_request(call), **options)
            self._under_way.add(answering)  # gRPC cancels a call whose future is gone
            answering.add_done_callback(self._under_way.discard)
            try:
                return decode_outputs(answering.result(call.timeout_s))
            except grpc.FutureTimeoutError:
                raise make_status_error(LATE, "", self.url, call.timeout_s, call) from None

    def is_ready(self, model: str, timeout_s: float) -> bool:
        with self._translate_errors(timeout_s):
            return self._stub.ModelReady(service_pb2.ModelReadyRequest(name=model), **self._make_options(timeout_s)).ready

    def read_generation(self, timeout_s: float | None) -> int | None:
        with self._translate_errors(timeout_s):
            request = service_pb2.ModelMetadataRequest(name=RECOMMEND)
            return pick_only_version(self._stub.ModelMetadata(request, **self._make_options(timeout_s)).versions)

    def close(self) -> None:
        end_s = time.monotonic() + CLOSE_S
        for answering in list(self._under_way):
            with suppress(grpc.FutureTimeoutError, grpc.FutureCancelledError):
                answering.exception(max(end_s - time.monotonic(), 0.0))
        self._channel.close()


class AsyncGrpcTransport(_Grpc):
    """Transport for asyncio. It belongs to the event loop in which it is first used. url: host:port"""

    _channel: grpc.aio.Channel | None = None

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url, tls=tls, headers=headers)
        self._under_way: set[asyncio.Task] = set()  # inferences; those that nobody waits for any more as well

    @cached_property
    def _stub(self) -> service_pb2_grpc.GRPCInferenceServiceStub:
        """Open the channel, which belongs to the running event loop: so not in __init__, which may run before there is one."""
        self._channel = self._open_channel(grpc.aio)
        return service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    async def describe(self, model: str, timeout_s: float) -> ModelDescription:
        with self._translate_errors(timeout_s):
            request = service_pb2.ModelConfigRequest(name=model)
            return describe_model((await self._stub.ModelConfig(request, **self._make_options(timeout_s))).config)

    async def infer(self, call: Call) -> dict[str, np.ndarray]:
        answering = asyncio.create_task(self._infer(call))
        self._under_way.add(answering)  # asyncio itself keeps no task alive
        answering.add_done_callback(self._forget)
        await asyncio.wait((answering,), timeout=call.timeout_s)
        if not answering.done():
            raise make_status_error(LATE, "", self.url, call.timeout_s, call)
        with self._translate_errors(call.timeout_s, call):
            return decode_outputs(answering.result())

    async def _infer(self, call: Call) -> service_pb2.ModelInferResponse:
        return await self._stub.ModelInfer(make_request(call), **self._make_options(add_late(call.timeout_s), call.headers))

    def _forget(self, answering: asyncio.Task) -> None:
        self._under_way.discard(answering)
        if not answering.cancelled():
            answering.exception()  # asyncio reports errors that nobody reads

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        with self._translate_errors(timeout_s):
            request = service_pb2.ModelReadyRequest(name=model)
            return (await self._stub.ModelReady(request, **self._make_options(timeout_s))).ready

    async def read_generation(self, timeout_s: float | None) -> int | None:
        with self._translate_errors(timeout_s):
            request = service_pb2.ModelMetadataRequest(name=RECOMMEND)
            return pick_only_version((await self._stub.ModelMetadata(request, **self._make_options(timeout_s))).versions)

    async def close(self) -> None:
        if self._under_way:
            await asyncio.wait(self._under_way, timeout=CLOSE_S)
        if self._channel is not None:
            await self._channel.close()


def add_late(timeout_s: float | None) -> float | None:
    """Return the seconds after which gRPC itself ends an inference. timeout_s: how long its caller waits; None for no limit"""
    return None if timeout_s is None else timeout_s + LATE_S


def make_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """Return what grpcio needs for an encrypted channel. Raises InvalidRequest for files that cannot be used."""
    context = cast(ssl.SSLContext, make_ssl_context(tls))  # refuses files that grpcio would take, only to fail in each call
    roots, *identity = (
        None if path is None else Path(path).read_bytes()
        for path in (tls.root_certificates, tls.client_key, tls.client_certificate)
    )
    if roots is None and GRPC_ROOTS not in os.environ:
        # By itself, grpcio trusts the authorities in its package, and not those of the system, where a company adds its own.
        load_folder(context)
        roots = "".join(map(ssl.DER_cert_to_PEM_cert, context.get_ca_certs(binary_form=True))).encode() or None
    return grpc.ssl_channel_credentials(roots, *identity)


def load_folder(context: ssl.SSLContext) -> None:
    """Add the authorities in the system's folder: Ubuntu's Python knows no file. OpenSSL reads them only as it needs them."""
    if folder := ssl.get_default_verify_paths().capath:
        for path in Path(folder).glob("*.[0-9]"):  # named by their hashes
            with suppress(OSError):  # OpenSSL passes over a file without a certificate, too; SSLError is an OSError
                context.load_verify_locations(path)


def make_channel_options(url: str) -> list[tuple[str, object]]:
    """Return gRPC channel arguments. Calls to a server on this machine never go through the environment's proxy."""
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", CONNECT_MS),  # gRPC's name for it; it delays no attempt after one that is refused
        ("grpc.max_reconnect_backoff_ms", MAX_RECONNECT_BACKOFF_MS),
        ("grpc.keepalive_time_ms", KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.http2.ping_timeout_ms", KEEPALIVE_TIMEOUT_MS),  # of a ping that gRPC sent for another reason
        ("grpc.enable_retries", 0),
        ("grpc.enable_http_proxy", int(not is_loopback(url))),
    ]


def describe_model(config: model_config_pb2.ModelConfig) -> ModelDescription:
    """Return the tensors and the largest batch of a model, from its config.

    Where Triton does no batching (`max_batch_size: 0`, as behind the hps backend), the dims begin with the requests, and the
    config does not say how many the stages take: then the largest batch is 1, which every stage takes.
    """

    def describe_tensors(tensors) -> dict[str, tuple[str, int]]:
        return {
            tensor.name: (to_wire_dtype(model_config_pb2.DataType.Name(tensor.data_type)), tensor.dims[-1])
            for tensor in tensors
        }

    return ModelDescription(describe_tensors(config.input), describe_tensors(config.output), max(config.max_batch_size, 1))


def to_wire_dtype(name: str) -> str:
    """Return the wire name of a dtype, INT64 for TYPE_INT64. Text is BYTES on the wire and TYPE_STRING in a configuration."""
    name = name.removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def make_request(call: Call) -> service_pb2.ModelInferRequest:
    """Return the gRPC request of a call."""
    request = service_pb2.ModelInferRequest(model_name=call.model, model_version=call.version, id=call.request_id)
    for name, array in call.inputs.items():
        dtype = DTYPES[array.dtype.kind]
        request.inputs.add(name=name, datatype=dtype, shape=array.shape)
        request.raw_input_contents.append(serialize_byte_tensor(array).item() if dtype == "BYTES" else array.tobytes())
    if call.priority:
        request.parameters["priority"].uint64_param = call.priority
    if call.queue_timeout_us is not None:
        request.parameters["timeout"].int64_param = call.queue_timeout_us
    for name, value in call.parameters.items():
        setattr(request.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    return request


def decode_outputs(response: service_pb2.ModelInferResponse) -> dict[str, np.ndarray]:
    """Return the tensors of an answer by name."""
    outputs = {}
    for output, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        is_text = output.datatype == "BYTES"
        values = deserialize_bytes_tensor(raw) if is_text else np.frombuffer(raw, triton_to_np_dtype(output.datatype))
        outputs[output.name] = values.reshape(tuple(output.shape))
    return outputs


def pick_only_version(versions: Sequence[str]) -> int | None:
    """Return the version that a model answers with; None unless it has exactly one, as while a server changes generations."""
    return int(versions[0]) if len(versions) == 1 else None


def lower_names(headers: Mapping[str, str]) -> dict[str, str]:
    """Return headers with lower-case names, as gRPC requires of metadata."""
    return {name.lower(): value for name, value in headers.items()}
