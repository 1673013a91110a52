"""Figures and bounds of experiments that need a server, from made-up measurements."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections import Counter, defaultdict
from contextlib import closing

import numpy as np
import pytest

from experiments import broken_challengers, gateway_soak, malformed, overhead_figures, overload, recovery, rest_load
from experiments.fault_load import ACCEPTED, FULL, POPULAR, Seen
from experiments.faults import FAULTS
from experiments.served import publish_with_half
from perf.figures import Figure
from repository.generations import pin
from serving.contract.tensors import ENSEMBLE
from serving.live.experiment import Experiment
from serving.pipeline import Pipeline
from tests.repositories import small_repository


def list_missed(figures: list[Figure]) -> list[str]:
    assert len({figure.name for figure in figures}) == len(figures)
    return [figure.name for figure in figures if figure.met is False]


def test_bounds_under_load_hold_at_the_peak_too():
    values = {
        "goodput over peak": 0.7,
        "p99 of accepted": 301.0,
        "p99 of accepted, high priority": 21.0,
        "share of high priority accepted": 0.5,
        "without any answer": 1.0,
        "recovered after": 2.5,
    }
    figures = overload.make_figures("1 times the peak", values, idle_ms=10.0)
    assert [figure.unit for figure in figures] == ["", "ms", "ms", "", "", "s"]
    bounded = (name for name in values if name != "share of high priority accepted")
    assert list_missed(figures) == [f"1 times the peak: {name}" for name in bounded]


def test_a_load_that_its_sender_holds_back_is_told(monkeypatch):
    """Four requests are due at once, and there is one connection, on which each takes 50 ms."""

    def answer_slowly(listening: socket.socket) -> None:
        with listening.accept()[0] as peer:
            while peer.recv(1_000):
                time.sleep(0.05)
                peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")

    monkeypatch.setattr(rest_load, "CONNECTIONS", 1)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        answering = threading.Thread(target=answer_slowly, args=[listening])
        answering.start()
        sent = rest_load.send_open_loop(listening.getsockname()[1], [rest_load.encode_get("/")] * 4, np.zeros(4))
        answers = asyncio.run(sent)
        answering.join()
    assert (answers.status == 200).all()
    assert (np.sort(answers.sent_late_s) >= 0.05 * np.arange(4)).all()
    assert (answers.sent_late_s < answers.latency_s).all()
    assert np.isnan(rest_load.Answers.empty(1).sent_late_s).all()


def test_a_connection_that_is_closed_in_place_of_an_answer_is_no_reply():
    def hang_up(listening: socket.socket) -> None:
        for _ in range(2):
            with listening.accept()[0] as peer:
                peer.recv(1_000)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        hanging_up = threading.Thread(target=hang_up, args=[listening])
        hanging_up.start()
        statuses = malformed.send_http(listening.getsockname()[1], [rest_load.encode_get("/")] * 2)
        hanging_up.join()
    assert malformed.count_unanswered({"REST": statuses, "gRPC": Counter(INVALID_ARGUMENT=3)}) == 2


def encode_answer(generation: int, items: list[int], degraded: tuple[str, ...] = ()) -> bytes:
    return json.dumps({"generation": generation, "items": [{"id": i} for i in items], "degraded": degraded}).encode()


def test_a_soak_counts_answers_that_differ_within_a_generation_and_errors():
    watched = gateway_soak.Watched()
    watched.record(7, 200, encode_answer(1, [1, 2]))
    watched.record(7, 200, encode_answer(2, [3, 4]))
    watched.record(7, 200, encode_answer(1, [9], ("gateway_fallback",)))
    assert watched.answered_s > 0
    assert list_missed(gateway_soak.make_figures(watched, [1.5, 2.5], 0, 1.05, [])) == []
    watched.record(7, 200, encode_answer(2, [1, 2]))
    watched.record(8, 503, b"busy")
    figures = gateway_soak.make_figures(watched, [1.5, 60.0], 1, 1.2, [])
    missed = ["wrong or mixed answers", "any status but 200", "faults without recovery", "memory afterwards over before"]
    assert list_missed(figures) == missed
    values = {figure.name: figure.median for figure in figures}
    assert values["requests"] == 5
    assert values["answered with popular items"] == values["wrong or mixed answers"] == 1


def test_a_request_without_an_answer_is_excused_only_while_the_gateway_was_down():
    watched = gateway_soak.Watched(unanswered_s=[10.1, 11.0, 20.0])
    for generation in (1, 2):
        watched.record(7, 200, encode_answer(generation, [generation]))
    figures = {figure.name: figure for figure in gateway_soak.make_figures(watched, [1.5], 0, 1.0, [(10.0, 11.5)])}
    assert list_missed(list(figures.values())) == ["requests without an answer"]
    counts = ("requests", "requests without an answer", "refused while the gateway was down")
    assert [figures[name].median for name in counts] == [5, 1, 2]


def test_a_soak_whose_generations_answer_alike_could_not_see_a_mixed_answer():
    watched = gateway_soak.Watched()
    for generation in (1, 2):
        watched.record(7, 200, encode_answer(generation, [1, 2]))
    watched.record(8, 200, encode_answer(1, [1, 2]))
    alike = "users whom the two generations answer differently"
    assert list_missed(gateway_soak.make_figures(watched, [1.5], 0, 1.0, [])) == [alike]
    watched.record(8, 200, encode_answer(2, [3]))
    [figure] = [each for each in gateway_soak.make_figures(watched, [1.5], 0, 1.0, []) if each.name == alike]
    assert figure.values == [0.5]


def test_the_generations_of_a_soak_answer_differently_by_the_same_contract(tmp_path):
    repo = tmp_path / "repository"
    publish_with_half(small_repository(), repo, tmp_path)
    answers = []
    for generation in (1, 2):
        pin(repo, generation)
        with closing(Pipeline.load(repo)) as pipeline:
            answers.append(pipeline.recommend(list(range(20)))["item_ids"])
    assert (answers[0] != answers[1]).any(axis=1).all()
    blocked = np.load(repo / ENSEMBLE / "2" / "item_ids.npy")[::2]
    assert not np.isin(answers[1], blocked).any()


def test_a_challenger_that_is_not_rolled_back_counts_as_having_answered_to_the_end():
    ended = Experiment("broken 0", 1, 2, 0.5, state="rolled back", reason="errors")
    soon: dict[str, list[broken_challengers.Outcome]] = {"errors": [(ended, 25), (ended, 50)], "slow": [(ended, 25)]}
    assert list_missed(broken_challengers.make_figures(soon, planned=10_000)) == []
    figures = broken_challengers.make_figures({**soon, "slow": [(None, 10_000)]}, planned=10_000)
    shares = "broken challengers: share of their answers until rolled back"
    assert list_missed(figures) == [shares, "broken challengers that were rolled back"]
    values = {figure.name: figure.values for figure in figures}
    assert (values[shares], values["errors: answers until rolled back"]) == ([1.0], [25, 50])
    described = [broken_challengers.describe(experiment) for experiment in (ended, None)]
    assert described == ["is rolled back, because errors,", "goes on"]


def test_a_fault_is_described_by_what_callers_and_metrics_saw_of_it():
    name, begun_s, mended_s = "rank killed", 10.0, 10.0
    answers = [Seen(9.9, 10.0, FULL), Seen(10.1, 12.0, POPULAR), Seen(12.0, 12.1, FULL), Seen(12.1, 12.2, FULL)]
    values = recovery.describe_answers(answers, mended_s)
    assert values[recovery.RECOVERED] == pytest.approx(2.0)
    assert values[f"{recovery.SHARES}{POPULAR}"] == 25
    values |= recovery.describe_events([Seen(10.0, 10.5, "503"), Seen(11.0, 11.1, ACCEPTED)])
    values |= recovery.describe_readiness([Seen(10.0, 11.0, "503")], begun_s, FAULTS[name])
    values |= recovery.describe_signals([{"triton_up": 1.5}, {}]) | {recovery.LOST: 0.0, recovery.DOUBLED: 0.0}
    rounds = {f"{name}: {kind}": [value] for kind, value in values.items()}
    assert list_missed(recovery.make_figures(rounds, 1)) == []
    worse = {recovery.LOST: 1.0, recovery.UNREADY: 2.5, recovery.SHOWN: 0.0}
    figures = recovery.make_figures(rounds | {f"{name}: {kind}": [value] for kind, value in worse.items()}, 1)
    lost = [f"{faults}: {recovery.LOST}" for faults in ("all faults", name)]
    assert sorted(list_missed(figures)) == sorted([*lost, f"all faults: {recovery.SHOWN}, of 1", f"{name}: {recovery.UNREADY}"])


def test_an_event_that_is_lost_in_one_round_of_three_is_lost():
    rounds = {f"rank killed: {kind}": [0.0, float(kind == recovery.LOST), 0.0] for kind in recovery.NEVER}
    missed = list_missed(recovery.make_figures(rounds, 3))
    assert missed == [f"all faults: {recovery.LOST}", f"rank killed: {recovery.LOST}"]


def test_metrics_must_show_every_fault_of_callers_in_every_round():
    """The supervisor's end need not be shown: its signal makes up for no other."""
    shown = {"rank killed": [1.0, 1.0, 1.0], "rerank killed": [1.0, 0.0, 1.0], "supervisor killed": [1.0, 1.0, 1.0]}
    [signals] = (
        figure
        for figure in recovery.make_figures({f"{name}: {recovery.SHOWN}": values for name, values in shown.items()}, 3)
        if recovery.SHOWN in figure.name
    )
    assert (signals.name, signals.values, signals.met) == (f"all faults: {recovery.SHOWN}, of 2", [1.0], False)


def test_errors_of_one_round_are_errors():
    """Two of five rounds at half of the peak, which the median leaves out."""
    by_round = defaultdict(lambda: np.ones(5)) | {"fused half, errors": np.array([0.0, 0.01, 0.0, 0.02, 0.0])}
    figures = overhead_figures.make_layout_figures(by_round, "fused", overhead_figures.Bounds(share=0.5))
    assert list_missed(figures) == ["fused: most errors at half of the peak, share"]
