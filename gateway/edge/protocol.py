"""HTTP/1.1 by uvicorn and llhttp. llhttp refuses ambiguous requests; callers whose headers are slow or too large are cut off,
and so are callers who do not read their answers, or who send many requests without waiting for answers.
What is refused here gets its error as JSON, as from the routes. Nothing here writes to the log: strangers could fill the disk.

The gateway runs on uvloop, which joins the writes of one iteration, so that an answer leaves in one packet.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
import ssl
from collections.abc import Coroutine
from functools import partial
from http import HTTPStatus
from typing import Any, cast

import httptools
import orjson
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.settings import GatewaySettings
from serving.contract.errors import ConfigError

KEEP_ALIVE_S = 30
STOP_TIMEOUT_S = 5
READ_TIMEOUT_S = 30  # for a caller to read what an answer leaves in the buffer
MOST_CONNECTIONS = 2_048
MOST_PIPELINED = 32  # requests of a connection that wait for the answers to earlier ones; each takes memory
OTHER_FILES = 256  # that a gateway has open besides: calls to servers, the live store, logs


class OpenTransport:
    """Passes everything on to a transport, but ignores what is written after its end.

    uvloop would raise an error, and uvicorn would log it, whenever a caller leaves in the middle of an answer.
    """

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class LimitedProtocol(HttpToolsProtocol):
    """Limits connections, and the bytes and the time of a request's headers. A subclass sets the limits.

    A connection beyond `most_connections` takes the place of one whose caller sends nothing. With `tls`, it counts before TLS
    has begun: callers who never begin it could keep out all others.
    """

    tls: ssl.SSLContext | None = None
    header_bytes: int
    header_timeout_s: float
    most_connections: int
    _turns = itertools.count()  # the loop's clock stands still while it accepts several connections
    _header_timer: asyncio.TimerHandle | None = None
    _waits = True  # for headers of a request, or the rest of them
    _turn = 0  # larger the later the caller last began something
    _waited_bytes = 0
    _body_left = 0  # bytes of a body that the parser leaves to `_parse`
    _read_timer: asyncio.TimerHandle | None = None
    url = b""  # uvicorn sets it when a request begins

    def connection_made(self, transport) -> None:
        super().connection_made(cast(asyncio.Transport, OpenTransport(transport)))
        self._limit_headers()
        self._turn = next(self._turns)
        if self.tls is not None:
            self._begin_tls(transport, self.tls)
        if len(self.connections) > self.most_connections:
            self._make_room()

    def _begin_tls(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        """Begin TLS before the first byte is read. A task would begin later, and the bytes would be read as HTTP."""
        late_s = self.header_timeout_s
        handshake = self.loop.start_tls(transport, self, context, server_side=True, ssl_handshake_timeout=late_s)
        handshake.send(None).add_done_callback(partial(self._end_handshake, transport, handshake))

    def _end_handshake(self, transport: asyncio.Transport, handshake: Coroutine, _: asyncio.Future) -> None:
        try:
            handshake.send(None)
        except StopIteration as end:
            if not transport.is_closing():
                super().connection_made(cast(asyncio.Transport, OpenTransport(end.value)))
                return
        except OSError:
            pass  # the caller speaks no TLS, shows no certificate, or is late or gone
        self.connection_lost(None)  # nobody else tells it before TLS has begun

    def data_received(self, data: bytes) -> None:
        # In parts, so that headers beyond the limit are not parsed or kept.
        for start in range(0, len(data), self.header_bytes):
            if self.transport.is_closing():
                return
            part = data[start : start + self.header_bytes]
            self._parse(part)
            self._waited_bytes += len(part)
            if self._waits and self._waited_bytes > 2 * self.header_bytes:  # the first part may hold the end of another request
                is_query = len(self.url) > self.header_bytes
                long, shorter = ("Path and query", "ids") if is_query else ("The headers", "ones")
                message = f"{long} have more than {self.header_bytes:,} bytes. Send fewer or shorter {shorter}."
                self._refuse(431, "HEADERS_TOO_LARGE", message)
        if self._waits and (self.cycle is None or self.cycle.response_complete):
            self._limit_headers()

    def _parse(self, data: bytes) -> None:
        """Parse bytes of requests, and refuse a request that llhttp cannot read, or that it finds ambiguous.

        llhttp takes a request with `upgrade` for the last one in HTTP/1.1, and reads no body. But Java's client and `curl
        --http2` send `upgrade: h2c` with ordinary requests, as every server may ignore it.
        """
        self._unset_keepalive_if_required()
        while data and not self.transport.is_closing():
            if self._body_left:
                body, data = data[: self._body_left], data[self._body_left :]
                self._body_left -= len(body)
                self.on_body(body)
                if not self._body_left:
                    self.on_message_complete()
                continue
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                data = data[upgrade.args[0] :]
            except httptools.HttpParserError:
                self._refuse(400, "HTTP", "Invalid HTTP request received.")

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Answer with an error in the form of every route, and end the connection."""
        body = orjson.dumps({"error": {"code": code, "message": message}})
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "content-type: application/json"]
        head = "\r\n".join([*lines, f"content-length: {len(body)}", "connection: close", "", ""])
        self.transport.write(head.encode() + body)
        self.transport.close()

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MOST_PIPELINED:
            self.transport.abort()
            raise ConnectionAbortedError  # the parser stops
        self._waits, self._waited_bytes, self._turn = False, 0, next(self._turns)
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        super().on_headers_complete()
        if self.parser.should_upgrade():
            self._body_left = int(dict(self.headers).get(b"content-length", b"0"))

    def on_message_complete(self) -> None:
        if self._body_left:
            return
        self._waits, self._waited_bytes = True, 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
        super().resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._read_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def _make_room(self) -> None:
        """Cut off the caller that sent no whole request for longest: one that never sent any, if there is one."""
        idle = [peer for peer in self.connections if isinstance(peer, LimitedProtocol) and peer.awaits_caller()]
        if idle:
            min(idle, key=lambda peer: (peer.cycle is not None, peer._turn)).transport.abort()

    def awaits_caller(self) -> bool:
        """Return whether the caller has to send or read something; False while it waits for an answer, or is being cut off."""
        if self.transport.is_closing():
            return False
        return self.flow.write_paused or not self._waits or self.cycle is None or self.cycle.response_complete

    def _limit_headers(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_timeout_s, self.transport.abort)


def make_tls_options(settings: GatewaySettings) -> dict[str, Any]:
    """Return uvicorn's options for TLS; none without a certificate."""
    if settings.certificate is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": str(settings.certificate), "ssl_keyfile": str(settings.key)}
    if settings.client_authorities is not None:
        options |= {"ssl_ca_certs": str(settings.client_authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def allow_connections() -> int:
    """Let this process open as many files as MOST_CONNECTIONS take. Return how many connections the system allows.

    Most systems start a process with a limit of 1,024. Beyond it, every new connection is reset, so that callers who send
    nothing could keep out all others.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted_files = MOST_CONNECTIONS + OTHER_FILES
    allowed = wanted_files if hard == resource.RLIM_INFINITY else min(wanted_files, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return min(MOST_CONNECTIONS, max(allowed - OTHER_FILES, allowed // 2))


def make_http_server(app, settings: GatewaySettings, port: int) -> uvicorn.Server:
    """Return a server of an ASGI app at `port`, which `serve()` starts. Raises ConfigError for files that TLS cannot use."""
    limits: dict[str, Any] = {"header_bytes": settings.header_bytes, "header_timeout_s": settings.header_timeout_s}
    limits["most_connections"] = allow_connections()
    protocol = cast(type[LimitedProtocol], type("Protocol", (LimitedProtocol,), limits))
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=port,
        http=protocol,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=STOP_TIMEOUT_S,
        proxy_headers=False,  # they would let a caller claim any address
        server_header=False,
        access_log=False,
        log_config=None,  # so that uvicorn's records go through the root logger, as ours do
        log_level="warning",
        **make_tls_options(settings),
    )
    try:
        config.load()
    except (ssl.SSLError, OSError) as error:
        files = [str(file) for file in (settings.certificate, settings.key, settings.client_authorities) if file]
        raise ConfigError(
            f"TLS cannot use {', '.join(files)}: {error}. Expected PEM, and the key of this certificate."
        ) from error
    protocol.tls, config.ssl = config.ssl, None
    return uvicorn.Server(config)


def open_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address. Raises ConfigError."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise ConfigError(
            f"The gateway cannot listen at {host}:{port}: {error.strerror}. Stop what listens there, or choose another port."
        ) from error
    return listening
