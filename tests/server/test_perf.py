"""The measuring instruments against the real server: what they send is answered, and what they report adds up. No timings."""

import time
from dataclasses import replace

import numpy as np
import pytest

from experiments.overhead import copy_with_empty_stages
from perf import ab, sweep
from perf.answers import ask_server
from perf.bench import new_bench
from perf.in_process import InProcess
from perf.load import schedule
from perf.load.open_loop import measure_floor_ns
from perf.load.workload import compute_stage_inputs, read_requests
from perf.observe import compute_hit_rates, read_memory, read_samples
from perf.report.results import load_run
from perf.target import find_site, own_server, read_site, serve
from serving.contract.errors import ConfigError, ServerError
from serving.contract.tensors import ENSEMBLE, LIVE_MODELS, STAGES, unpack_records
from serving.pipeline import Pipeline
from tests.present import present

WINDOW_S, SHORT_S = 1.0, 0.8  # perf_analyzer gives up where nothing is answered in one of three windows


@pytest.fixture
def bench(server, tmp_path):
    return new_bench(read_site(server.state), "test", tmp_path / "run")


def test_perf_analyzer_measures_the_ensemble(bench):
    level = bench.add_closed(ENSEMBLE, "grpc", "concurrency", 4, WINDOW_S)
    assert level.stages.keys() == {*STAGES, ENSEMBLE}
    for name in STAGES:
        times = level.stages[name]
        assert times.failed == 0
        assert sum(size * calls for size, calls in times.calls_by_batch.items()) == times.requests
        assert times.requests >= present(level.latency).count
    with np.load(bench.folder / level.raw) as raw:
        assert len(raw["latency_ns"]) == present(level.latency).count > 0
    assert load_run(bench.folder).closed == [level]


def test_a_stage_is_swept_over_every_transport_and_by_rate(bench):
    stage, said = "retrieve", list[str]()
    sweep.sweep_stage(bench, stage, SHORT_S, said.append)
    loads = {(level.transport, level.mode) for level in bench.run.closed}
    assert loads == {("grpc", "concurrency"), ("http", "concurrency"), ("grpc", "request_rate")}
    assert len(bench.run.closed) == len(said) == sweep.STAGE_LEVELS
    for level in bench.run.closed:
        assert level.stages.keys() == {level.model} == {stage}
        times = level.stages[stage]
        assert times.failed == 0
        assert sum(size * calls for size, calls in times.calls_by_batch.items()) == times.requests
        assert times.requests >= present(level.latency).count
    raw = [level.raw for level in bench.run.closed]
    assert all(raw)
    assert len(set(raw)) == len(raw)


def test_every_due_request_is_sent_and_answered(bench):
    scenario = sweep.Scenario(
        "everything",
        lambda rng: schedule.draw_bursts(15.0, 4.0, rng, every_s=2.0),
        4.0,
        cold_share=0.3,
        in_burst=lambda due_s: schedule.is_in_burst(due_s, every_s=2.0),
    )
    load = sweep.add_open(bench, scenario)
    assert (load.errors, load.error_share, load.unsent, load.degraded) == ({}, 0.0, 0, 0)
    assert load.stages["rerank"].requests == present(load.latency).count == present(load.send_late).count
    assert (load.compared, load.differing_answers) == (load.by_class["known users"].count, "")
    for pair in (("known users", "cold starts"), ("between bursts", "in a burst")):
        assert sum(load.by_class[name].count for name in pair) == present(load.latency).count


def test_an_answer_under_load_that_is_not_the_recorded_one_is_told(bench):
    bench.answers = bench.answers | {"scores": bench.answers["scores"] + np.float32(0.5)}
    load = sweep.add_open(bench, sweep.Scenario("other", lambda rng: schedule.draw_poisson(20.0, 1.0, rng), 1.0))
    assert load.differing_answers == "scores differ by up to 0.5"
    assert bench.run.differing_answers == "test, other: scores differ by up to 0.5"


def test_errors_of_the_server_are_errors_of_the_load(bench):
    requests = bench.requests
    bench.requests = requests | {"temperature": np.full_like(requests["temperature"], np.inf)}
    load = sweep.add_open(bench, sweep.Scenario("refused", lambda rng: schedule.draw_poisson(20.0, 1.0, rng), 1.0))
    assert (load.error_share, load.compared, load.differing_answers) == (1.0, 0, "")
    assert load.latency is None
    (message,) = load.errors
    assert message.startswith("INVALID_ARGUMENT")


