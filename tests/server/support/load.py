"""Clients that send a server requests, by default without a pause, while a test runs."""

from __future__ import annotations

import threading
from itertools import count
from typing import Self

import tritonclient.grpc as grpcclient


class Clients:
    """Threads that run while the `with` block does. errors: what calls raised"""

    def __init__(self, clients: int) -> None:
        self.errors: list[Exception] = []
        self._clients, self._stop = clients, threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(number,)) for number in range(clients)]

    def _run(self, number: int) -> None:
        """Be one client until `_stop` is set. number: of the client, from 0"""
        raise NotImplementedError

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


class Load(Clients):
    """Clients that call `ask`, each over a connection of its own."""

    def __init__(self, grpc_url: str, clients: int) -> None:
        super().__init__(clients)
        self._grpc_url = grpc_url

    def ask(self, client: grpcclient.InferenceServerClient, turn: int) -> None:
        """Send one request. turn: its number, counted over all clients from 0, so that no two calls share one"""
        raise NotImplementedError

    def _run(self, number: int) -> None:
        with grpcclient.InferenceServerClient(self._grpc_url) as client:
            for turn in count(number, self._clients):
                if self._stop.is_set():
                    return
                try:
                    self.ask(client, turn)
                except Exception as error:
                    self.errors.append(error)
