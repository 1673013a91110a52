"""A TCP relay whose connections can be slow, or die as they do when a machine or network goes: silent, and not closed."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from threading import Thread


class Relay:
    """Passes bytes between callers and `port` of this machine.

    connections: how many callers connected so far; delay_s: until the first bytes of the server are passed on
    """

    def __init__(self, port: int, delay_s: float = 0.0) -> None:
        self.connections, self._silent = 0, 0
        self._target, self._delay_s = port, delay_s
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"127.0.0.1:{self._listener.getsockname()[1]}"
        Thread(target=self._accept, daemon=True).start()

    def silence(self) -> None:
        """Pass on nothing more over the connections made so far. New ones work."""
        self._silent = self.connections

    def stop(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):  # stopped
            while True:
                caller, _ = self._listener.accept()
                self.connections += 1
                server = socket.create_connection(("127.0.0.1", self._target))
                for source, sink, delay_s in ((caller, server, 0.0), (server, caller, self._delay_s)):
                    Thread(target=self._copy, args=(source, sink, self.connections, delay_s), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, number: int, delay_s: float) -> None:
        with suppress(OSError), source, sink:  # one end closed it
            while data := source.recv(1 << 16):
                time.sleep(delay_s)
                delay_s = 0.0
                if number > self._silent:
                    sink.sendall(data)
