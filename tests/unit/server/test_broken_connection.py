"""Connections to a server of this machine: an order is given once more after a break, and no proxy is asked."""

import contextlib
import socket
import threading

import pytest
from tritonclient.utils import InferenceServerException

from server.generations.activation import load_models
from server.start.ports import find_free_ports
from server.status.health import is_ready, open_local_client
from tests.server.support import toys
from tests.triton_double import TritonDouble


class Forwarder:
    """Passes connections on to a port of this machine, and breaks those that are open on demand."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection(("127.0.0.1", self._to))
            self._open += near, far
            for source, sink in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=(source, sink), daemon=True).start()

    def break_connections(self) -> None:
        self._open, broken = [], self._open  # the client connects again at once
        for connection in broken:
            connection.shutdown(socket.SHUT_RDWR)


def pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):  # broken on demand
        while data := source.recv(65536):
            sink.sendall(data)


@pytest.fixture
def double(tmp_path):
    ports = find_free_ports()
    double = TritonDouble(toys.publish(tmp_path / "repo", 1), ports.grpc)
    double.forwarder = Forwarder(ports.grpc)
    yield double
    double.stop()


@pytest.mark.parametrize("n_breaks", [1, 2])
def test_a_model_is_loaded_although_the_connection_breaks_once(double, n_breaks):
    asked = []

    def break_first(model: str) -> str:
        asked.append(model)
        if len(asked) <= n_breaks:
            double.forwarder.break_connections()
        return ""

    double.before_load = break_first
    with open_local_client(f"127.0.0.1:{double.forwarder.port}") as client:
        if n_breaks == 1:
            load_models(client, "first", "second")
            assert asked == ["first", "first", "second"]
        else:
            with pytest.raises(InferenceServerException, match="Socket closed"):
                load_models(client, "first", "second")
            assert asked == ["first", "first"]


def test_a_model_that_is_refused_is_not_asked_for_again(double):
    asked: list[str] = []

    def refuse(model: str) -> str:
        asked.append(model)
        return "it does not load"

    double.before_load = refuse
    with (
        open_local_client(f"127.0.0.1:{double.forwarder.port}") as client,
        pytest.raises(InferenceServerException, match="it does not load"),
    ):
        load_models(client, "first", "second")
    assert asked == ["first"]


def test_a_server_of_this_machine_is_asked_without_a_proxy(double, monkeypatch):
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{find_free_ports().grpc}")
    assert is_ready(f"127.0.0.1:{double.forwarder.port}")