def test_stage_inputs_are_the_in_process_tensors(bench):
    """The outputs of served stages are compared with those of the same stages in this process."""
    requests = {name: rows[:40] for name, rows in read_requests(bench.site.repo, bench.site.generation).items()}
    trace = Pipeline.load(bench.site.repo).trace(requests)
    for stage, tensors in compute_stage_inputs(bench.site.grpc_url, bench.specs, bench.site.generation, requests).items():
        for name, served in unpack_records(bench.specs[stage].inputs, tensors).items():
            if name in requests or name == "lineage":  # the trace keeps that of the last stage that has one
                continue
            np.testing.assert_allclose(served, trace[name], rtol=1e-5, atol=1e-5, err_msg=f"{stage}: {name}")


def test_the_yardstick_runs_the_published_code_on_all_workers(bench):
    with InProcess(bench.site.repo, bench.site.generation, bench.requests, workers=2) as pipeline:
        assert pipeline.measure(batch=8, seconds=0.1).rate > 0
        assert pipeline.measure(batch=1, seconds=0.1, workers=1).p50_ms > 0


def test_a_yardstick_that_cannot_run_says_why(bench):
    with (
        pytest.raises(ServerError, match="does not run in its own process"),
        InProcess(bench.site.repo, 9999, bench.requests, workers=1),
    ):
        pass


HELPERS = ("server.", "live")  # modules of processes that look after the live store now and then


def test_memory_names_the_server_and_each_instance(bench):
    processes = read_memory(bench.site.tag)
    assert processes[0].name == "tritonserver"
    instances = [process.name.rsplit("_", 2)[0] for process in processes[1:] if not process.name.startswith(HELPERS)]
    assert sorted(instances) == sorted((*STAGES, *LIVE_MODELS))
    assert all(0 < process.pss_mib <= process.rss_mib for process in processes)


def test_a_repository_answers_like_itself(bench, tmp_path):
    assert ab.compare_recorded_answers(bench, new_bench(bench.site, "again", tmp_path / "again")) == ""


def test_hit_rates_of_the_tables_are_on_the_servers_page(bench):
    before = read_samples(bench.site.metrics_url)
    bench.measure_clients(2, WINDOW_S)
    deadline_s = time.monotonic() + 10
    while not (rates := compute_hit_rates(before, read_samples(bench.site.metrics_url))):  # the models report once a second
        assert time.monotonic() < deadline_s, "no row was looked up"
        time.sleep(0.2)
    assert rates.keys() <= {"tables, l1", "tables, l2", "tables, l3"}
    assert sum(rates.values()) > 0


def test_the_floor_is_a_call_that_does_nothing(bench):
    assert (measure_floor_ns(bench.site.grpc_url) > 0).all()


def test_empty_stages_answer_zeros_through_the_same_models_and_tensors(repository, server, tmp_path):
    copy_with_empty_stages(repository, tmp_path / "empty")
    with own_server(tmp_path / "empty") as idle:
        site = replace(read_site(idle.state), repo=repository)
        bench = new_bench(site, "empty", tmp_path / "run")
        level = bench.measure_clients(2, WINDOW_S)
        assert present(level.latency).count > 0
        assert level.stages.keys() == set(STAGES) | {ENSEMBLE}
        rows = {name: array[:2] for name, array in read_requests(repository, site.generation).items()}
        answer = ask_server(site.grpc_url, bench.specs[ENSEMBLE], rows)
    for tensor in bench.specs[ENSEMBLE].outputs:
        assert answer[tensor.name].shape == (2, *tensor.dims)
        assert answer[tensor.name].dtype == tensor.numpy_dtype
        assert not answer[tensor.name].any()


def test_a_running_server_is_measured_as_it_is(server, repository):
    with serve(server.grpc_url, repository) as site:
        assert site.grpc_url == server.grpc_url
        assert site.generation == read_site(server.state).generation
    assert find_site(server.grpc_url, repository).tag is None  # its state file is elsewhere: it is not one of ours


def test_another_measurement_is_told(server, repository, fused_repository, capsys):
    with own_server(fused_repository), serve(server.grpc_url, repository):
        assert "another measurement runs on this machine" in capsys.readouterr().err


def test_another_machine_is_not_measured(repository):
    with pytest.raises(ConfigError, match="loopback"), serve("10.0.0.1:8001", repository):
        pass
