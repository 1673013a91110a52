"""Call a server over HTTP (KServe v2 with Triton's binary tensors): with urllib3, or with aiohttp for asyncio.

tritonclient encodes and decodes the bodies. Its own HTTP client is tied to one thread; urllib3's connections are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import aiohttp
import numpy as np
import tritonclient.http as codec
import urllib3
from tritonclient.utils import InferenceServerException

from triton_recommender.errors import make_status_error
from triton_recommender.models import Call, ModelDescription, Tls
from triton_recommender.tensors import RECOMMEND
from triton_recommender.transports import make_ssl_context
from triton_recommender.transports.grpc import DTYPES, pick_only_version, to_wire_dtype

T = TypeVar("T")
LENGTH = "Inference-Header-Content-Length"
POOL_SIZE = 64  # connections that urllib3 keeps open; the most that aiohttp opens
STATUSES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    408: "DEADLINE_EXCEEDED",
    429: "RESOURCE_EXHAUSTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}


class _Http:
    """Base of both transports: it encodes requests, and translates errors."""

    def __init__(self, url: str, headers: Mapping[str, str] | None) -> None:
        self.url = url
        self._headers = dict(headers or {})

    @contextmanager
    def _translate_errors(self, timeout_s: float | None, call: Call | None = None) -> Iterator[None]:
        """Turn the libraries' exceptions into errors of this package."""
        try:
            yield
        except (urllib3.exceptions.TimeoutError, TimeoutError) as error:
            if isinstance(error, urllib3.exceptions.ConnectTimeoutError):
                has_reason = isinstance(error, urllib3.exceptions.NewConnectionError)  # refused, or an unknown host
                reason = str(error) if has_reason else "no connection in time"
                raise make_status_error("UNAVAILABLE", reason, self.url, timeout_s, call) from error
            raise make_status_error("DEADLINE_EXCEEDED", "", self.url, timeout_s, call) from error
        except (urllib3.exceptions.HTTPError, aiohttp.ClientError, OSError) as error:
            raise make_status_error("UNAVAILABLE", str(error), self.url, timeout_s, call) from error
        except InferenceServerException as error:  # the body is not of this protocol
            raise make_status_error("INTERNAL", error.message() or "", self.url, timeout_s, call) from error

    def _check_status(self, status: int, body: bytes, timeout_s: float | None, call: Call | None = None) -> bytes:
        """Return the body of an answer with status 200. Raises the error of any other status."""
        if status == 200:
            return body
        raise make_status_error(STATUSES.get(status, "INTERNAL"), _read_error(body), self.url, timeout_s, call)

    def _encode(self, call: Call) -> tuple[bytes, dict[str, str]]:
        body, header_length = codec.InferenceServerClient.generate_request_body(
            encode_inputs(call),
            request_id=call.request_id,
            priority=call.priority,
            timeout=call.queue_timeout_us,
            parameters=call.parameters or None,
        )
        headers = {**self._headers, **call.headers, "Content-Type": "application/octet-stream"}
        if header_length is not None:
            headers[LENGTH] = str(header_length)
        return body, headers


class HttpTransport(_Http):
    """Blocking transport. Threads and forked processes may share it. url: http://host:port or https://host:port."""

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url, headers)
        self._ssl = make_ssl_context(tls)
        self._connect()

    def describe(self, model: str, timeout_s: float) -> ModelDescription:
        return self._get(f"v2/models/{model}/config", timeout_s, describe_model)

    def infer(self, call: Call) -> dict[str, np.ndarray]:
        body, headers = self._encode(call)
        with self._translate_errors(call.timeout_s, call):
            url = f"{self.url}/{make_path(call)}"
            response = self._request("POST", url, call.timeout_s, headers, body)
            return decode_outputs(
                self._check_status(response.status, response.data, call.timeout_s, call), response.headers.get(LENGTH)
            )

    def is_ready(self, model: str, timeout_s: float) -> bool:
        with self._translate_errors(timeout_s):
            url = f"{self.url}/v2/models/{model}/ready"
            return self._request("GET", url, timeout_s, self._headers).status == 200

    def read_generation(self, timeout_s: float | None) -> int | None:
        return self._get(f"v2/models/{RECOMMEND}", timeout_s, read_generation)

    def close(self) -> None:
        self._pool.clear()

    def _connect(self) -> None:
        self._pool = urllib3.PoolManager(maxsize=POOL_SIZE, ssl_context=self._ssl, retries=False)
        self._process = os.getpid()

    def _request(
        self, method: str, url: str, timeout_s: float | None, headers: Mapping[str, str], body: bytes | None = None
    ) -> urllib3.BaseHTTPResponse:
        if self._process != os.getpid():  # forked: on connections of the parent, requests of both would be mixed
            self._connect()
        return self._pool.request(method, url, body=body, headers=headers, timeout=urllib3.Timeout(total=timeout_s))

    def _get(self, path: str, timeout_s: float | None, read: Callable[[Any], T]) -> T:
        with self._translate_errors(timeout_s):
            response = self._request("GET", f"{self.url}/{path}", timeout_s, self._headers)
            return _parse_json(self._check_status(response.status, response.data, timeout_s), read)


