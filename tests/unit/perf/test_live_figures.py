"""`perf live` without a server: reads of a small store, and what is made of latencies."""

import time
from typing import cast

import numpy as np
import pytest

from perf.live import items, reads, visible
from perf.live.exchange import Due, Exchange, connect
from perf.live.shop import Answer as ShownItems
from perf.live.shop import Shop
from perf.live.visible import Probes, Round
from perf.load.unary import Answer
from serving.contract.errors import ServerError
from tests.unit.perf.grpc_server import serving


def test_reads_of_two_stores_are_measured_and_compared(tmp_path):
    figures = {f.name: f for f in reads.measure(100, (200, 400), tmp_path, np.random.default_rng(0), lambda _: None)}
    ratio = figures["p50 of 400 users over 200"]
    assert ratio.median == pytest.approx(
        figures["400 users: p50 of a read"].median / figures["200 users: p50 of a read"].median
    )
    assert ratio.at_most == 1.5
    assert figures["200 users: last tenth of 100 over the first"].median > 0
    assert list(tmp_path.iterdir()) == []


def test_a_round_with_events_is_judged_against_the_one_without():
    quiet = [Round(recommend_ns=[1_000_000] * 100), Round(recommend_ns=[2_000_000] * 100)]
    busy, shop, exchange = [], cast(Shop, None), cast(Exchange, None)  # which probes of the past do not ask
    for milliseconds, stale in ((3, 0), (4, 1)):
        probes = Probes(shop, exchange, {}, durable_ns=[1_000_000], changed_ns=[milliseconds * 30_000_000], stale=stale)
        taken_ns = [milliseconds * 1_000_000] * 100
        busy.append(Round(recommend_ns=taken_ns, late_ns=[milliseconds * 100_000], probes=probes, events=50))
    figures = {figure.name: figure for figure in visible.make_figures(100.0, quiet, busy, duration_s=1.0)}
    assert figures["p99 of recommend with events over without"].values == [3.0, 2.0]
    assert figures["p99 of recommend with events over without"].met is False
    assert figures["event to changed answer: p99"].values == [90.0, 120.0]
    assert figures["of these without their event"].met is False
    assert figures["answers to probes"].median == 2
    assert figures["sent late, with events: p99"].values == pytest.approx([0.3, 0.4])
    assert figures["events"].median == 50


def test_an_action_that_holds_up_the_next_makes_it_late():
    """Both are due at once, and the first takes 50 ms."""

    def answer(body, context):
        return body

    with serving(answer) as url, connect(url) as exchange:
        first, second = exchange.run_open_loop([Due(0, lambda due_ns: time.sleep(0.05)), Due(0, lambda due_ns: None)])
    assert first >= 0
    assert second >= first + 50_000_000


def test_a_shop_that_recommends_nothing_cannot_be_measured():
    class Empty:
        def encode_recommend(self, user_id):
            return b""

        def ask(self, body):
            return b""

        def read_answer(self, message):
            return ShownItems([], 0)

    with pytest.raises(ServerError, match="None of 2 users is recommended any item"):
        visible.ask_first_items(cast(Shop, Empty()), cast(Exchange, Empty()), np.array([7, 8, 7]))


def test_an_answer_that_fails_ends_the_measurement_with_its_error():
    class Refusing:
        def encode_recommend(self, user_id):
            return b""

        def read_answer(self, message):
            raise AssertionError("an error has no message to read")

        def send(self, body, on_answer):
            on_answer(Answer(0, 0, "UNAVAILABLE: gone", b""))

        def finish(self):
            pass

    with pytest.raises(ServerError, match="UNAVAILABLE: gone"):
        items.ask_all(cast(Shop, Refusing()), cast(Exchange, Refusing()), [7])
