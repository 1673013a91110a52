"""What the two commands conclude from what they measured, and the pipelines they measure it on. No timings."""

import contextlib
import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from typer.testing import CliRunner

from experiments import growth
from experiments import recall as recall_of_index
from experiments.growth import Axis
from experiments.overhead.bounds import AT_HALF, figures_of, mb
from experiments.overhead.breakdown import Breakdown, as_taken, kernel_us, median_of, models_of, parts_of
from experiments.overhead.rounds import Overhead
from perf import cli
from perf.figure import Figure
from perf.observe.hit_rates import parse
from perf.observe.memory import ProcessMemory
from perf.observe.server_stats import StageTimes
from perf.report import plots, tables
from serving.contract.errors import ServerError

PER_LAYOUT = {"p50": 3.0, "rate": 500.0, "rate, many": 400.0, "unbatched p50": 3.0}
PER_LAYOUT |= {"server us": 100.0, "models us": 900.0}
PER_LAYOUT |= {f"half, {key}": 1.0 for _, key in AT_HALF} | {"half, p50": 4.0, "half, p99": 10.0, "half, errors": 0.0}
EMPTY = {"empty p50": 1.0, "empty unbatched p50": 0.7, "empty rate": 3_000.0, "empty us": 300.0}
LEAST = "empty kernels, and what pauses add in process: beyond the in-process p50, ms"
WITHIN_ALL_BOUNDS = {"ensemble p50": 2.5, "fused p50": 2.5, "ensemble rate": 900.0, "fused rate": 900.0}
UNREAD = SimpleNamespace(
    info=SimpleNamespace(generation=1, axes=SimpleNamespace(candidates=1_000)),
    stages={"retrieve": SimpleNamespace(search=SimpleNamespace(index="an index"))},
    close=lambda: None,
)


def taken(rounds=3, **changes):
    """What `rounds` rounds measured, all alike but for `changes`."""
    once = {"in process p50": 2.0, "in process p50, paused": 2.5}
    once |= {"in process rate": 1_000.0, "in process rate, batches": 1_500.0}
    for layout in ("ensemble", "fused"):
        for name in (layout, f"{layout}-empty"):
            once |= as_taken(name, parts_of(level_of(4_600.0, [model(3_900.0)]), 3_600.0))
        once |= {f"{layout} {key}": value for key, value in (PER_LAYOUT | EMPTY | {"unbatched rate": 200.0}).items()}
    return {name: [changes.get(name, value)] * rounds for name, value in once.items()}


def by_name(figures):
    return {figure.name: figure for figure in figures}


def test_figures_are_computed_within_their_round_and_judged_by_the_median():
    rounds = taken() | {"fused p50": [2.5, 2.6, 9.0], "fused rate": [600.0, 800.0, 900.0]}
    figures = by_name(figures_of(rounds, candidates=200))
    beyond = figures["fused: p50 of one client beyond the in-process one, ms"]
    assert beyond.values == pytest.approx([0.5, 0.6, 7.0])
    assert (beyond.median, beyond.bound, beyond.met) == (pytest.approx(0.6), 0.7, True)
    share = figures["fused: answers/s against in-process on all cores"]
    assert (share.median, share.bound, share.met) == (0.8, 0.7, True)
    assert figures["ensemble: answers/s against in-process on all cores"].met  # 0.5 of 0.45
    batching = figures["ensemble: batching on/off: answers/s of 32 clients"]
    assert (batching.median, batching.met) == (2.0, True)
    least = {layout: figures[f"{layout}: {LEAST}"] for layout in ("ensemble", "fused")}
    assert {layout: (figure.median, figure.met) for layout, figure in least.items()} == {
        "ensemble": (1.5, None),  # 1 ms where nothing is computed, 0.5 of a pause
        "fused": (1.5, None),
    }
    by_the_batcher = figures["ensemble: batching on/off: p50 of one client, by what it adds to empty kernels"]
    assert (by_the_batcher.median, by_the_batcher.met) == (pytest.approx(1.1), None)  # 0.3 ms more than 3 ms
    batches = figures["ensemble: answers/s against in-process in batches"]
    assert (batches.median, batches.met) == (pytest.approx(1 / 3), None)
    tail = figures["fused: p99/p50 at half of the peak"]
    assert (tail.values, tail.bound, tail.met) == ([2.5] * 3, 3.0, True)
    left = figures["fused: the same that the server alone leaves (empty kernels)"]
    assert (left.values, left.met) == (pytest.approx([2 / 3] * 3), None)  # 3,000 of 3,000 + 1,500


