"""Choose and check the three ports of a server, and find out who holds a taken one."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import psutil

from serving.contract.errors import ConfigError, ServerError

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
FIRST_OPEN_PORT = 1024  # every user may listen from here on
# Free ports are chosen here. Linux gives those above 32,767 to outgoing connections, and may do so before a server takes one.
CHOSEN_FROM = range(10_000, 20_000)
CLOSING_S = 3.0  # for the kernel to close the sockets of a killed process, which it does with the last thread
POLL_S = 0.05


@dataclass(frozen=True)
class Ports:
    grpc: int = 8001
    http: int = 8000
    metrics: int = 8002

    def __post_init__(self) -> None:
        for name, port in asdict(self).items():
            if not 1 <= port <= 65535:
                raise ConfigError(f"The {name} port is {port}; expected 1 to 65535.")
        if len(set(asdict(self).values())) < 3:
            raise ConfigError(
                f"grpc, http and metrics need three different ports, got {self.grpc}, {self.http} and {self.metrics}."
            )


def find_free_ports() -> Ports:
    """Return three free ports."""
    free = _draw_free_ports()
    return Ports(next(free), next(free), next(free))


def find_free_port() -> int:
    """Return a free port."""
    return next(_draw_free_ports())


def check_free(ports: Ports) -> None:
    """Raise ServerError, with holder and remedy, when a port is taken.

    A port without a visible holder may belong to a server that was just killed, so it gets CLOSING_S to become free.
    """
    deadline_s = time.monotonic() + CLOSING_S
    while conflicts := [(name, port, _find_holder(port)) for name, port in asdict(ports).items() if not is_free(port)]:
        may_be_closing = all(port >= FIRST_OPEN_PORT and not holder for _, port, holder in conflicts)
        if not may_be_closing or time.monotonic() > deadline_s:
            break
        time.sleep(POLL_S)
    if conflicts:
        facts = [f"{name} port {port} is taken by {holder or _describe_other_holder(port)}" for name, port, holder in conflicts]
        raise ServerError(
            f"{'; '.join(facts)}. Stop what listens there (`make stop` if it was started here), "
            "or choose others: make serve GRPC_PORT=… HTTP_PORT=… METRICS_PORT=…"
        )


def check_host(host: str) -> None:
    """Raise ServerError when no server of this machine can listen at an address, which for tritonserver must be one of IPv4."""
    try:
        with socket.socket() as sock:
            sock.bind((host, 0))
    except OSError as error:
        addresses = (address for interface in psutil.net_if_addrs().values() for address in interface)
        own_addresses = sorted({address.address for address in addresses if address.family == socket.AF_INET})
        raise ServerError(
            f"No server can listen at {host} ({error.strerror or error}). Expected an IPv4 address of this machine "
            f"({', '.join(own_addresses)}) or {ANY_ADDRESS}, which is all of them."
        ) from error


def is_free(port: int) -> bool:
    """Return whether a server could listen at the port, on any address."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a listener can take a port in TIME_WAIT
        try:
            sock.bind((ANY_ADDRESS, port))
        except OSError:
            return False
        return True


def choose_reachable_host(host: str) -> str:
    """Return the host at which this machine reaches a server that listens at the address `host`."""
    return "localhost" if host in (LOOPBACK, ANY_ADDRESS) else host


def listens(port: int, host: str = "localhost") -> bool:
    """Return whether something accepts connections at the port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _draw_free_ports() -> Iterator[int]:
    """Yield free ports in a random order: several programs may choose at the same time."""
    return filter(is_free, secrets.SystemRandom().sample(CHOSEN_FROM, len(CHOSEN_FROM)))


def _find_holder(port: int) -> str:
    """Return the process that listens at the port; "" if none is visible: it is another user's, or is ending."""
    for connection in psutil.net_connections("tcp"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port and connection.pid:
            with contextlib.suppress(psutil.Error):  # gone meanwhile
                process = psutil.Process(connection.pid)
                if process.cmdline():  # a process that is ending loses the memory with its arguments first
                    return f"{process.name()} (process {connection.pid})"
    return ""


def _describe_other_holder(port: int) -> str:
    reserved = ", or reserved for root, as ports below 1024 are" if port < FIRST_OPEN_PORT else ""
    return f"a process of another user{reserved}"
