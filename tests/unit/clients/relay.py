"""A TCP relay whose connections can die as they do when a machine or network goes: nothing arrives, and none is closed."""

from __future__ import annotations

import socket
from contextlib import suppress
from threading import Thread


class Relay:
    """Passes bytes between callers and `port` of this machine. connections: how many callers connected so far"""

    def __init__(self, port: int) -> None:
        self.connections, self._silent = 0, 0
        self._target = port
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
                for source, sink in ((caller, server), (server, caller)):
                    Thread(target=self._copy, args=(source, sink, self.connections), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, number: int) -> None:
        with suppress(OSError), source, sink:  # one end closed it
            while data := source.recv(1 << 16):
                if number > self._silent:
                    sink.sendall(data)
