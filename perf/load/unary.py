"""Make unary gRPC calls at little cost, many in flight on one connection, to load a server on this machine.

    request ─▶ frames, made before the clock starts ─▶ one write        one read ─▶ frames ─▶ answered calls and their status

A call by grpcio's futures costs as much processor time as tritonserver spends on it, which the server then lacks
(docs/perf.md). So this implements the part of HTTP/2 (RFC 9113) that such calls need. hyperframe makes and reads its control
frames, hpack its header blocks. Neither end uses a header table that changes between calls (RFC 7541), so equal blocks have
equal meaning, and each is decoded once. Answers are kept without parsing them. Limits of calls in flight and of header tables,
padding, priorities and a graceful end of the connection are not supported, because gRPC servers do not use them. A connection
accepts 2 GiB of answers.

No call is cancelled, because that can crash tritonserver 2.51 (docs/serving.md): the server learns of no deadline, and the
connection stays open until it has answered late calls as well.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import NamedTuple
from urllib.parse import unquote

import grpc
from hpack import Decoder, Encoder, HPACKError
from hyperframe.exceptions import HyperframeError
from hyperframe.frame import (
    DataFrame,
    Frame,
    GoAwayFrame,
    HeadersFrame,
    PingFrame,
    RstStreamFrame,
    SettingsFrame,
    WindowUpdateFrame,
)

from serving.contract.errors import ConfigError, ServerError

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
FRAME_HEADER = struct.Struct(">BHBBL")  # length (its upper 8 bits, its lower 16), type, flags, stream
END_STREAM, END_HEADERS = 0x1, 0x4
WINDOW_BYTES, MOST_WINDOW_BYTES = 65_535, 2**31 - 1  # flow-control window: initial, and largest
FRAME_BYTES, MOST_FRAME_BYTES = 16_384, 2**24 - 1  # longest frame: initial, and largest
READ_BYTES = 1 << 18
SELECTABLE = 1_024  # file numbers below it, which `select` takes; `poll` takes all, but rounds a wait up to milliseconds
LEFT_ALONE_S = 10.0  # how long the end of a connection waits for calls that the server has not answered
PREFIX_BYTES = 5  # gRPC's, of a message: compressed or not (never: we do not offer it), and its length
STATUS = {str(code.value[0]): code.name for code in grpc.StatusCode}
OUR_SETTINGS = {
    SettingsFrame.HEADER_TABLE_SIZE: 0,
    SettingsFrame.ENABLE_PUSH: 0,
    SettingsFrame.INITIAL_WINDOW_SIZE: MOST_WINDOW_BYTES,
    SettingsFrame.MAX_FRAME_SIZE: MOST_FRAME_BYTES,  # so that no header block of an answer is split
}


class Part(NamedTuple):
    """Frames of a request that are written at once. body_bytes: those that count against the other end's window."""

    frames: bytes
    body_bytes: int


class Answer(NamedTuple):
    """An answered call.

    number: of the call; at_ns: when it was read (`time.perf_counter_ns`); error: "", or gRPC's status and text;
    message: the answer, b"" with an error
    """

    number: int
    at_ns: int
    error: str
    message: bytes


def wait_until_readable(connection: socket.socket, timeout_s: float) -> bool:
    """Wait until there is something to read, at most timeout_s. Return whether there is."""
    if connection.fileno() < SELECTABLE:
        return bool(select.select([connection], [], [], timeout_s)[0])
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(1_000 * timeout_s))


