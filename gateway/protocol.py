"""HTTP/1.1 by uvicorn and h11, which refuses ambiguous requests; callers that send headers slowly are cut off."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.settings import GatewaySettings

KEEP_ALIVE_S = 30
STOP_TIMEOUT_S = 5
MOST_CONNECTIONS = 2_048


def protocol_type(header_bytes: int, header_timeout_s: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with a limit on the time that the headers of a request may take."""

    class TimedProtocol(H11Protocol):
        _header_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            transport.max_size = header_bytes  # bytes that are parsed at once: other callers wait meanwhile
            self._limit_headers()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.conn.their_state is h11.IDLE:  # a request has begun, and its headers are not complete
                self._limit_headers()
            elif self._header_timer is not None:
                self._header_timer.cancel()
                self._header_timer = None

        def connection_lost(self, exc: Exception | None) -> None:
            if self._header_timer is not None:
                self._header_timer.cancel()
            super().connection_lost(exc)

        def _limit_headers(self) -> None:
            if self._header_timer is None:
                self._header_timer = self.loop.call_later(header_timeout_s, self.transport.abort)

    return TimedProtocol


def tls_options(settings: GatewaySettings) -> dict[str, Any]:
    """Return uvicorn's options for TLS; none without a certificate."""
    if settings.certificate is None:
        return {}
    options: dict[str, Any] = {"ssl_certfile": str(settings.certificate), "ssl_keyfile": str(settings.key)}
    if settings.client_authorities is not None:
        options |= {"ssl_ca_certs": str(settings.client_authorities), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    return options


def http_server(app, settings: GatewaySettings, port: int) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            host=settings.host,
            port=port,
            http=protocol_type(settings.header_bytes, settings.header_timeout_s),
            h11_max_incomplete_event_size=settings.header_bytes,
            ws="none",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_TIMEOUT_S,
            limit_concurrency=MOST_CONNECTIONS,
            proxy_headers=False,  # anybody could claim another address by a header
            server_header=False,
            access_log=False,
            log_config=None,  # through the root logger, as our own records
            log_level="warning",
            **tls_options(settings),
        )
    )
