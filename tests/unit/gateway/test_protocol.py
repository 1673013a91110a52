"""HTTP at a real socket: what is ambiguous, endless or slow is refused, and what is merely long or in parts is answered."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import socket
import struct
import time
from collections.abc import Iterator
from http.client import HTTPResponse
from typing import Any

import numpy as np
import pytest

from experiments.forged import Known, forge_rest, forge_rest_write
from experiments.malformed import send_http
from gateway.edge import protocol
from gateway.settings import GatewaySettings
from serving.contract.errors import ConfigError
from tests.unit.gateway.conftest import Gateway
from tests.unit.gateway.sockets import listening

HEADER_BYTES, TIMEOUT_S = 1_024, 0.5
SILENT_S = 60.0  # far above TIMEOUT_S: the machine that runs the tests may be slow
GET = b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
LAST = GET.replace(b"host: localhost", b"host: localhost\r\nconnection: close")  # so that `send` need not wait for more


@pytest.fixture(scope="module")
def address(repo) -> Iterator[tuple[str, int]]:
    """The address of one gateway, which all of these tests share."""
    limits: dict[str, Any] = {"header_bytes": HEADER_BYTES, "header_timeout_s": TIMEOUT_S}
    with listening(Gateway(repo, **limits).app, GatewaySettings.model_validate(limits)) as address:
        host, _, port = address.partition(":")
        yield host, int(port)


def send(address: tuple[str, int], *parts: bytes, pause_s: float = 0.0) -> bytes:
    """Send parts, and return all that comes back until the gateway closes the connection or falls silent for SILENT_S."""
    answer = b""
    with socket.create_connection(address, timeout=SILENT_S) as sock, contextlib.suppress(ConnectionError, TimeoutError):
        for part in parts:
            sock.sendall(part)
            time.sleep(pause_s)
        while block := sock.recv(65_536):
            answer += block
    return answer


def read_error(answer: bytes) -> dict[str, str]:
    """Return the error of an answer; like every answer of the gateway it is JSON, as it says."""
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"content-type: application/json" in head
    return json.loads(body)["error"]


def post(body: bytes, *headers: bytes) -> bytes:
    return b"\r\n".join([b"POST /v1/events HTTP/1.1", b"host: localhost", *headers, b"", body])


@pytest.mark.parametrize(
    "request_bytes",
    [
        post(b"{}", b"content-length: 2", b"content-length: 3"),
        post(b"{}", b"content-length: 2, 2"),
        post(b"{}", b"content-length: +2"),
        post(b"{}", b"content-length: 0x2"),
        post(b"{}", b"content-length: -1"),
        post(b"{}", b"content-length: 99999999999999999999999"),
        post(b"0\r\n\r\n", b"content-length: 5", b"transfer-encoding: chunked"),
        post(b"0\r\n\r\n", b"transfer-encoding: chunked", b"content-length: 5"),
        post(b"0\r\n\r\n", b"transfer-encoding : chunked"),
        post(b"0\r\n\r\n", b"transfer-encoding: chunked, identity"),
        post(b"", b"x: a\r\n folded"),
        post(b"", b"x: a\x00b"),
        post(b"", b"x y: a"),
        post(b"", b" x: a"),
        post(b"", b": a"),
        GET.replace(b"\r\n", b"\n"),
        b"GET /healthz HTTP/1.1\rhost: localhost\r\n\r\n",
        b"GET /healthz\x00 HTTP/1.1\r\nhost: localhost\r\n\r\n",
        b"GET  /healthz HTTP/9.9\r\nhost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_what_two_parsers_could_read_in_two_ways_is_refused_and_ends_the_connection(address, request_bytes):
    answer = send(address, request_bytes + GET)
    assert answer.startswith((b"HTTP/1.1 400", b"HTTP/1.1 411")), answer
    assert answer.count(b"HTTP/1.1 ") == 1  # what follows is nobody's request
    assert b"connection: close" in answer.lower()
    assert read_error(answer)["code"] in ("HTTP", "LENGTH_REQUIRED")


@pytest.mark.parametrize("endless", [b"x: " + b"a" * 60_000, b"x: a\r\n" * 10_000, b"GET /" + b"a" * 60_000])
def test_headers_without_an_end_are_cut_off_by_their_bytes(address, endless):
    head = b"" if endless.startswith(b"GET") else b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n"
    assert send(address, head, endless)[:12] in (b"HTTP/1.1 431", b"")


@pytest.mark.parametrize("size", [HEADER_BYTES, 3 * HEADER_BYTES])
def test_headers_beyond_the_limit_are_refused(address, size):
    answer = send(address, GET.replace(b"host: localhost", b"host: localhost\r\nx: " + b"a" * size))
    assert answer.startswith(b"HTTP/1.1 431")
    message = "The headers have more than 1,024 bytes. Send fewer or shorter ones."
    assert read_error(answer) == {"code": "HEADERS_TOO_LARGE", "message": message}


def test_a_query_beyond_the_limit_is_named_as_such(address):
    answer = send(address, GET.replace(b"/healthz", b"/v1/recommendations?user=7&exclude=" + b"3," * 2 * HEADER_BYTES))
    assert answer.startswith(b"HTTP/1.1 431")
    message = "Path and query have more than 1,024 bytes. Send fewer or shorter ids."
    assert read_error(answer) == {"code": "HEADERS_TOO_LARGE", "message": message}


@pytest.mark.parametrize(
    ("parts", "answers"),
    [([b""], 0), ([b"GET /healthz HT"], 0), ([GET, b"GET /healthz HT"], 1), ([b"\r\n"], 0)],
    ids=["silent", "half a line", "half a line after a request", "an empty line"],
)
def test_headers_that_do_not_come_are_cut_off_by_time(address, parts, answers):
    begun_s = time.monotonic()
    answer = send(address, *parts, pause_s=0.05)
    assert answer.count(b"HTTP/1.1 200") == answers
    assert time.monotonic() - begun_s < SILENT_S  # `send` would wait that long for a gateway that says nothing


def test_a_long_body_and_the_next_request_in_parts_of_any_size_are_answered(address):
    body = b"[" + b" " * 20 * HEADER_BYTES + b"]"
    upload = post(body, b"content-length: %d" % len(body))
    stream = upload + GET + upload + LAST
    for size in (len(stream), 3_000, 1_000):
        parts = [stream[start : start + size] for start in range(0, len(stream), size)]
        answer = send(address, *parts)
        assert answer.count(b"HTTP/1.1 400") == 2, answer  # an empty list of events
        assert answer.count(b"HTTP/1.1 200") == 2, answer


def test_pipelined_requests_are_answered_one_after_the_other(address):
    assert send(address, GET * 19 + LAST).count(b"HTTP/1.1 200") == 20


def test_a_caller_who_sends_many_requests_and_waits_for_no_answer_is_cut_off(address):
    assert send(address, GET * 2_000).count(b"HTTP/1.1 200") < 1_000


UPGRADE = (b"connection: upgrade, http2-settings", b"upgrade: h2c", b"http2-settings: AAEAAEAAAAIAAAAA")


@pytest.mark.parametrize("size", [10_000, 40, 7])
def test_an_offer_to_speak_another_protocol_changes_nothing(address, size):
    """Java's HttpClient and `curl --http2` offer it with ordinary requests, whose bodies must not get lost."""
    body = b'{"user": 7, "item": 3, "id": "GET /healthz HTTP/1.1\\r\\nhost: localhost\\r\\n\\r\\n"}'
    offer = post(body, b"content-length: %d" % len(body), *UPGRADE)
    stream = offer + GET + GET.replace(b"host: ", b"\r\n".join([*UPGRADE, b"host: "])) + offer + LAST
    answer = send(address, *(stream[start : start + size] for start in range(0, len(stream), size)))
    assert answer.count(b"HTTP/1.1 200") == answer.count(b"HTTP/1.1 ") == 5
    assert answer.count(b'"sequence"') == 2