class UnaryCalls:
    """Calls of one method of the server at `url`, numbered 0, 1, 2, … and sent in this order. For one thread.

    path: "/package.Service/Method"; deadline_s: after which a call counts as unanswered. When the connection is lost, all
    calls get an error. Raises ServerError when no gRPC server answers.
    """

    def __init__(self, url: str, path: str, deadline_s: float) -> None:
        self._url, self._deadline_ns = url, int(deadline_s * 1e9)
        self._window_bytes, self._call_window_bytes = WINDOW_BYTES, WINDOW_BYTES  # for the connection, and for each call
        self._unread, self._failure, self._has_settings = b"", "", False
        self._sent_ns: dict[int, int] = {}  # by number: the calls in flight, the oldest first
        self._late: set[int] = set()  # calls past their deadline, which the server may still answer
        self._bodies: dict[int, bytes] = {}  # by number: the part of an answer that has arrived, with gRPC's prefix
        self._answers: list[Answer] = []
        self._errors: dict[bytes, str] = {}  # by header block
        encoder, headers = Encoder(), make_headers(url, path)
        self._first_block = encoder.encode(headers)
        self._block = encoder.encode(headers)  # refers to the entries that the first one made
        self._socket = self._connect(deadline_s)
        self._await_settings(deadline_s)

    def close(self) -> None:
        """Close the connection once the server has answered every call, or after LEFT_ALONE_S."""
        end_s = time.monotonic() + LEFT_ALONE_S
        while self.unanswered and (left_s := end_s - time.monotonic()) > 0:
            self._read(left_s)
        self._socket.close()

    @property
    def in_flight(self) -> int:
        """The number of calls that wait for an answer or their deadline."""
        return len(self._sent_ns)

    @property
    def unanswered(self) -> int:
        """The number of calls that the server has not answered: those in flight and late ones."""
        return len(self._sent_ns) + (0 if self._failure else len(self._late))

    def encode_call(self, number: int, message: bytes) -> list[Part]:
        """Return the frames of a call, usually one. Raises ConfigError for a message longer than the server accepts."""
        body = b"\0" + len(message).to_bytes(4, "big") + message  # 0: not compressed
        if len(body) > self._call_window_bytes:
            limit = f"this server takes up to {self._call_window_bytes:,} of a call"
            raise ConfigError(f"A request is {len(body):,} bytes long; {limit}.")
        stream = 2 * number + 1
        head = HeadersFrame(stream, data=self._block if number else self._first_block, flags=["END_HEADERS"]).serialize()
        frames = [DataFrame(stream, data=body[start : start + FRAME_BYTES]) for start in range(0, len(body), FRAME_BYTES)]
        frames[-1].flags.add("END_STREAM")
        parts = [Part(frame.serialize(), len(frame.data)) for frame in frames]
        return [Part(head + parts[0].frames, parts[0].body_bytes), *parts[1:]]

    def send(self, number: int, parts: list[Part]) -> bool:
        """Send a call, waiting for flow control. Return whether it was sent; otherwise its answer is an error."""
        self._sent_ns[number] = time.perf_counter_ns()
        is_sent = all(self._write(number, part) for part in parts)
        self._fail_overdue()
        if not is_sent:
            self._late.discard(number)  # the server has no whole request to answer
        return is_sent

    def _write(self, number: int, part: Part) -> bool:
        """Write a part once the server's window has room for it. Return whether it was written."""
        while self._window_bytes < part.body_bytes and not self._failure and number in self._sent_ns:
            self._read(self._deadline_ns / 1e9)
        if self._failure or number not in self._sent_ns:
            return False
        self._window_bytes -= part.body_bytes
        try:
            self._socket.sendall(part.frames)
        except OSError as error:
            self._failure = f"UNAVAILABLE: {error}"
        return not self._failure

    def take_answers(self, timeout_s: float) -> list[Answer]:
        """Return the answers that have arrived. Wait for the first one for at most `timeout_s`."""
        self._read(0.0 if self._answers else timeout_s)
        answers, self._answers = self._answers, []
        return answers

    def _connect(self, deadline_s: float) -> socket.socket:
        host, _, port = self._url.rpartition(":")
        window = WindowUpdateFrame(0, window_increment=MOST_WINDOW_BYTES - WINDOW_BYTES)
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=deadline_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.sendall(PREFACE + SettingsFrame(0, settings=OUR_SETTINGS).serialize() + window.serialize())
        except OSError as error:
            raise ServerError(f"The server at {self._url} does not answer ({error}). Start it with `make serve`.") from error
        return connection

    def _await_settings(self, deadline_s: float) -> None:
        """Read the server's settings, with which every HTTP/2 connection begins."""
        end_s = time.monotonic() + deadline_s
        while not (self._has_settings or self._failure) and (left_s := end_s - time.monotonic()) > 0:
            self._read(left_s)
        if not self._has_settings:
            self.close()
            reason = self._failure or "it is silent"
            raise ServerError(f"The server at {self._url} does not answer in gRPC ({reason}). Is it the gRPC port?")

    def _read(self, timeout_s: float) -> None:
        if self._sent_ns:  # not beyond the deadline of the oldest call
            end_ns = next(iter(self._sent_ns.values())) + self._deadline_ns
            timeout_s = min(timeout_s, max(end_ns - time.perf_counter_ns(), 0) / 1e9)
        if self._failure:
            time.sleep(timeout_s)
        elif wait_until_readable(self._socket, timeout_s):
            try:
                if data := self._socket.recv(READ_BYTES):
                    self._parse(self._unread + data, time.perf_counter_ns())
                else:
                    self._failure = "UNAVAILABLE: the server closed the connection"
            except ConnectionResetError:  # closed with bytes of ours unread
                self._failure = "UNAVAILABLE: the server closed the connection"
            except OSError as error:
                self._failure = f"UNAVAILABLE: {error}"
            except (HyperframeError, HPACKError) as error:
                self._failure = f"UNAVAILABLE: what the server says is not HTTP/2 ({error!r})"
        self._fail_overdue()

    def _fail_overdue(self) -> None:
        """Fail calls that get no answer: those past their deadline, or all when the connection is lost."""
        now_ns = time.perf_counter_ns()
        while self._sent_ns:
            number, sent_ns = next(iter(self._sent_ns.items()))
            if not self._failure and now_ns < sent_ns + self._deadline_ns:
                return
            self._answer(number, now_ns, self._failure or f"DEADLINE_EXCEEDED: no answer within {self._deadline_ns / 1e9:g} s")
            self._late.add(number)

    def _answer(self, number: int, now_ns: int, error: str) -> None:
        body = self._bodies.pop(number, b"")
        self._late.discard(number)
        if self._sent_ns.pop(number, None) is not None:
            self._answers.append(Answer(number, now_ns, error, b"" if error else body[PREFIX_BYTES:]))

    def _parse(self, data: bytes, now_ns: int) -> None:
        begin, end = 0, len(data)
        while begin + FRAME_HEADER.size <= end:
            high, low, kind, flags, stream = FRAME_HEADER.unpack_from(data, begin)
            body = begin + FRAME_HEADER.size
            after = body + (high << 16 | low)
            if after > end:
                break
            if kind == HeadersFrame.type:
                if flags & END_STREAM:  # the trailers
                    self._answer(stream >> 1, now_ns, self._decode_error(data[body:after], flags))
            elif kind == DataFrame.type:
                number = stream >> 1
                if number in self._sent_ns:
                    self._bodies[number] = self._bodies.get(number, b"") + data[body:after]
                if flags & END_STREAM:
                    self._answer(number, now_ns, "UNKNOWN: an answer without a status")
            else:
                self._handle_control(data[begin:after], now_ns)
            begin = after
        self._unread = data[begin:]

    def _decode_error(self, block: bytes, flags: int) -> str:
        if block not in self._errors:
            decoder = Decoder()
            decoder.max_allowed_table_size = decoder.header_table_size = 0
            trailers = dict(decoder.decode(block, raw=True)) if flags & END_HEADERS else {}
            status = trailers.get(b"grpc-status", b"2").decode()  # 2: UNKNOWN
            name, message = STATUS.get(status, status), unquote(trailers.get(b"grpc-message", b"").decode())
            self._errors[block] = "" if status == "0" else f"{name}: {message[:120]}"
        return self._errors[block]

    def _handle_control(self, data: bytes, now_ns: int) -> None:
        frame, _ = Frame.parse_frame_header(memoryview(data[: FRAME_HEADER.size]))
        frame.parse_body(memoryview(data[FRAME_HEADER.size :]))
        if isinstance(frame, WindowUpdateFrame) and frame.stream_id == 0:
            self._window_bytes += frame.window_increment
        elif isinstance(frame, SettingsFrame) and "ACK" not in frame.flags:
            self._has_settings = True
            self._call_window_bytes = frame.settings.get(SettingsFrame.INITIAL_WINDOW_SIZE, self._call_window_bytes)
            self._socket.sendall(SettingsFrame(0, flags=["ACK"]).serialize())
        elif isinstance(frame, PingFrame) and "ACK" not in frame.flags:
            self._socket.sendall(PingFrame(0, opaque_data=frame.opaque_data, flags=["ACK"]).serialize())
        elif isinstance(frame, RstStreamFrame):
            error = f"UNAVAILABLE: the server ended the call (HTTP/2 error {frame.error_code})"
            self._answer(frame.stream_id >> 1, now_ns, error)
        elif isinstance(frame, GoAwayFrame):
            self._failure = f"UNAVAILABLE: the server ends the connection (HTTP/2 error {frame.error_code})"


def make_headers(url: str, path: str) -> list[tuple[str, str]]:
    """Return the headers of every call."""
    return [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", url),
        ("te", "trailers"),
        ("content-type", "application/grpc"),
    ]