def test_of_longer_lists_the_shares_alone_have_bounds():
    figures = by_name(figures_of(taken(), candidates=1_000))
    assert not figures["ensemble: answers/s against in-process on all cores"].met  # 0.5 of 0.7
    bounds = {name: figure.bound for name, figure in figures.items() if figure.bound is not None}
    assert bounds == {
        "ensemble: answers/s against in-process on all cores": 0.7,
        "ensemble: share of errors at half of the peak": 0.0,
        "fused: answers/s against in-process on all cores": 0.85,
        "fused: share of errors at half of the peak": 0.0,
    }


@pytest.mark.parametrize(
    ("value", "at_most", "met"), [(1.0, True, True), (1.1, True, False), (1.1, False, True), (0.9, False, False)]
)
def test_a_bound_is_an_upper_or_a_lower_one(value, at_most, met):
    assert Figure(name="x", values=[value], bound=1.0, at_most=at_most).met is met


@pytest.mark.parametrize(("value", "met"), [(0.94, False), (0.945, True), (0.96, True), (0.961, False)])
def test_a_bound_may_be_on_both_sides(value, met):
    figure = Figure(name="x", values=[value], bound=0.96, least=0.945)
    assert (figure.met, figure.bound_in_words) == (met, "0.945 to 0.96")


def test_the_table_says_what_is_missed():
    result = Overhead(
        repo="repo",
        candidates=1_000,
        in_process_batch=8,
        peak_clients={"ensemble": 32, "fused": 16},
        differing_answers="",
        compared_under_load=40,
        figures=figures_of(taken(), candidates=1_000),
        memory={"fused": [ProcessMemory(name="tritonserver", pid=1, pss_mib=100.0, rss_mib=200.0)]},
        breakdowns={"fused": parts_of(level_of(4_600.0, [model(3_900.0)]), 3_600.0)},
    )
    rows = {row.cells[0]: row for row in tables.overhead_table(result).rows}
    row = rows["ensemble: answers/s against in-process on all cores"]
    assert (row.cells[-2:], row.kept) == (("at least 0.7", "MISSED"), False)
    assert tables.memory_table(result.memory).rows[0].cells == ("fused: tritonserver", "100", "200")
    assert tables.breakdown_table(result.breakdowns).rows[0].cells == (
        *("fused", "4,000", "4,600", "3,600", "300", "80", "190", "430"),
    )
    assert mb(result.memory["fused"]) == pytest.approx(104.8576)


@pytest.mark.parametrize(("recall", "exit_code"), [(0.985, 0), (0.893, 1)])
def test_an_index_that_finds_too_little_at_the_c_that_is_measured_is_the_exit_code(monkeypatch, tmp_path, recall, exit_code):
    """Every bound but the recall's is met."""
    both = SimpleNamespace(batch=8, benches={})
    once = {name: values[0] for name, values in taken(1, **WITHIN_ALL_BOUNDS).items()}
    monkeypatch.setattr("experiments.overhead.rounds.require_comparable", lambda repo: None)
    monkeypatch.setattr("experiments.overhead.rounds.lay_out", lambda repo, scratch, candidates: candidates)
    trial = SimpleNamespace(recall=recall)
    monkeypatch.setattr(recall_of_index, "now", lambda search, queries, count: trial if count == 1_000 else None)
    monkeypatch.setattr(recall_of_index, "recorded_vectors", lambda pipeline, repo, first: None)
    monkeypatch.setattr(recall_of_index, "Pipeline", SimpleNamespace(load=lambda repo: UNREAD))
    monkeypatch.setattr("experiments.overhead.rounds.peak_alone", lambda *_: (32, []))
    monkeypatch.setattr("experiments.overhead.rounds.sides", lambda *_: contextlib.nullcontext(both))
    monkeypatch.setattr("experiments.overhead.rounds._differing", lambda both: "")
    monkeypatch.setattr("experiments.overhead.rounds._round", lambda *_: once)
    monkeypatch.setattr(cli, "new_folder", lambda: tmp_path)
    done = CliRunner().invoke(cli.app, ["overhead", "--candidates", "1000", "--rounds", "2"])
    assert done.exit_code == exit_code, done.exception
    document = json.loads(done.stdout.splitlines()[-1])
    assert document["missed"] == (["recall of exact search at C = 1,000"] if exit_code else [])
    assert document["median_low_high"]["recall of exact search at C = 1,000"] == [recall] * 3
    breakdowns = json.loads((tmp_path / "overhead.json").read_text())["breakdowns"]
    assert breakdowns.keys() == {"ensemble", "ensemble-empty", "fused", "fused-empty"}
    assert breakdowns["fused-empty"]["round_trip_us"] == 4_600.0
    assert len((tmp_path / "rounds.jsonl").read_text().splitlines()) == 2