@pytest.mark.parametrize("offer", [UPGRADE, (b"connection: upgrade", b"upgrade: websocket")])
def test_a_body_after_an_offer_to_speak_another_protocol_is_no_request(address, offer):
    answer = send(address, post(b"", b"content-length: %d" % len(GET), *offer), GET, LAST, pause_s=0.05)
    assert answer.count(b"HTTP/1.1 400") == 1, answer
    assert answer.count(b"HTTP/1.1 200") == 1, answer


def test_a_stranger_cannot_fill_the_log(address, caplog):
    """By malformed requests, by offers to speak another protocol, or by leaving in the middle of an answer."""
    with caplog.at_level(logging.WARNING):
        send(address, b"nonsense\r\n\r\n")
        send(address, LAST.replace(b"connection: close", b"\r\n".join([*UPGRADE, b"connection: close"])))
        for _ in range(10):
            with socket.create_connection(address) as sock:
                sock.sendall(GET * 30)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # `close` resets the connection
        assert send(address, LAST).startswith(b"HTTP/1.1 200")
    assert not caplog.records


def test_nonsense_is_answered_or_refused_and_never_an_error_of_ours(gateway):
    """A slice of `python -m experiments.malformed`, which sends the like to a gateway with a tritonserver behind it."""
    settings, rng = GatewaySettings(burst=10_000), np.random.default_rng(0)
    ids, names = np.array([1, 2, 3]), ("1", "2", "3")
    known = Known(ids, ids, np.zeros(0, np.int64), ("mugs",), names, names)
    with listening(gateway().app, settings) as address:
        port = int(address.partition(":")[2])
        statuses = send_http(port, [forge_rest(known, rng) for _ in range(300)])
        writes = send_http(port, [forge_rest_write(rng) for _ in range(300)])
        assert send_http(port, [LAST]) == {"200": 1}
    assert statuses.keys() <= {"200", "400", "404", "503"}, statuses  # 503: there is no live store to explain from
    assert statuses["200"] > 10
    assert statuses["400"] > 100
    assert writes.keys() <= {"200", "207", "400"}, writes  # this server takes any column
    assert writes["400"] > 100


