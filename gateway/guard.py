"""The door of the gateway: what a request must be before any route sees it.

    length and time of the body ─▶ 413, 408     bearer token ─▶ 401     requests per second of one client ─▶ 429

A body is read whole before a route runs, so nothing behind the gateway ever waits for a slow caller. Bodies that are compressed
or come in chunks are refused. Headers that never end are cut off by gateway/protocol.py.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from cachetools import LRUCache
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.metrics import Metrics
from gateway.settings import GatewaySettings
from gateway.tokens import digest

OPEN_PATHS = frozenset(  # nothing of the shop's is in them
    {"/healthz", "/readyz", "/", "/console.js", "/experiment.js", "/console.css"}
)
REQUEST_ID = "x-request-id"  # header of an answer
REQUEST_ID_BYTES = REQUEST_ID.encode()
REQUEST_LEVEL = logging.WARNING  # whoever sets log_requests wants them, among what is logged anyway
log = logging.getLogger("gateway")
MOST_CLIENTS = 10_000  # whose rates are remembered
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-store"),
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
)


class Refused(Exception):
    """A request that no route sees."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers


class TokenBucket:
    """Lets a client send `burst` requests at once, and `per_s` on average."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._seen_s = float(burst), now_s

    def take(self, now_s: float) -> float:
        """Take a token -> 0, or the seconds until there is one."""
        self._tokens = min(self._tokens + (now_s - self._seen_s) * self._per_s, self._burst)
        self._seen_s = now_s
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._per_s
        self._tokens -= 1.0
        return 0.0


class Guard:
    """ASGI middleware. tokens: digest -> name; empty: everybody may ask.

    shortcuts: path -> what answers GET there, for a path that is asked so often that routing would cost too much
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: GatewaySettings,
        tokens: Mapping[str, str],
        metrics: Metrics,
        shortcuts: Mapping[str, Callable[[Scope], Awaitable[Response]]],
    ) -> None:
        self._app, self._settings, self._tokens, self._metrics = app, settings, tokens, metrics
        self._shortcuts = shortcuts
        self._buckets: LRUCache[str, TokenBucket] = LRUCache(MOST_CLIENTS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s, status, request_id = time.perf_counter(), 500, ""

        async def guarded_send(message: Message) -> None:
            nonlocal status, request_id
            if message["type"] == "http.response.start":
                status = message["status"]
                present = dict(message["headers"])
                request_id = present.get(REQUEST_ID_BYTES, b"").decode()
                message["headers"] += [pair for pair in SECURITY_HEADERS if pair[0] not in present]
            await send(message)

        try:
            body = await self._admit(scope, receive)
            if scope["method"] == "GET" and (answer := self._shortcuts.get(scope["path"])) is not None:
                response = await answer(scope)
                await response(scope, receive, guarded_send)
            else:
                await self._app(scope, _whole(body, receive), guarded_send)
        except Refused as refusal:
            content = {"error": {"code": refusal.code, "message": str(refusal)}}
            response = JSONResponse(content, refusal.status, {"connection": "close", **refusal.headers})
            await response(scope, receive, guarded_send)
        finally:
            path = scope["path"]
            route = path if path in self._shortcuts else getattr(scope.get("route"), "path", "none")
            seconds = time.perf_counter() - started_s
            self._metrics.count_request(route, status, seconds)
            if self._settings.log_requests:
                fields = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 6)}
                log.log(REQUEST_LEVEL, "request", extra={"fields": fields | ({"request_id": request_id} if request_id else {})})

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """Return the request's body. Raises Refused."""
        headers = dict(scope["headers"])
        client = self._client(scope, headers)
        now_s = time.monotonic()
        if client not in self._buckets:
            self._buckets[client] = TokenBucket(self._settings.requests_per_s, self._settings.burst, now_s)
        if wait_s := self._buckets[client].take(now_s):
            message = f"More than {self._settings.requests_per_s:g} requests/s of one client. Try again in {wait_s:.3f} s."
            raise Refused(429, "RATE_LIMITED", message, **{"retry-after": str(int(wait_s) + 1)})
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._settings.header_bytes:
            raise Refused(431, "HEADERS_TOO_LARGE", f"The headers have more than {self._settings.header_bytes:,} bytes.")
        if b"transfer-encoding" in headers:  # a body of many small chunks costs far more than its bytes
            raise Refused(411, "LENGTH_REQUIRED", "The body comes in chunks; expected it whole, with a content-length.")
        if b"content-encoding" in headers:
            raise Refused(415, "UNSUPPORTED_ENCODING", "The body is compressed; expected it as it is.")
        if b"content-length" not in headers:  # nor in chunks: it has no body
            return b""
        if int(headers[b"content-length"]) > self._settings.body_bytes:  # llhttp has seen that it is a number
            message = f"The body is larger than {self._settings.body_bytes:,} bytes. Send less at once."
            raise Refused(413, "BODY_TOO_LARGE", message)
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                return await self._read_body(receive)
        except TimeoutError:
            message = f"The body did not arrive within {self._settings.body_timeout_s:g} s. Send it at once."
            raise Refused(408, "SLOW_BODY", message) from None

    def _client(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str:
        """Return who asks: the token's name, or the address. Raises Refused."""
        address = scope["client"][0] if scope.get("client") else "unknown"
        if not self._tokens or scope["path"] in OPEN_PATHS:
            return address
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        # Looking a digest up takes a time that tells nothing about the tokens themselves.
        name = self._tokens.get(digest(token.strip())) if kind.lower() == "bearer" else None
        if name is None:
            message = (
                "No valid token. Expected the header `authorization: Bearer …`; tokens are made by `python -m gateway token`."
            )
            raise Refused(401, "UNAUTHENTICATED", message, **{"www-authenticate": "Bearer"})
        return f"token {name}"

    async def _read_body(self, receive: Receive) -> bytes:
        parts = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise Refused(400, "DISCONNECTED", "The caller went away before its body was complete.")
            parts.append(message.get("body", b""))
            if not message.get("more_body"):
                return b"".join(parts)


def _whole(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that hands over the body in one piece, and then what the server says."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_whole