def model(infer_us):
    counted = {"queue_us": 80.0, "compute_input_us": 30.0, "compute_infer_us": infer_us, "compute_output_us": 160.0}
    return StageTimes(requests=10, failed=0, calls_by_batch={1: 10}, **counted)


def level_of(mean_us, models):
    """A level of one client, p50 4 ms; each model ran kernels."""
    latency = SimpleNamespace(p50_ms=4.0, mean_ms=mean_us / 1e3)
    return SimpleNamespace(latency=latency, stages={str(number): times for number, times in enumerate(models)})


def test_the_parts_of_a_round_trip_add_up():
    found = parts_of(level_of(6_000.0, [model(1_000.0)] * 4), 3_000.0)
    parts = (found.kernels_us, found.hand_over_us, found.queue_us, found.copies_us, found.rest_us)
    assert parts == (3_000.0, 1_000.0, 320.0, 760.0, 920.0)
    assert sum(parts) == found.round_trip_us


def test_the_breakdown_of_a_run_is_the_median_of_its_rounds():
    rounds = [as_taken("fused", Breakdown(**dict.fromkeys(Breakdown.model_fields, us))) for us in (1.0, 9.0, 2.0)]
    taken = {name: [once[name] for once in rounds] for name in rounds[0]}
    assert set(median_of(taken, "fused").model_dump().values()) == {2.0}


def read(stage, seconds, rows):
    """A metrics page as tritonserver writes it."""
    lines = ""
    for name, value in (("recommender_kernel_seconds", seconds), ("recommender_kernel_rows", rows)):
        lines += f'# HELP {name} x\n# TYPE {name} counter\n{name}{{stage="{stage}"}} {value}\n'
    return parse(lines)


def test_an_ensembles_own_times_are_those_of_its_steps():
    stages = {"recommend": model(9.0), "rank": model(1.0), "rerank": model(2.0)}
    assert [times.compute_infer_us for times in models_of(stages)] == [1.0, 2.0]
    assert [times.compute_infer_us for times in models_of({"recommend": model(9.0)})] == [9.0]


def test_metrics_without_kernels_are_refused():
    with pytest.raises(ServerError, match="metrics lack recommender_kernel_rows_total"):
        kernel_us({}, {})


def test_kernel_time_is_of_one_row_over_all_stages_since_the_first_reading():
    before = read("rank", seconds=1.0, rows=100)
    after = read("rank", seconds=1.5, rows=600) | read("rerank", seconds=0.25, rows=500)
    assert kernel_us(before, after) == pytest.approx(1_000 + 500)


def axis_of(processor_ms, latency_ms, sizes=(100, 200), most_slope=growth.LINEAR):
    times = {"processor_p50_ms": processor_ms, "processor_p90_ms": processor_ms, "latency_p50_ms": latency_ms}
    return Axis(name="candidates C", sizes=list(sizes), **times, most_slope=most_slope)


def test_the_slope_is_the_exponent_of_growth(tmp_path):
    axis = axis_of([1.0, 2.0, 4.0], [1.0, 2**0.5, 2.0], sizes=(100, 200, 400))
    assert axis.processor_slope == pytest.approx(1.0)
    assert axis.latency_slope == pytest.approx(0.5)
    assert {figure.name: figure.median for figure in axis.figures} == {
        "candidates C: slope of processor time": axis.processor_slope,
        "candidates C: slope of latency": axis.latency_slope,
    }
    plots.save_growth([axis, axis], tmp_path)
    assert (tmp_path / "growth.png").stat().st_size > 1_000
    assert tables.growth_table([axis]).rows[1].cells == ("candidates C: 200", "2.000", "2.000", "1.414")


