import socket
import threading

import pytest

from server.start.ports import FIRST_OPEN_PORT, Ports, check_free, check_host, find_free_ports, is_free, listens
from serving.contract.errors import ConfigError, ServerError


def test_free_ports_are_three_and_free():
    ports = find_free_ports()
    check_free(ports)
    assert len({ports.grpc, ports.http, ports.metrics}) == 3


def test_every_taken_port_is_named():
    ports = find_free_ports()
    with socket.socket() as one, socket.socket() as other:
        for sock, port in ((one, ports.grpc), (other, ports.metrics)):
            sock.bind(("0.0.0.0", port))
            sock.listen()
        with pytest.raises(
            ServerError, match=rf"grpc port {ports.grpc} is taken.*; metrics port {ports.metrics} is taken.*make stop"
        ):
            check_free(ports)
        assert not is_free(ports.grpc)
    assert is_free(ports.grpc)


def test_a_port_that_no_visible_process_holds_is_waited_for():
    """As after the end of a server, whose sockets the kernel closes a moment later."""
    ports = find_free_ports()
    sock = socket.socket()
    sock.bind(("0.0.0.0", ports.http))  # without listening, so that no process is shown as its holder
    closing = threading.Timer(0.3, sock.close)
    closing.start()
    assert not is_free(ports.http)
    check_free(ports)
    closing.join()


def test_a_port_that_only_root_may_open_is_explained(monkeypatch):
    bind = socket.socket.bind

    def bind_as_user(sock: socket.socket, address: tuple[str, int]) -> None:
        if address[1] < FIRST_OPEN_PORT:
            raise PermissionError(13, "Permission denied")
        bind(sock, address)

    monkeypatch.setattr(socket.socket, "bind", bind_as_user)
    with pytest.raises(ServerError, match="http port 2 is taken by a process of another user, or reserved for root"):
        check_free(Ports(http=2))


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_no_such_port(port):
    with pytest.raises(ConfigError, match=f"The http port is {port}; expected 1 to 65535"):
        Ports(http=port)


def test_one_port_for_two():
    with pytest.raises(ConfigError, match="three different ports, got 8001, 8001 and 8002"):
        Ports(http=8001)


def test_a_port_listens_once_somebody_accepts_there():
    ports = find_free_ports()
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", ports.metrics))
        assert not listens(ports.metrics)
        sock.listen()
        assert listens(ports.metrics)
    assert not listens(ports.metrics)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_an_address_of_this_machine_is_accepted(host):
    check_host(host)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "::1"])
def test_an_address_of_another_machine_or_of_ipv6_is_refused_with_our_own(host):
    expected = r"Expected an IPv4 address of this machine \([^:]*127\.0\.0\.1[^:]*\) or 0\.0\.0\.0"
    with pytest.raises(ServerError, match=rf"No server can listen at {host} \(.+\)\. {expected}"):
        check_host(host)
