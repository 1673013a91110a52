"""perf_analyzer 2.51: its command line, and its output as recorded from real runs (samples/)."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from perf.load.analyzer import Target, build_command, extract_complaints, parse_export, run
from serving.contract.errors import ConfigError, ServerError

SAMPLES = Path(__file__).parent / "samples"


def target(**changes) -> Target:
    return replace(Target("rank", "localhost:1", "localhost:2", Path("in.json")), **changes)


@pytest.fixture
def export():
    return json.loads((SAMPLES / "perf_analyzer_export.json").read_text())


def test_requests_are_those_answered_within_the_windows(export):
    """Against a loop over the requests."""
    (experiment,) = export["experiments"]
    first, *_, last = bounds = experiment["window_boundaries"]
    bounds[0] = first = sorted(r["response_timestamps"][-1] for r in experiment["requests"])[5]  # five answers came before
    requests = parse_export(json.dumps(export))
    kept = [r for r in experiment["requests"] if first <= r["response_timestamps"][-1] < last]
    assert 0 < len(kept) < len(experiment["requests"])
    assert requests.start_ns.tolist() == [r["timestamp"] for r in kept]
    assert requests.latency_ns.tolist() == [r["response_timestamps"][-1] - r["timestamp"] for r in kept]
    rates = []
    for start, end in itertools.pairwise(bounds):
        rates.append(sum(start <= r["response_timestamps"][-1] < end for r in kept) / ((end - start) / 1e9))
    np.testing.assert_allclose(requests.window_rates, rates)
    assert requests.rate == pytest.approx(np.mean(rates))
    assert requests.spread == pytest.approx((max(rates) - min(rates)) / np.median(rates))


def test_an_export_of_another_form_is_refused(export):
    with pytest.raises(ServerError, match=r"2\.51 is expected"):
        parse_export('{"experiments": []}')
    with pytest.raises(ServerError, match=r"2\.51 is expected"):
        parse_export(json.dumps(export)[:5_000])  # it crashed while writing
    export["experiments"][0]["window_boundaries"] = []
    with pytest.raises(ServerError, match="no measurement window"):
        parse_export(json.dumps(export))


def test_windows_without_an_answer_are_refused(export):
    bounds = export["experiments"][0]["window_boundaries"]
    for unanswered in ([1, 2, 3], [1, 2, *bounds[1:]]):  # all windows; one, over which the rate has no spread
        export["experiments"][0]["window_boundaries"] = unanswered
        with pytest.raises(ServerError, match="Nothing was answered in one of"):
            parse_export(json.dumps(export))


@pytest.mark.parametrize(
    ("transport", "expected"),
    [
        ("grpc", ["-i", "grpc", "-u", "localhost:1"]),
        ("http", ["-i", "http", "-u", "localhost:2"]),
    ],
)
def test_transports(transport, expected):
    arguments = build_command(target(transport=transport), "concurrency", 8, 1.5, Path("out.json"))
    assert [word for word in arguments if word in expected] == expected
    assert arguments[arguments.index("--concurrency-range") + 1] == "8"
    assert arguments[arguments.index("--measurement-interval") + 1] == "1500"
    assert "--streaming" not in arguments


def test_a_rate_is_poisson_and_a_version_is_asked_for():
    arguments = build_command(target(model_version="3"), "request_rate", 62.5, 1, Path("out.json"))
    assert arguments[arguments.index("--request-rate-range") + 1] == "62.5"
    assert arguments[arguments.index("--request-distribution") + 1] == "poisson"
    assert arguments[arguments.index("-x") + 1] == "3"
    assert "--concurrency-range" not in arguments


def test_an_unknown_transport_is_refused_with_those_there_are():
    with pytest.raises(ConfigError, match="these are: grpc, http"):
        target(transport="pigeon")


def test_what_it_said_is_its_errors_without_repeats():
    said = "Batch size: 1\nerror: failed to get model metadata\n\nerror: failed to get model metadata\n"
    assert extract_complaints(said) == "error: failed to get model metadata"
    assert extract_complaints("  nothing useful ") == "nothing useful"
    assert extract_complaints("Batch size: 1\nNo valid requests recorded.\nBye") == "No valid requests recorded."


def test_without_perf_analyzer_there_is_a_remedy():
    with pytest.raises(ServerError, match="make setup"):
        run(["no-such-program"], 1.0)


def test_one_that_hangs_is_ended():
    with pytest.warns(UserWarning, match="did not end"), pytest.raises(ServerError, match="did not end in 2 attempts"):
        run(["sleep", "30"], 0.1)


def test_one_that_hangs_once_is_started_again(tmp_path):
    hangs_first = f"if [ -e {tmp_path}/began ]; then echo measured; else touch {tmp_path}/began; exec sleep 30; fi"
    with pytest.warns(UserWarning, match="did not end") as told:
        assert run(["sh", "-c", hangs_first], 2.0) == "measured\n"
    assert len(told) == 1


def test_one_that_a_stall_leaves_without_an_answer_is_started_again_once(tmp_path):
    """The longest search must not end because the machine stood still for one window."""
    stalled = "Failed to obtain stable measurement within 3 measurement windows for concurrency 1."
    stalls_first = f"if [ -e {tmp_path}/began ]; then echo measured; else touch {tmp_path}/began; echo '{stalled}'; fi"
    with pytest.warns(UserWarning, match="no answer in one of its windows") as told:
        assert run(["sh", "-c", stalls_first], 10.0) == "measured\n"
    assert len(told) == 1
    with pytest.warns(UserWarning, match="no answer in one of its windows"):
        assert run(["echo", stalled], 10.0) == f"{stalled}\n"  # twice, so that it is no passing stall


def test_an_error_answer_is_no_stall(tmp_path):
    assert run(["sh", "-c", f"echo x >> {tmp_path}/starts; echo 'Thread [0] had error: no'"], 10.0).startswith("Thread")
    assert (tmp_path / "starts").read_text() == "x\n"
