"""The load generator's own gRPC calls against a server of grpcio's, whose own client says what is right."""

import contextlib
import fcntl
import resource
import socket
import threading
import time

import grpc
import pytest
from hyperframe.frame import (
    DataFrame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from perf.load import unary
from perf.load.open_loop import INFER
from perf.load.unary import FRAME_BYTES, SELECTABLE, WINDOW_BYTES, Answer, UnaryCalls, wait_until_readable
from serving.contract.errors import ConfigError, ServerError
from tests.unit.perf.grpc_server import frames_of, scripted, serving

DEADLINE_S = 5.0


class Says:
    """Answers a body with itself; what begins with a status is refused with it."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []

    def __call__(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        self.bodies.append(body)
        status, _, message = body.partition(b":")
        if status.isupper():
            context.abort(grpc.StatusCode[status.decode()], message.decode())
        return body


@contextlib.contextmanager
def calling(url, deadline_s=DEADLINE_S):
    with contextlib.closing(UnaryCalls(url, INFER, deadline_s)) as calls:
        yield calls


def all_answers(calls, bodies, first=0) -> list[Answer]:
    """Sent at once, in the order of the calls."""
    for number, body in enumerate(bodies, first):
        calls.send(number, calls.encode_call(number, body))
    return sorted(rest_of(calls))


def rest_of(calls) -> list[Answer]:
    come = []
    while calls.in_flight:
        come += calls.take_answers(DEADLINE_S)
    return come + calls.take_answers(0)


def errors_of_grpcio(url, bodies) -> list[str]:
    found = []
    with grpc.insecure_channel(url) as channel:
        for body in bodies:
            error = channel.unary_unary(INFER).future(body, timeout=DEADLINE_S).exception()
            found.append("" if error is None else f"{error.code().name}: {error.details()}")
    return found


BODIES = [b"", b"one", b"INVALID_ARGUMENT:no such user", b"two", b"UNAVAILABLE:", b"INTERNAL:100 % \xc3\xa4\nand more"]


def test_a_process_with_more_files_than_select_takes_waits_all_the_same():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * SELECTABLE)), hard))
    ours, peer = socket.socketpair()
    with ours, peer, socket.socket(fileno=fcntl.fcntl(ours.fileno(), fcntl.F_DUPFD, SELECTABLE)) as high:
        assert not wait_until_readable(high, 0.001)
        peer.send(b"x")
        assert wait_until_readable(high, 5.0)


def test_calls_end_as_those_of_grpcio_do():
    server = Says()
    with serving(server) as url, calling(url) as calls:
        begun_ns = time.perf_counter_ns()
        answers = all_answers(calls, BODIES * 40)
        assert [answer.number for answer in answers] == list(range(len(BODIES) * 40))
        assert [answer.error for answer in answers] == errors_of_grpcio(url, BODIES) * 40
        assert [answer.message for answer in answers if not answer.error] == [b"", b"one", b"two"] * 40
        assert all(begun_ns < answer.at_ns < time.perf_counter_ns() for answer in answers)
    assert sorted(server.bodies) == sorted(BODIES * 40 + BODIES)


def test_bodies_of_several_frames():
    server = Says()
    sizes = (FRAME_BYTES - 5, FRAME_BYTES, WINDOW_BYTES - 5, 3 * WINDOW_BYTES)
    bodies = [bytes([i % 251]) * size for i in range(20) for size in sizes]
    with serving(server) as url, calling(url) as calls:
        answers = all_answers(calls, bodies)
    assert [answer.error for answer in answers] == [""] * len(bodies)
    assert [answer.message for answer in answers] == bodies
    assert sorted(server.bodies) == sorted(bodies)


def test_a_body_that_the_server_does_not_take_is_refused_before_anything_is_sent():
    settings = SettingsFrame(0, settings={SettingsFrame.INITIAL_WINDOW_SIZE: 1_000}).serialize()
    with scripted(lambda peer: peer.sendall(settings)) as url, calling(url) as calls:
        calls.encode_call(0, b"x" * 995)
        with pytest.raises(ConfigError, match="1,001 bytes long; this server takes up to 1,000 of a call"):
            calls.encode_call(0, b"x" * 996)


def test_a_call_ends_at_its_deadline_and_the_next_is_answered():
    go = threading.Event()

    def slow(body, context):
        if body == b"wait":
            go.wait(10)
        return body

    with serving(slow) as url, calling(url, deadline_s=0.3) as calls:
        first, second = all_answers(calls, [b"wait", b"x"])
        assert first.error.startswith("DEADLINE_EXCEEDED")
        assert second.error == ""
        go.set()
        assert all_answers(calls, [b"x"], first=2)[0].error == ""


def test_no_call_is_cancelled_even_if_it_is_late():
    """Because that can end tritonserver 2.51: the server gets no deadline, and the connection outlives the call."""
    left = []

    def slow(body, context):
        time.sleep(0.5)
        left.append((context.is_active(), context.time_remaining() > 3_600))
        return body

    with serving(slow) as url:
        with calling(url, deadline_s=0.1) as calls:
            assert all_answers(calls, [b"x"])[0].error.startswith("DEADLINE_EXCEEDED")
            assert (calls.in_flight, calls.unanswered) == (0, 1)
        assert calls.unanswered == 0
    assert left == [(True, True)]


def test_a_call_that_nobody_answers_ends_at_its_deadline(monkeypatch):
    monkeypatch.setattr(unary, "LEFT_ALONE_S", 0.1)

    def script(peer):
        peer.sendall(SettingsFrame(0).serialize())
        list(frames_of(peer))

    with scripted(script) as url, calling(url, deadline_s=0.2) as calls:
        assert calls.send(0, calls.encode_call(0, b"x"))
        begun_s = time.monotonic()
        (answer,) = calls.take_answers(60.0)
    assert answer.error == "DEADLINE_EXCEEDED: no answer within 0.2 s"
    assert time.monotonic() < begun_s + 30  # at the call's deadline, not when whoever waits would have gone on


def test_a_server_that_ends_answers_every_call_with_an_error():
    go, begun_s = threading.Event(), time.monotonic()
    server = contextlib.ExitStack()
    with calling(server.enter_context(serving(lambda body, context: body if go.wait(10) else b""))) as calls:
        for number in range(3):
            calls.send(number, calls.encode_call(number, b"x"))
        ending = threading.Thread(target=server.close)
        ending.start()
        answers = sorted(rest_of(calls))
        go.set()
        ending.join()  # until then the server may still make room for further calls
        left = [calls.send(number, calls.encode_call(number, b"too late" * 5_000)) for number in range(3, 23)]
        answers += sorted(rest_of(calls))
    assert [answer.number for answer in answers] == list(range(23))
    assert all(answer.error for answer in answers)
    assert not left[-1]  # there is no room for more than one
    assert time.monotonic() < begun_s + DEADLINE_S  # not a deadline each


def test_pings_and_settings_are_acknowledged():
    said = []

    def script(peer):
        peer.sendall(SettingsFrame(0).serialize() + PingFrame(0, opaque_data=b"12345678").serialize())
        said.extend(frames_of(peer))

    with scripted(script) as url, calling(url) as calls:
        calls.take_answers(0.1)
    acknowledged = [frame for frame in said if "ACK" in frame.flags]
    assert [type(frame) for frame in acknowledged] == [SettingsFrame, PingFrame]
    assert acknowledged[1].opaque_data == b"12345678"


def test_no_more_is_sent_than_the_server_has_room_for(monkeypatch):
    """65,535 bytes at first: the end of the second body waits until the server has taken some of the first."""
    monkeypatch.setattr(unary, "LEFT_ALONE_S", 0.1)
    ends, taken = [], []  # streams; bytes that had come when nothing more did

    def script(peer):
        n_bytes = 0
        peer.sendall(SettingsFrame(0).serialize())
        for frame in frames_of(peer):
            if isinstance(frame, DataFrame):
                n_bytes += len(frame.data)
                ends.extend([frame.stream_id] if "END_STREAM" in frame.flags else [])
            if n_bytes and not wait_until_readable(peer, 0.2):
                taken.append(n_bytes)
                peer.sendall(WindowUpdateFrame(0, window_increment=20_000).serialize())

    with scripted(script) as url, calling(url) as calls:
        for number in range(2):
            calls.send(number, calls.encode_call(number, b"x" * 40_000))
        calls.take_answers(0.5)
    assert ends == [1, 3]
    assert 40_005 < taken[0] <= WINDOW_BYTES


@pytest.mark.parametrize(
    ("frame", "error"),
    [
        (RstStreamFrame(1, error_code=7), "UNAVAILABLE: the server ended the call (HTTP/2 error 7)"),
        (GoAwayFrame(0, last_stream_id=0, error_code=2), "UNAVAILABLE: the server ends the connection (HTTP/2 error 2)"),
        (DataFrame(1, data=b"x", flags=["END_STREAM"]), "UNKNOWN: an answer without a status"),
        (HeadersFrame(1, data=b"\xff", flags=["END_HEADERS", "END_STREAM"]), "UNAVAILABLE: what the server says is not HTTP/2"),
        (PingFrame(0, opaque_data=b"12345678"), "UNAVAILABLE: the server closed the connection"),
    ],
)
def test_calls_that_end_otherwise_are_errors(frame, error):
    def script(peer):
        peer.sendall(SettingsFrame(0).serialize())
        next(said for said in frames_of(peer) if isinstance(said, DataFrame))
        peer.sendall(frame.serialize())

    with scripted(script) as url, calling(url) as calls:
        (answer,) = all_answers(calls, [b"x"])
    assert answer.error.startswith(error)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_is_no_grpc_server_is_named(said):
    refused = pytest.raises(ServerError, match=r"does not answer in gRPC .*Is it the gRPC port")
    with scripted(lambda peer: peer.sendall(said)) as url, refused:
        UnaryCalls(url, INFER, DEADLINE_S)


def test_a_silent_server_is_given_up_after_the_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(ServerError, match="it is silent"):
        UnaryCalls(f"127.0.0.1:{silent.getsockname()[1]}", INFER, 0.2)
