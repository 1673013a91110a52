"""Check every request before a route sees it, in this order:

    web page ─▶ 421, 403   rate of one client ─▶ 429   bearer token ─▶ 401   path ─▶ 400   headers ─▶ 431
    length and time of the body ─▶ 413, 408

Without tokens, any web page could use the gateway through the browser of a user of this machine. The page may send a request to
the gateway, which the browser marks as `cross-site`. Or the page lets its own host name resolve to 127.0.0.1 (DNS rebinding);
then the request carries that name. Both are refused.

A known client that asks for recommendations too often gets popular items instead of 429: a shop must never get an error page.

A body is read as a whole before a route runs, so no route ever waits for a slow caller. Bodies that are compressed (415) or
chunked (411) are refused. gateway/edge/protocol.py cuts off headers that never end.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import lru_cache
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes

from cachetools import LRUCache
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.edge.tokens import hash_token
from gateway.metrics import Metrics
from gateway.settings import GatewaySettings

OPEN_PATHS = frozenset(  # need no token, because they show no data of the shop
    {"/healthz", "/readyz", "/", "/console.js", "/experiment.js", "/console.css"}
)
PROBES = ("/healthz", "/readyz")  # have no rate limit, because a load balancer that gets 429 would take the gateway for dead
LOCALHOST = "localhost"
OTHER_SITES = (b"cross-site", b"same-site")  # values of `sec-fetch-site` for requests by pages of other origins
PLAIN = (b"identity", b"")  # values of `content-encoding` for a body that is not compressed (RFC 9110, 8.4.1)
PORT = re.compile(r":\d*$")  # of a `host` header; an IPv6 address is in brackets there
RECOMMENDATIONS = "/v1/recommendations"
REFUSAL = "refusal"  # key in the scope of a request for recommendations beyond the rate: the Refused; it gets popular items
REQUEST_ID = "x-request-id"  # header of an answer
REQUEST_ID_BYTES = REQUEST_ID.encode()
REQUEST_LEVEL = logging.WARNING  # the level of `python -m gateway`; with log_requests the lines must not be filtered out
log = logging.getLogger("gateway")
MOST_CLIENTS = 10_000  # clients whose rates are remembered
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
    """A request that is answered with an error before any route sees it."""

    def __init__(self, status: int, code: str, message: str, **headers: str) -> None:
        super().__init__(message)
        self.status, self.code, self.headers = status, code, headers

    def make_response(self) -> Response:
        """Return the error as JSON. The connection closes, because the request's body may not have been read."""
        content = {"error": {"code": self.code, "message": str(self)}}
        return JSONResponse(content, self.status, {"connection": "close", **self.headers})


class TokenBucket:
    """Allows `burst` requests at once, and `per_s` requests a second on average. Times are monotonic seconds."""

    def __init__(self, per_s: float, burst: int, now_s: float) -> None:
        self._per_s, self._burst = per_s, burst
        self._tokens, self._seen_s = float(burst), now_s

    def take(self, now_s: float) -> float:
        """Take a token and return 0, or return the seconds until there is one."""
        self._tokens = min(self._tokens + (now_s - self._seen_s) * self._per_s, self._burst)
        self._seen_s = now_s
        if self._tokens < 1.0:
            return (1.0 - self._tokens) / self._per_s
        self._tokens -= 1.0
        return 0.0