def test_callers_who_send_nothing_make_room_for_those_who_do(gateway, monkeypatch):
    """A connection that is idle after an answer is closed last. One that waits for an answer is never closed."""
    most = 4
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", most)
    with listening(gateway().app, GatewaySettings(header_timeout_s=SILENT_S)) as address, contextlib.ExitStack() as open_ones:
        host, _, port = address.partition(":")

        def connect() -> socket.socket:
            return open_ones.enter_context(socket.create_connection((host, int(port)), timeout=SILENT_S))

        def ask(caller: socket.socket) -> int:
            caller.sendall(GET)
            response = HTTPResponse(caller)
            response.begin()
            response.read()  # all of it, however many packets it comes in
            return response.status

        shop = connect()
        assert ask(shop) == 200
        begun = connect()
        begun.sendall(b"POST /v1/events HTTP/1.1\r\nhost: localhost\r\ncontent-length: 2\r\n\r\n{")
        silent = [connect() for _ in range(3 * most)]
        for caller in silent[: -(most - 1)]:
            with contextlib.suppress(ConnectionError):
                assert caller.recv(1) == b""
        assert ask(shop) == 200
        assert ask(connect()) == 200


def fill_answers(address: str) -> socket.socket:
    """Return the connection of a caller who has sent requests, and reads none of the answers."""
    host, _, port = address.partition(":")
    caller = socket.socket()
    caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
    caller.connect((host, int(port)))
    caller.settimeout(0.2)
    with contextlib.suppress(TimeoutError, ConnectionError):
        while True:  # until the gateway reads no more, because nothing can be written
            caller.sendall(GET.replace(b"healthz", b"console.js") * 20)
            time.sleep(0.02)  # so that no more than 32 wait
    return caller


def test_callers_who_read_no_answer_make_room_for_those_who_do(gateway, monkeypatch):
    most = 4
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", most)
    with listening(gateway().app, GatewaySettings()) as address, contextlib.ExitStack() as open_ones:
        for _ in range(most):
            open_ones.enter_context(fill_answers(address))
        host, _, port = address.partition(":")
        assert send((host, int(port)), LAST).startswith(b"HTTP/1.1 200")


def test_a_caller_who_reads_no_answer_is_cut_off_by_time(gateway, monkeypatch):
    monkeypatch.setattr(protocol, "READ_TIMEOUT_S", TIMEOUT_S)
    with listening(gateway().app, GatewaySettings()) as address, fill_answers(address) as caller:
        time.sleep(2 * TIMEOUT_S)
        caller.settimeout(protocol.KEEP_ALIVE_S / 2)  # a gateway that still waits gives the rest of the answers, and waits on
        with contextlib.suppress(ConnectionError):
            while caller.recv(65_536):
                pass


def test_more_connections_than_a_process_may_have_at_its_start_are_taken(gateway):
    """As a shell on most systems has it: the limit of open files is far below that of connections."""
    app, (soft, hard) = gateway().app, resource.getrlimit(resource.RLIMIT_NOFILE)
    n_open, n_callers = len(os.listdir("/proc/self/fd")), 256  # earlier tests leave files open
    soft_at_start = n_open + n_callers  # each caller takes two files of this process, which is also the gateway's
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft_at_start, hard))
    try:
        with listening(app, GatewaySettings(header_timeout_s=SILENT_S)) as address, contextlib.ExitStack() as silent:
            host, _, port = address.partition(":")
            for _ in range(n_callers):
                silent.enter_context(socket.create_connection((host, int(port)), timeout=SILENT_S))
            assert send((host, int(port)), LAST).startswith(b"HTTP/1.1 200")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_that_is_taken_is_told_with_what_to_do():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen at 127\.0\.0\.1:{port}: Address already in use\. Stop what"):
            protocol.open_socket("127.0.0.1", port)


def test_a_certificate_that_is_none_is_told(tmp_path):
    (tmp_path / "server.pem").write_text("no certificate")
    settings = GatewaySettings(certificate=tmp_path / "server.pem", key=tmp_path / "server.pem")
    with pytest.raises(ConfigError, match=r"TLS cannot use .*server\.pem.*: .*Expected PEM"):
        protocol.make_http_server(None, settings, 0)