def test_what_is_linear_does_not_count_as_less():
    assert growth.SUB_LINEAR < growth.LINEAR
    for most_slope, met in ((growth.LINEAR, True), (growth.SUB_LINEAR, False)):
        axis = axis_of([1.0, 1.95], [1.0, 1.95], most_slope=most_slope)  # slopes of 0.96
        assert [figure.met for figure in axis.figures] == [met, met]


@pytest.fixture
def grow(monkeypatch, tmp_path):
    """-> call it with the candidates axis and the recalls: the command's exit code and its last line."""

    def run(axis, recalls=(1.0,)):
        found = [Figure(name=f"recall {number}", values=[r], bound=0.98, at_most=False) for number, r in enumerate(recalls)]
        monkeypatch.setattr(growth, "candidates_axis", lambda repo, rng: (axis, found))
        monkeypatch.setattr(growth, "catalogue_axis", lambda rng, step: axis_of([1.0, 1.0], [1.0, 1.0]))
        monkeypatch.setattr(cli, "new_folder", lambda: tmp_path)
        done = CliRunner().invoke(cli.app, ["growth"])
        return done.exit_code, json.loads(done.stdout.splitlines()[-1])

    return run


def test_a_missed_bound_of_growth_is_the_exit_code(grow):
    kept, steep = [1.0, 1.5], [1.0, 2.5]
    exit_code, document = grow(axis_of(kept, kept))
    assert (exit_code, document["missed"]) == (0, [])
    assert {"commit", "cores", "load_before"} <= document.keys()
    assert grow(axis_of(steep, kept))[1]["missed"] == ["candidates C: slope of processor time"]
    exit_code, document = grow(axis_of(kept, steep))
    assert (exit_code, document["missed"]) == (1, ["candidates C: slope of latency"])
    exit_code, document = grow(axis_of(kept, kept), recalls=(0.99, 0.97))
    assert (exit_code, document["missed"]) == (1, ["recall 1"])


def test_no_request_judges_a_search_that_it_widened(monkeypatch):
    asked = []
    retrieve = SimpleNamespace(search=SimpleNamespace(index=None))
    pipeline = SimpleNamespace(info=SimpleNamespace(generation=1), stages={"retrieve": retrieve})
    monkeypatch.setattr(growth, "CALLS", 4)
    monkeypatch.setattr(growth, "CANDIDATES", (100, 200))
    monkeypatch.setattr(growth, "Pipeline", SimpleNamespace(load=lambda repo: pipeline))
    monkeypatch.setattr(growth, "read_requests", lambda repo, generation: {"user_id": np.arange(9)[:, None]})
    monkeypatch.setattr(growth, "with_candidates", lambda pipeline, count: lambda inputs: None)
    monkeypatch.setattr(growth, "recorded_vectors", lambda pipeline, repo, first: np.arange(9)[first::2])
    monkeypatch.setattr(growth, "_widened", lambda search, queries, count: asked.append((count, queries.tolist())) or 0)
    monkeypatch.setattr(growth, "found", lambda search, queries, count: asked.append((count, queries.tolist())) or 0.99)
    _, recalls = growth.candidates_axis(Path(), np.random.default_rng(0))
    widened_by, judged_by = [0, 2, 4, 6, 8], [1, 3, 5, 7]
    assert asked == [(100, widened_by), (100, judged_by), (200, widened_by), (200, judged_by)]
    assert [figure.values for figure in recalls] == [[0.99], [0.99]]


def test_latency_counts_what_the_processor_does_not(monkeypatch):
    monkeypatch.setattr(growth, "CALLS", 4)
    monkeypatch.setattr(growth, "ROUNDS", 2)
    axis = growth._axis("sleepers", {1: lambda number: None, 2: lambda number: time.sleep(0.01)}, growth.LINEAR)
    assert axis.latency_p50_ms[1] > 9 > axis.processor_p50_ms[1]


def test_catalogues_of_any_size_answer_the_same_kind_of_request(monkeypatch):
    monkeypatch.setattr(growth, "CATALOGUES", (400, 800))
    monkeypatch.setattr(growth, "CALLS", 4)
    monkeypatch.setattr(growth, "ROUNDS", 2)
    said = []
    axis = growth.catalogue_axis(np.random.default_rng(0), said.append)
    assert axis.sizes == [400, 800]
    assert len(axis.processor_p50_ms) == len(axis.latency_p50_ms) == 2
    assert axis.most_slope == growth.SUB_LINEAR
    assert said == ["a catalogue of 400 items", "a catalogue of 800 items", "catalogues in turns"]