class AsyncHttpTransport(_Http):
    """Transport for asyncio. Belongs to the event loop in which it is first used. url: http://host:port or https://host:port."""

    def __init__(self, url: str, *, tls: Tls | None = None, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(url, headers)
        self._ssl = make_ssl_context(tls) or True  # True: the authorities that the system trusts
        self._session: aiohttp.ClientSession | None = None

    async def describe(self, model: str, timeout_s: float) -> ModelDescription:
        return await self._get(f"v2/models/{model}/config", timeout_s, describe_model)

    async def infer(self, call: Call) -> dict[str, np.ndarray]:
        body, headers = self._encode(call)
        with self._translate_errors(call.timeout_s, call):
            async with self._ask("POST", make_path(call), call.timeout_s, data=body, headers=headers) as response:
                data = self._check_status(response.status, await response.read(), call.timeout_s, call)
                return decode_outputs(data, response.headers.get(LENGTH))

    async def is_ready(self, model: str, timeout_s: float) -> bool:
        with self._translate_errors(timeout_s):
            async with self._ask("GET", f"v2/models/{model}/ready", timeout_s, headers=self._headers) as response:
                return response.status == 200

    async def read_generation(self, timeout_s: float | None) -> int | None:
        return await self._get(f"v2/models/{RECOMMEND}", timeout_s, read_generation)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _get(self, path: str, timeout_s: float | None, read: Callable[[Any], T]) -> T:
        with self._translate_errors(timeout_s):
            async with self._ask("GET", path, timeout_s, headers=self._headers) as response:
                return _parse_json(self._check_status(response.status, await response.read(), timeout_s), read)

    def _ask(self, method: str, path: str, timeout_s: float | None, **options):
        if self._session is None:  # not in __init__: a session needs a running event loop
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=POOL_SIZE, ssl=self._ssl))
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        return self._session.request(method, f"{self.url}/{path}", timeout=timeout, **options)


def make_path(call: Call) -> str:
    """Return the path of a call's model, with the version if the call names one."""
    version = f"/versions/{call.version}" if call.version else ""
    return f"v2/models/{call.model}{version}/infer"


def describe_model(config: Mapping[str, Any]) -> ModelDescription:
    """Return the tensors and the largest batch of a model, from its config as JSON: see transports/grpc.py."""

    def describe_tensors(tensors: list[Mapping[str, Any]]) -> dict[str, tuple[str, int]]:
        return {tensor["name"]: (to_wire_dtype(tensor["data_type"]), int(tensor["dims"][-1])) for tensor in tensors}

    return ModelDescription(
        describe_tensors(config["input"]), describe_tensors(config["output"]), max(int(config["max_batch_size"]), 1)
    )


def encode_inputs(call: Call) -> list[codec.InferInput]:
    """Return the tensors of a call as tritonclient writes them."""
    tensors = [
        (codec.InferInput(name, list(array.shape), DTYPES[array.dtype.kind]), array) for name, array in call.inputs.items()
    ]
    return [tensor.set_data_from_numpy(array) for tensor, array in tensors]


def read_generation(metadata: Mapping[str, Any]) -> int | None:
    """Return the version that a model answers with, from its metadata as JSON; None while it has several."""
    return pick_only_version(metadata["versions"])


def decode_outputs(body: bytes, header_length: str | None) -> dict[str, np.ndarray]:
    """Return the tensors of an answer. Raises InferenceServerException.

    header_length: bytes of the JSON before binary tensors, as the response header states them; None without binary tensors
    """
    with _refuse_foreign():
        result = codec.InferenceServerClient.parse_response_body(
            body, header_length=None if header_length is None else int(header_length)
        )
        return {output["name"]: result.as_numpy(output["name"]) for output in result.get_response()["outputs"]}


def _parse_json(body: bytes, read: Callable[[Any], T]) -> T:
    """Parse a body as JSON, and return the result of `read` on it. Raises InferenceServerException."""
    with _refuse_foreign():
        return read(json.loads(body))


@contextmanager
def _refuse_foreign() -> Iterator[None]:
    """Raise InferenceServerException for an answer that is not of this protocol: another program may listen at this address."""
    try:
        yield
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise InferenceServerException(f"the answer is not JSON of this protocol: {error!r}") from error


def _read_error(body: bytes) -> str:
    """Return the message in Triton's {"error": …}, or the body itself."""
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
