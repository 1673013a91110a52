"""The open loop against a gRPC server of grpcio's: what counts as latency, what counts as an error, and what is refused."""

import re
import time
from itertools import islice

import grpc
import numpy as np
import pytest
from hyperframe.frame import DataFrame, SettingsFrame

from perf.load import open_loop
from perf.load.open_loop import Outcome, require_loopback, run_load
from perf.load.unary import PREFIX_BYTES
from perf.sweep import Scenario, describe
from serving.contract.errors import ConfigError, ServerError
from tests.present import present
from tests.unit.perf.grpc_server import frames_of, scripted, serving


class OneAtATime:
    """Answers one request after another, each after `service_s`; every body that says so is refused."""

    def __init__(self, service_s: float) -> None:
        self.service_s = service_s
        self.bodies: list[bytes] = []

    def __call__(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        self.bodies.append(body)
        time.sleep(self.service_s)
        if body == b"refuse":
            context.abort(grpc.StatusCode.UNAVAILABLE, "queue full")
        return body + b" answered"


def run(server, bodies, due_s) -> Outcome:
    with serving(server, workers=1) as url:
        return run_load(url, bodies, np.asarray(due_s))


def test_latency_counts_from_the_due_instant_so_a_queue_is_seen():
    """Five requests due at once, 20 ms each, one at a time: the k-th answer cannot come before k x 20 ms."""
    outcome = run(OneAtATime(0.02), [b"x"] * 5, np.zeros(5))
    assert outcome.ok.all()
    assert (np.sort(outcome.latency_ns) >= 20e6 * np.arange(1, 6)).all()


def test_requests_leave_when_due_not_when_the_last_answer_came():
    server = OneAtATime(0.1)
    outcome = run(server, [b"a", b"b", b"c"], [0.0, 0.001, 0.002])
    assert server.bodies == [b"a", b"b", b"c"]
    assert (outcome.sent_ns >= outcome.due_ns).all()
    assert (outcome.send_late_ns == outcome.sent_ns - outcome.due_ns).all()
    assert outcome.sent_ns[2] < outcome.answered_ns[0]


def test_errors_are_counted_and_have_no_latency():
    outcome = run(OneAtATime(0.0), [b"x", b"refuse", b"x", b"refuse"], np.zeros(4))
    assert outcome.ok.tolist() == [True, False, True, False]
    assert outcome.messages == [b"x answered", b"", b"x answered", b""]
    assert outcome.errors == {"UNAVAILABLE: queue full": 2}
    assert len(outcome.latency_ns) == 2
    result = describe(Scenario("x", lambda rng: np.zeros(4), 1.0), outcome, {"even": np.array([True, False] * 2)}, "raw.npz")
    assert result.error_share == 0.5
    assert present(result.latency).count == 2
    assert result.by_class["even"].count == 2


def test_what_cannot_be_sent_is_an_error_not_silence(monkeypatch):
    monkeypatch.setattr(open_loop, "MAX_IN_FLIGHT", 2)
    outcome = run(OneAtATime(0.05), [b"x"] * 5, np.zeros(5))
    assert outcome.unsent == 3
    assert outcome.errors == {"not sent: too many requests in flight": 3}
    assert outcome.ok.sum() == 2


def test_what_a_lost_connection_does_not_take_was_never_sent():
    def script(peer):
        peer.sendall(SettingsFrame(0).serialize())
        next(said for said in frames_of(peer) if isinstance(said, DataFrame))

    with scripted(script) as url:
        outcome = run_load(url, [b"x"] * 3, np.array([0.0, 0.5, 0.5]))
    assert (outcome.sent_ns >= 0).tolist() == [True, False, False]
    assert outcome.unsent == 2
    assert outcome.errors == {"UNAVAILABLE: the server closed the connection": 3}


def test_a_request_gets_the_time_at_which_it_is_due_however_long_connecting_took():
    received: list[tuple[float, float]] = []

    def script(peer):
        time.sleep(0.5)  # before the connection can be used
        peer.sendall(SettingsFrame(0).serialize())
        bodies = (said.data[PREFIX_BYTES:] for said in frames_of(peer) if isinstance(said, DataFrame))
        received.extend((float(body), time.time()) for body in islice(bodies, 2))

    begun_s = time.time()
    with scripted(script) as url:
        run_load(url, [b"0", b"1"], np.array([0.0, 0.2]), add_time=lambda body, due_s: b"%.6f" % (float(body) + due_s))
    (first_s, first_came_s), (second_s, second_came_s) = received
    assert begun_s + 0.5 <= first_s <= first_came_s
    assert second_s - 1 == pytest.approx(first_s + 0.2, abs=1e-5)
    assert second_s - 1 <= second_came_s


@pytest.mark.parametrize("url", ["localhost:1", "127.0.0.1:9", "[::1]:9", "127.9.9.9:1"])
def test_loopback_is_allowed(url):
    require_loopback(url)


@pytest.mark.parametrize("url", ["10.1.2.3:8001", "192.168.0.1:8001", "8.8.8.8:80"])
def test_other_machines_are_not(url):
    with pytest.raises(ConfigError, match="loopback only"):
        open_loop.run_load(url, [], np.array([]))


@pytest.mark.parametrize("url", ["localhost", "localhost:http:", "127.0.0.1:port"])
def test_an_address_must_be_host_and_port(url):
    with pytest.raises(ConfigError, match="not host:port"):
        require_loopback(url)


def test_nobody_there_is_a_server_error():
    with pytest.raises(ServerError, match=re.escape("127.0.0.1:9 does not answer")):
        open_loop.run_load("127.0.0.1:9", [b""], np.array([0.0]))
