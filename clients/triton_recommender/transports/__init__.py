"""Transports to one endpoint. Each of them, blocking or asyncio, has the same five methods.

    describe(model, timeout_s)  the tensors of a served model
    infer(call)                 one request
    is_ready(model, timeout_s)  whether the server says that it can answer
    read_generation(timeout_s)  which generation answers, None while the server moves between two
    close()

An address chooses the protocol: host:port and grpc:// are gRPC, grpcs:// is gRPC over TLS; http:// and https:// are HTTP.
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

import numpy as np

from triton_recommender.errors import InvalidRequest
from triton_recommender.models import Call, ModelDescription, Tls

SCHEMES = ("grpc", "grpcs", "http", "https")
# Both gRPC and HTTP accept these. A name that ends in -bin is left out: gRPC takes it only with a value of bytes.
HEADER_NAME = re.compile(r"[0-9A-Za-z_.-]+(?<!-bin)", re.ASCII | re.IGNORECASE)
HEADER_VALUE = re.compile(r"[\x20-\x7e]*")


class Transport(Protocol):
    url: str

    def describe(self, model: str, timeout_s: float) -> ModelDescription: ...

    def infer(self, call: Call) -> dict[str, np.ndarray]: ...

    def is_ready(self, model: str, timeout_s: float) -> bool: ...

    def read_generation(self, timeout_s: float | None) -> int | None: ...

    def close(self) -> None: ...


class AsyncTransport(Protocol):
    url: str

    async def describe(self, model: str, timeout_s: float) -> ModelDescription: ...

    async def infer(self, call: Call) -> dict[str, np.ndarray]: ...

    async def is_ready(self, model: str, timeout_s: float) -> bool: ...

    async def read_generation(self, timeout_s: float | None) -> int | None: ...

    async def close(self) -> None: ...


def open_transport(url: str, tls: Tls | None, headers: Mapping[str, str]) -> Transport:
    """Return a blocking transport for an address. Raises InvalidRequest. It connects with its first call."""
    check_headers(headers)
    scheme, address = split_url(url, tls)
    if scheme.startswith("grpc"):
        from triton_recommender.transports.grpc import GrpcTransport  # slow to import, and HTTP and fakes need none of it

        return GrpcTransport(address, tls=choose_tls(scheme, tls), headers=headers)
    from triton_recommender.transports.http import HttpTransport

    return HttpTransport(f"{scheme}://{address}", tls=tls, headers=headers)


def open_async_transport(url: str, tls: Tls | None, headers: Mapping[str, str]) -> AsyncTransport:
    """Return an asyncio transport for an address. Raises InvalidRequest. It connects with its first call."""
    check_headers(headers)
    scheme, address = split_url(url, tls)
    if scheme.startswith("grpc"):
        from triton_recommender.transports.grpc import AsyncGrpcTransport

        return AsyncGrpcTransport(address, tls=choose_tls(scheme, tls), headers=headers)
    from triton_recommender.transports.http import AsyncHttpTransport

    return AsyncHttpTransport(f"{scheme}://{address}", tls=tls, headers=headers)


def check_headers(headers: Mapping[str, str]) -> None:
    """Raise InvalidRequest for a header that cannot be sent."""
    for name, value in headers.items():
        if not isinstance(name, str) or not HEADER_NAME.fullmatch(name):
            expected = "expected letters, digits, '-', '_' and '.', and no -bin at its end"
            raise InvalidRequest(f"The header {name!r} has no valid name; {expected}.")
        if not isinstance(value, str) or not HEADER_VALUE.fullmatch(value):
            raise InvalidRequest(f"The header {name!r} has no valid value; expected one line of printable ASCII.")


def choose_tls(scheme: str, tls: Tls | None) -> Tls | None:
    """Return the TLS settings of a gRPC address: `tls`, or for grpcs:// without it, the settings of the system."""
    return tls or (Tls() if scheme == "grpcs" else None)


def make_ssl_context(tls: Tls | None) -> ssl.SSLContext | None:
    """Return the settings of encrypted connections, None without `tls`. Raises InvalidRequest for files that cannot be used."""
    if tls is None:
        return None
    try:
        context = ssl.create_default_context(cafile=None if tls.root_certificates is None else str(tls.root_certificates))
        if tls.client_certificate is not None:
            # password: without one, a key that needs it would be asked for at the terminal
            context.load_cert_chain(str(tls.client_certificate), str(tls.client_key), password="")
    except OSError as error:  # ssl.SSLError is one
        expected = "Expected PEM files, and the key of the certificate, without a password"
        raise InvalidRequest(f"{tls} cannot be used: {error}. {expected}.") from error
    return context


def split_url(url: str, tls: Tls | None) -> tuple[str, str]:
    """Return (scheme, host:port) of an address. Raises InvalidRequest."""
    scheme, address = url.split("://", 1) if isinstance(url, str) and "://" in url else ("grpc", url)
    if not isinstance(url, str) or scheme not in SCHEMES or not is_address(address):
        raise InvalidRequest(
            f"url is {url!r}; expected host:port of the server's gRPC endpoint, such as localhost:8001, "
            "or http://host:port of its HTTP endpoint."
        )
    if tls is not None and scheme == "http":
        raise InvalidRequest(f"url is {url!r}, which is not encrypted, but tls is set; expected https:// or no tls.")
    return scheme, address


def is_address(address: str) -> bool:
    """Return whether a text is host:port, and nothing else."""
    host, colon, port = address.rpartition(":")
    try:
        urlsplit(f"//{address}")
    except ValueError:  # brackets that hold no IPv6 address
        return False
    return "/" not in address and bool(host and colon) and port.isascii() and port.isdigit() and 0 < int(port) < 65_536


def is_loopback(address: str) -> bool:
    """Return whether host:port is on this machine, by the name localhost or a loopback address."""
    host = urlsplit(f"//{address}").hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # another name
        return False
