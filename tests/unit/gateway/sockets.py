"""A gateway at a real socket of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.edge.protocol import make_http_server
from gateway.settings import GatewaySettings
from server.start.ports import find_free_port
from tests.waiting import until


@contextmanager
def listening(app: Callable, settings: GatewaySettings) -> Iterator[str]:
    port = find_free_port()
    server = make_http_server(app, settings, port)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        until(lambda: server.started)
        yield f"127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)
