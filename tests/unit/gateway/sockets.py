"""A gateway at a real socket of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.edge.protocol import make_http_server
from gateway.settings import GatewaySettings
from server.start.ports import find_free_port


@contextmanager
def listening(app: Callable, settings: GatewaySettings) -> Iterator[str]:
    port = find_free_port()
    server = make_http_server(app, settings, port)
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline_s = time.monotonic() + 30
    while not server.started:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    yield f"127.0.0.1:{port}"
    server.should_exit = True
    thread.join(30)