class Guard:
    """ASGI middleware that admits or refuses requests, and counts them all. tokens: digest -> name; empty lets everybody in.

    shortcuts: path -> handler of GET, for a path that is called so often that routing would cost too much
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
                await self._app(scope, _replay_body(body, receive), guarded_send)
        except Refused as refusal:
            await refusal.make_response()(scope, receive, guarded_send)
        finally:
            path = scope["path"]
            route = path if path in self._shortcuts else getattr(scope.get("route"), "path_format", "none")
            seconds = time.perf_counter() - started_s
            self._metrics.count_request(route, status, seconds)
            if self._settings.log_requests:
                fields = {"method": scope["method"], "route": route, "status": status, "seconds": round(seconds, 6)}
                log.log(REQUEST_LEVEL, "request", extra={"fields": fields | ({"request_id": request_id} if request_id else {})})

    async def _admit(self, scope: Scope, receive: Receive) -> bytes:
        """Return the request's body, b"" without one. Raises Refused."""
        headers = dict(scope["headers"])
        if scope["path"] not in PROBES:
            if not self._tokens:
                self._refuse_other_pages(scope["method"], headers)
            self._admit_client(scope, headers)
        self._check_headers(scope, headers)
        return await self._read_body(headers, receive)

    def _admit_client(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refused beyond the rate of a client, and without a token. A known client gets popular items instead of 429."""
        client = self._identify_client(scope, headers)
        refusal = self._limit_rate(client or f"without a token from {_read_address(scope)}")
        if refusal and client and scope["path"] == RECOMMENDATIONS:
            scope[REFUSAL] = refusal
        elif refusal:
            raise refusal
        if client is None:
            message = (
                "No valid token. Expected the header `authorization: Bearer …`; tokens are made by `python -m gateway token`."
            )
            raise Refused(401, "UNAUTHENTICATED", message, **{"www-authenticate": "Bearer"})

    def _check_headers(self, scope: Scope, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refused for a path that is not UTF-8, headers that are too large, or a body that is chunked or compressed.

        Also for any body at a path that needs no token.
        """
        # The server's decoder replaces bytes that are not UTF-8, which would lose the ids in them.
        if b"%" in scope["raw_path"] and scope["path"].encode() != unquote_to_bytes(scope["raw_path"]):
            raise Refused(400, "INVALID_ARGUMENT", "The path is not UTF-8; expected each id in UTF-8, percent-encoded.")
        if sum(len(name) + len(value) for name, value in scope["headers"]) > self._settings.header_bytes:
            message = f"The headers have more than {self._settings.header_bytes:,} bytes. Send fewer or shorter ones."
            raise Refused(431, "HEADERS_TOO_LARGE", message)
        if b"transfer-encoding" in headers:  # a body of many small chunks costs far more than its bytes
            raise Refused(411, "LENGTH_REQUIRED", "The body is chunked. Send it as a whole, with a content-length.")
        if any(name == b"content-encoding" and value.strip().lower() not in PLAIN for name, value in scope["headers"]):
            raise Refused(415, "UNSUPPORTED_ENCODING", "The body is compressed. Send it uncompressed.")
        # Strangers must not fill the memory with bodies. llhttp refuses a length that is not a number.
        if scope["path"] in OPEN_PATHS and int(headers.get(b"content-length", b"0")):
            raise Refused(413, "BODY_TOO_LARGE", "This path takes no body. Send none.")

    async def _read_body(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Return the body, b"" without one. Raises Refused for one that is too large, too slow, or not complete."""
        if b"content-length" not in headers:  # and it is not chunked, so there is no body
            return b""
        if int(headers[b"content-length"]) > self._settings.body_bytes:
            message = f"The body is larger than {self._settings.body_bytes:,} bytes. Send less at once."
            raise Refused(413, "BODY_TOO_LARGE", message)
        parts = []
        try:
            async with asyncio.timeout(self._settings.body_timeout_s):
                while (part := await receive())["type"] != "http.disconnect":
                    parts.append(part.get("body", b""))
                    if not part.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            message = f"The body did not arrive within {self._settings.body_timeout_s:g} s. Send it at once."
            raise Refused(408, "SLOW_BODY", message) from None
        raise Refused(400, "DISCONNECTED", "The caller went away before its body was complete.")

    def _refuse_other_pages(self, method: str, headers: Mapping[bytes, bytes]) -> None:
        """Raise Refused for a request that a web page from elsewhere may have made through somebody's browser."""
        name = PORT.sub("", headers.get(b"host", b"").decode("latin-1")).lower()
        if name and name not in (LOCALHOST, *self._settings.hosts) and not _is_address(name.strip("[]")):
            message = (
                f"The request is for the host {name!r}. Without tokens, the gateway answers only at {LOCALHOST}, at an IP "
                "address, and at the names in `hosts` of its settings. Add the name there, or set `tokens`."
            )
            raise Refused(421, "UNKNOWN_HOST", message)
        # Browsers send `sec-fetch-site` to https and to loopback only, and `origin` with every change.
        origin = headers.get(b"origin", b"").partition(b"://")[2]
        is_elsewhere = headers.get(b"sec-fetch-site", b"").lower() in OTHER_SITES or (
            b"origin" in headers and origin.lower() != headers.get(b"host", b"").lower()
        )
        if method != "GET" and is_elsewhere:
            message = (
                "A web page from elsewhere makes this request. Without tokens, the gateway takes changes from its own page and "
                "from programs only. Set `tokens`, and send the request from a server."
            )
            raise Refused(403, "OTHER_SITE", message)

    def _limit_rate(self, client: str) -> Refused | None:
        """Count a request of a client. Return the refusal if the client sends too many, otherwise None."""
        now_s = time.monotonic()
        if client not in self._buckets:
            self._buckets[client] = TokenBucket(self._settings.requests_per_s, self._settings.burst, now_s)
        if wait_s := self._buckets[client].take(now_s):
            message = f"More than {self._settings.requests_per_s:g} requests/s from one client. Try again in {wait_s:.3f} s."
            return Refused(429, "RATE_LIMITED", message, **{"retry-after": str(int(wait_s) + 1)})
        return None

    def _identify_client(self, scope: Scope, headers: Mapping[bytes, bytes]) -> str | None:
        """Return the caller whose rate is limited: the token's name, or the address; None if a valid token is missing."""
        if not self._tokens or scope["path"] in OPEN_PATHS:
            return _read_address(scope)
        kind, _, token = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        # Digests are compared instead of tokens, so that the time of a look-up reveals nothing about a token.
        name = self._tokens.get(hash_token(token.strip())) if kind.lower() == "bearer" else None
        return None if name is None else f"token {name}"


def _read_address(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else "unknown"


@lru_cache(MOST_CLIENTS)
def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def _replay_body(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` for the route: it gives the whole body in one message, then what the server's `receive` gives."""
    waiting = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_whole() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_whole
