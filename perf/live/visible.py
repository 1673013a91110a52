"""Measure how soon an event changes an answer, and how much events slow `recommend` down.

    event due ─▶ observe ─▶ acknowledged ─▶ recommend(after=…) ─▶ an answer without the bought item      event to changed answer
    recommend due ─▶ answer                                                                              latency of recommend

Both loads are open-loop: events and requests leave when they are due. A probe is an event, sent alone, after which
the list is requested: the user buys the first item of the last list, so the next one cannot be right by chance. The other
events are sent several to a request, as a gateway or a broker's consumer sends them. Rounds without and with events alternate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from perf.bench import PEAK_CLIENTS, new_bench
from perf.figures import Figure
from perf.live.exchange import Due, Exchange, connect, require_message
from perf.live.shop import Shop, read_sequences
from perf.load import schedule
from perf.load.open_loop import prevent_delays
from perf.load.unary import Answer
from perf.load.workload import draw, serialise
from perf.observe import Latency
from serving.contract.errors import ServerError
from serving.contract.tensors import ENSEMBLE

EVENT_TO_ANSWER_MS = 100.0  # bounds
SLOWER_AT_MOST = 1.5
LOAD_SHARE = 0.5  # of the peak of `recommend`
PROBE_SHARE = 0.03  # of the requests, which the probes send; few, because events that are sent alone are a load of their own
PEAK_WINDOW_S = 1.0


@dataclass
class Probes:
    """Users that buy the first item of their list. next_item: user id -> that item"""

    shop: Shop
    exchange: Exchange
    next_item: dict[int, int]
    durable_ns: list[int] = field(default_factory=list)
    changed_ns: list[int] = field(default_factory=list)
    stale: int = 0  # answers that do not reflect their event

    def buy(self, user_id: int, due_ns: int, on_done: Callable[[], None] = lambda: None) -> None:
        """Send the purchase of a user, and ask for the recommendations after it. due_ns: on the clock of `perf_counter_ns`"""
        item_id = self.next_item[user_id]

        def on_acknowledged(answer: Answer) -> None:
            self.durable_ns.append(answer.at_ns - due_ns)
            sequence = int(read_sequences(require_message(answer))[0])
            self.exchange.send(self.shop.encode_recommend(user_id, after=sequence), on_changed)

        def on_changed(answer: Answer) -> None:
            self.changed_ns.append(answer.at_ns - due_ns)
            shown = self.shop.read_answer(require_message(answer))
            self.stale += not shown.is_current or item_id in shown.item_ids
            if shown.item_ids:
                self.next_item[user_id] = shown.item_ids[0]
            on_done()

        self.exchange.send(self.shop.encode_observe([user_id], [item_id]), on_acknowledged)


def ask_first_items(shop: Shop, exchange: Exchange, user_ids: np.ndarray) -> dict[int, int]:
    """Return user id -> first recommended item, without the users who are recommended none. Raises ServerError if all are."""
    answers = {user: shop.read_answer(exchange.ask(shop.encode_recommend(user))) for user in np.unique(user_ids).tolist()}
    first_items = {user: answer.item_ids[0] for user, answer in answers.items() if answer.item_ids}
    if not first_items:
        raise ServerError(
            f"None of {len(answers)} users is recommended any item, so none can buy one. Look at the server's log."
        )
    return first_items


def measure_peak(shop: Shop, folder: Path, progress: Callable[[str], None]) -> float:
    """Return the highest rate of `recommend` over PEAK_CLIENTS, in answers/s. folder: for raw results"""
    bench, rates = new_bench(shop.site, "live", folder), []
    for clients in PEAK_CLIENTS:
        progress(f"peak of recommend, {clients} clients")
        rates.append(bench.measure_clients(clients, PEAK_WINDOW_S).achieved_rate)
    return max(rates)


class Events(NamedTuple):
    """The rate of events, and how many are sent in one request."""

    per_s: float
    per_request: int = 1


@dataclass
class Round:
    """Results of one open-loop load: latencies of plain requests and how late all were sent, in ns; probes; events.

    events, refused: the numbers of events that were sent, and of requests with events that were refused
    """

    recommend_ns: list[int] = field(default_factory=list)
    late_ns: list[int] = field(default_factory=list)
    probes: Probes | None = None
    events: int = 0
    refused: int = 0


def run_round(
    shop: Shop,
    exchange: Exchange,
    rate: float,
    events: Events,
    probes: Probes | None,
    duration_s: float,
    rng: np.random.Generator,
) -> Round:
    """Send `rate` requests/s; with probes, also `events`, which include those of the probes."""
    run = Round(probes=probes)
    probe_rate = PROBE_SHARE * rate if probes else 0.0

    def send_request(body: bytes) -> Callable[[int], None]:
        def on_answer(answer: Answer, due_ns: int) -> None:
            require_message(answer)
            run.recommend_ns.append(answer.at_ns - due_ns)

        return lambda due_ns: exchange.send(body, lambda answer: on_answer(answer, due_ns))

    def note_event(answer: Answer) -> None:
        run.refused += bool(answer.error)

    def send_event(body: bytes) -> Callable[[int], None]:
        return lambda _: exchange.send(body, note_event)

    due_s = schedule.draw_poisson(rate - probe_rate, duration_s, rng)
    bodies = serialise(shop.specs[ENSEMBLE], draw(shop.requests, len(due_s), rng))
    actions = list(zip(due_s, map(send_request, bodies), strict=True))
    if probes:
        other_rate = max(events.per_s - probe_rate, 1.0) / events.per_request
        event_s, probe_s = (schedule.draw_poisson(r, duration_s, rng) for r in (other_rate, probe_rate))
        others = np.setdiff1d(shop.user_ids, list(probes.next_item))  # only probes buy for their users
        shape = (len(event_s), events.per_request)
        users = rng.choice(others if len(others) else shop.user_ids, shape)
        items = rng.choice(shop.item_ids, shape)
        requests = (shop.encode_observe(*rows) for rows in zip(users.tolist(), items.tolist(), strict=True))
        actions += zip(event_s, map(send_event, requests), strict=True)
        probed = np.resize(rng.permutation(list(probes.next_item)), len(probe_s)).tolist()
        actions += zip(probe_s, (partial(probes.buy, user_id) for user_id in probed), strict=True)
        run.events = users.size + len(probe_s)
    actions.sort(key=lambda action: action[0])
    with prevent_delays():
        run.late_ns = exchange.run_open_loop([Due(int(at_s * 1e9), act) for at_s, act in actions])
    return run


def measure(
    shop: Shop,
    folder: Path,
    events: Events,
    duration_s: float,
    rounds: int,
    rng: np.random.Generator,
    progress: Callable[[str], None],
) -> list[Figure]:
    """Return the figures of `rounds` loads without events and as many with them."""
    rate = LOAD_SHARE * measure_peak(shop, folder, progress)
    n_probes = max(int(PROBE_SHARE * rate * duration_s), 1)
    quiet, busy = [], []
    with connect(shop.site.grpc_url) as exchange:
        users = shop.draw_users(min(n_probes, len(shop.user_ids) // 2), rng)
        progress("first lists of the users that buy")
        lists = ask_first_items(shop, exchange, users)
        for number in range(rounds):
            progress(f"round {number + 1}: {rate:,.0f} requests/s")
            quiet.append(run_round(shop, exchange, rate, events, None, duration_s, rng))
            progress(f"round {number + 1}: the same beside {events.per_s:,.0f} events/s")
            busy.append(run_round(shop, exchange, rate, events, Probes(shop, exchange, lists), duration_s, rng))
    return make_figures(rate, quiet, busy, duration_s)


def make_figures(rate: float, quiet: list[Round], busy: list[Round], duration_s: float) -> list[Figure]:
    of_recommend = [[Latency.of(np.array(run.recommend_ns)) for run in runs] for runs in (quiet, busy)]
    p99 = [[latency.p99_ms for latency in latencies if latency] for latencies in of_recommend]
    late = [latency for run in busy if (latency := Latency.of(np.array(run.late_ns)))]
    probes = [run.probes for run in busy if run.probes]
    durable, changed = (
        [latency for probe in probes if (latency := Latency.of(np.array(getattr(probe, name))))]
        for name in ("durable_ns", "changed_ns")
    )
    return [
        Figure(name="event to changed answer: p50", values=[x.p50_ms for x in changed], unit="ms"),
        Figure(name="event to changed answer: p99", values=[x.p99_ms for x in changed], unit="ms", at_most=EVENT_TO_ANSWER_MS),
        Figure(name="event to acknowledgement: p50", values=[x.p50_ms for x in durable], unit="ms"),
        Figure(name="event to acknowledgement: p99", values=[x.p99_ms for x in durable], unit="ms"),
        Figure(
            name="p99 of recommend with events over without",
            values=[with_events / without for without, with_events in zip(*p99, strict=True)],
            unit="x",
            at_most=SLOWER_AT_MOST,
        ),
        Figure(name="p99 of recommend without events", values=p99[0], unit="ms"),
        Figure(name="p99 of recommend with events", values=p99[1], unit="ms"),
        Figure(name="sent late, with events: p99", values=[x.p99_ms for x in late], unit="ms"),
        Figure(name="recommend: half of its peak", values=[rate], unit="/s"),
        Figure(name="events", values=[run.events / duration_s for run in busy], unit="/s"),
        Figure(name="events refused", values=[float(sum(run.refused for run in busy))], at_most=0),
        Figure(name="answers to probes", values=[float(sum(len(probe.changed_ns) for probe in probes))], at_least=1),
        Figure(name="of these without their event", values=[float(sum(probe.stale for probe in probes))], at_most=0),
    ]
