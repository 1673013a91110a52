"""A run from end to end without a server: summary, JSON line, gate, report, comparison, interleaving, command line."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from typer.testing import CliRunner

from perf import ab, cli, plots, report, results, slo, tables
from perf.latency import Latency
from perf.memory import ProcessMemory
from perf.results import Closed, Machine, Open, Run, Yardstick, config_hash, last_line, latest_run, load_run, summary
from perf.server_stats import StageTimes
from stages.contract import STAGES
from stages.errors import ConfigError


def stage_times(scale: float) -> StageTimes:
    return StageTimes(
        requests=100,
        failed=0,
        queue_us=100 * scale,
        compute_input_us=20,
        compute_infer_us=400 * scale,
        compute_output_us=30,
        calls_by_batch={1: 20, 4: 20},
    )


@pytest.fixture
def run(tmp_path):
    """A run with one of everything; raw files lie in tmp_path."""
    rng = np.random.default_rng(0)
    stages = {stage: stage_times(1.0) for stage in STAGES}
    closed = []
    for model, transport, mode, values in (
        ("recommend", "grpc", "concurrency", (1, 8)),
        ("recommend", "http", "concurrency", (8,)),
        ("rank", "grpc", "concurrency", (1, 8)),
    ):
        for value in values:
            latency = Latency.of(rng.integers(2_000_000, 9_000_000, 300) * value)
            closed.append(
                Closed(
                    model=model,
                    transport=transport,
                    mode=mode,
                    value=value,
                    achieved_rate=100.0 * value**0.5,
                    spread=0.1,
                    latency=latency,
                    stages=stages,
                    raw="x.npz",
                )
            )
    loads = []
    for name in ("poisson 25 %", "poisson 50 %", "volleys of 8", "bursts x10"):
        due_ns = np.sort(rng.integers(0, 10**10, 400))
        answered_ns = due_ns + rng.integers(3_000_000, 30_000_000, 400)
        answered_ns[:2] = -1
        raw = f"{name.split()[0]}.npz"
        np.savez(
            tmp_path / raw, **{"due_ns": due_ns, "sent_ns": due_ns, "answered_ns": answered_ns, "in a burst": due_ns > 5e9}
        )
        latency = Latency.of((answered_ns - due_ns)[2:])
        loads.append(
            Open(
                name=name,
                offered_rate=40.0,
                achieved_rate=39.8,
                duration_s=10.0,
                latency=latency,
                by_class={"in a burst": latency} if "bursts" in name else {},
                errors={"UNAVAILABLE: no": 2},
                error_share=0.005,
                unsent=0,
                send_late=latency,
                generator_cores=0.1,
                stages=stages,
                raw=raw,
            )
        )
    return Run(
        started="2026-01-01T00:00:00+00:00",
        label="a <label>",
        url="localhost:1",
        repo="repo",
        generation=7,
        commit="abc1234",
        config_hash="0123456789ab",
        machine=Machine(cpu="a CPU", cores=2, load_before=3.0, kernel="6", python="3.11"),
        floor_p50_ms=0.4,
        closed=closed,
        open=loads,
        yardstick=Yardstick(
            in_process_p50_ms=[1.0, 2.0, 1.5],
            served_p50_ms=[3.0, 5.0, 3.0],
            in_process_rate=[1000, 2000, 1000],
            in_process_batch=32,
            served_rate=[500, 600, 700],
            served_clients=16,
        ),
        memory=[ProcessMemory(name="tritonserver", pid=1, pss_mib=100, rss_mib=150)],
        hit_rates={"cache model=rank": 0.25},
    )


def test_the_summary_is_flat_and_complete(run):
    document = summary(run)
    half = run.open_load("poisson 50 %")
    assert document["peak_rate"] == pytest.approx(282.84, abs=0.01)
    assert document["peak_clients"] == 8
    assert document["p99_ms"] == round(half.latency.p99_ms, 4)
    assert document["p99_over_p50"] == pytest.approx(half.latency.p99_ms / half.latency.p50_ms, abs=1e-3)
    assert document["error_share"] == 0.005
    assert document["memory_mib"] == 100
    assert document["overhead_p50_ms"] == 2.0  # the median of 2, 3 and 1.5
    assert document["throughput_share"] == 0.5  # the median of 0.5, 0.3 and 0.7
    assert document["hit_rates"] == {"cache model=rank": 0.25}
    assert json.loads(last_line(document)) == document
    assert "\n" not in last_line(document)


def test_what_was_not_measured_is_not_in_the_summary(run):
    bare = run.model_copy(update={"closed": [], "open": [], "yardstick": None, "memory": [], "hit_rates": {}})
    assert {"peak_rate", "p99_ms", "overhead_p50_ms", "memory_mib", "hit_rates"}.isdisjoint(summary(bare))


def test_a_run_is_read_back_as_written(run, tmp_path):
    run.save(tmp_path)
    assert load_run(tmp_path) == run
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ConfigError, match="no readable"):
        load_run(tmp_path)


def test_the_latest_run_is_found(run, tmp_path):
    with pytest.raises(ConfigError, match="make perf"):
        latest_run(tmp_path / "results")
    for stamp in ("20260101-000000", "20260102-000000"):
        run.save(tmp_path / "results" / stamp)
    assert latest_run(tmp_path / "results").name == "20260102-000000"


def test_the_config_hash_tells_settings_apart(tmp_path):
    (tmp_path / "rank").mkdir()
    (tmp_path / "rank" / "config.pbtxt").write_text("a")
    before = config_hash(tmp_path)
    assert before == config_hash(tmp_path)
    (tmp_path / "rank" / "config.pbtxt").write_text("b")
    assert config_hash(tmp_path) != before


def bound(**side) -> slo.Bound:
    return slo.Bound(**side)


@pytest.mark.parametrize(
    ("side", "value", "kept"),
    [
        ({"at_most": 3.0}, 3.0, True),
        ({"at_most": 3.0}, 3.1, False),
        ({"at_least": 3.0}, 3.0, True),
        ({"at_least": 3.0}, 2.9, False),
        ({"at_most": 3.0}, None, False),
        ({"at_most": 3.0}, float("nan"), False),
    ],
)
def test_a_bound_is_kept_or_broken(side, value, kept):
    (verdict,) = slo.judge({"p99_ms": bound(**side)}, {} if value is None else {"p99_ms": value})
    assert verdict.kept is kept


def test_text_where_a_number_belongs_is_broken():
    (verdict,) = slo.judge({"commit": bound(at_most=1)}, {"commit": "abc"})
    assert not verdict.kept


def test_the_bounds_of_the_project_are_read_and_each_speaks_of_something_measured(run):
    bounds = slo.read_slo()
    assert bounds.keys() <= summary(run).keys()
    assert all(entry.why for entry in bounds.values())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[p99_ms]\n", "p99_ms: .*either at_most or at_least"),
        ("[p99_ms]\nat_most = 1\nat_least = 2\n", "p99_ms: .*either at_most or at_least"),
        ("[p99_ms]\nat_most = 'x'\n", "p99_ms.at_most: .*valid number"),
        ("[p99_ms]\nbelow = 1\n", "p99_ms.below: "),
        ("not toml", "not valid TOML"),
        ("p99_ms = 3", "p99_ms: "),
    ],
)
def test_wrong_bounds_are_refused(tmp_path, text, message):
    (tmp_path / "slo.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        slo.read_slo(tmp_path / "slo.toml")


@pytest.mark.parametrize(
    ("text", "message"), [("# nothing\n", "holds no bounds"), ("[p99_msec]\nat_most = 1\n", "no run measures: p99_msec")]
)
def test_bounds_of_nothing_let_nothing_through(tmp_path, text, message):
    (tmp_path / "slo.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        slo.read_slo(tmp_path / "slo.toml")


def test_what_a_run_can_be_held_to_is_a_number_of_its_summary(run):
    assert all(isinstance(summary(run)[key], int | float) for key in slo.OBJECTIVES)


def test_bounds_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        slo.read_slo(tmp_path / "slo.toml")


def test_the_report_is_one_file_with_every_picture(run, tmp_path):
    verdicts = slo.judge(slo.read_slo(), summary(run))
    page = report.write_report(run, tmp_path, verdicts).read_text()
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == {
        "latency_throughput",
        "stage_breakdown",
        "histogram",
        "bursts",
        "yardstick",
        "stage_curves",
        "batch_sizes",
        "memory",
    }
    assert page.count("data:image/png;base64,") == len(pictures)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "a &lt;label&gt;" in page
    assert "The machine was busy" in page
    for verdict in verdicts:
        assert verdict.key in page


def test_a_report_shows_what_there_is(run, tmp_path):
    bare = run.model_copy(update={"closed": [], "open": [], "yardstick": None, "memory": [], "hit_rates": {}})
    page = report.write_report(bare, tmp_path, []).read_text()
    assert "data:image/png" not in page
    assert not list(tmp_path.glob("*.png"))


def test_a_fused_model_is_shown_as_what_it_is(run):
    closed = [level.model_copy(update={"stages": {"recommend": stage_times(1.0)}}) for level in run.closed[:2]]
    fused = run.model_copy(update={"closed": closed})
    assert [row.cells[0] for row in tables.stage_table(fused).rows] == ["1 clients, recommend", "8 clients, recommend"]
    with plt.rc_context(plots.STYLE):
        bars = {c.get_label(): [bar.get_width() for bar in c] for c in plots.stage_breakdown(fused, Path()).axes[0].containers}
        assert len(plots.batch_sizes(fused, Path()).axes) == 1
    assert bars["recommend: queue"] == pytest.approx([0.1, 0.1])
    assert bars["recommend: work"] == pytest.approx([0.45, 0.45])
    plt.close("all")


def test_an_ensemble_runs_no_kernels_of_its_own(run):
    level = run.closed[0].model_copy(update={"stages": {"recommend": stage_times(4.0)} | run.closed[0].stages})
    assert tuple(level.kernels) == STAGES


@pytest.mark.parametrize("change", [{"transport": "http"}, {"mode": "request_rate"}])
def test_a_sweep_of_one_kind_has_its_curve(run, tmp_path, change):
    levels = [level.model_copy(update=change) for level in run.closed[:2]]
    report.write_report(run.model_copy(update={"closed": levels, "open": []}), tmp_path, [])
    assert {"latency_throughput.png", "stage_breakdown.png"} <= {path.name for path in tmp_path.glob("*.png")}


def test_a_single_load_has_its_pictures(run, tmp_path):
    one = run.open[-1].model_copy(update={"name": "bursts 40/s"})
    report.write_report(run.model_copy(update={"closed": [], "open": [one]}), tmp_path, [])
    assert {"histogram.png", "bursts.png"} <= {path.name for path in tmp_path.glob("*.png")}


def test_a_single_load_is_what_its_summary_tells(run):
    one = run.open[-1].model_copy(update={"name": "bursts 40/s", "offered_rate": 68.0})
    document = summary(run.model_copy(update={"closed": [], "open": [one]}))
    assert (document["offered_rate"], document["p99_ms"]) == (68.0, round(one.latency.p99_ms, 4))
    two = summary(run.model_copy(update={"open": [one, one.model_copy(update={"name": "poisson 5/s"})]}))
    assert "p99_ms" not in two


def test_ratios_of_unequal_answers_are_no_result(run):
    assert summary(run)["answers_equal"]
    assert not any("do not count" in note for note in report.notes(run))
    other = run.yardstick.model_copy(update={"differing_answers": "2 of 256 id lists differ"})
    differing = run.model_copy(update={"yardstick": other})
    assert not summary(differing)["answers_equal"]
    assert any("(2 of 256 id lists differ): the ratios between them do not count" in note for note in report.notes(differing))


@pytest.mark.parametrize(("levels", "told"), [(0, True), (2, False)])
def test_priorities_that_nobody_tells_apart_are_no_result(run, levels, told):
    bulk = run.open[0].model_copy(update={"by_class": {"bulk": run.open[0].latency}})
    mixed = run.model_copy(update={"open": [bulk], "priority_levels": levels})
    assert any("tells priorities apart" in note for note in report.notes(mixed)) is told


def test_priority_levels_are_read_from_the_configs(tmp_path):
    for model, levels in (("rank", 0), ("preprocess", 2)):
        (tmp_path / model).mkdir()
        (tmp_path / model / "config.pbtxt").write_text(f"dynamic_batching {{ priority_levels: {levels} }}")
    assert results.priority_levels(tmp_path) == 2


def test_two_runs_are_compared_by_objective(run):
    slower = run.model_copy(update={"yardstick": run.yardstick.model_copy(update={"served_p50_ms": [5.0, 6.0, 5.5]})})
    rows = {row.cells[0]: row.cells[1:] for row in tables.objectives_table(run, slower).rows}
    assert rows["overhead_p50_ms"] == ("2", "4", "2.00")
    assert (
        tables.comparison_tables(run.model_copy(update={"closed": [], "open": [], "yardstick": None, "memory": []}), run) == []
    )


def test_two_runs_are_compared_by_ratio(run, tmp_path):
    faster = [level.model_copy(update={"achieved_rate": level.achieved_rate * 2}) for level in run.closed]
    table = tables.comparison_table(run, run.model_copy(update={"closed": faster[:-1]}))
    assert len(table.rows) == len(run.closed) - 1
    assert {row.cells[3] for row in table.rows} == {"2.00"}
    assert "data:image/png" in report.write_comparison(run, run, tmp_path).read_text()


def test_interleaving_alternates_and_pairs_by_round():
    order = []

    def measured(name, values):
        rates = iter(values)

        def call():
            order.append(name)
            return {"rate": next(rates)}

        return call

    (ratio,) = ab.interleave(measured("A", [10.0, 100.0, 20.0]), measured("B", [20.0, 150.0, 60.0]), 3, lambda _: None)
    assert order == ["A", "B", "B", "A", "A", "B"]
    assert ratio.by_round.tolist() == [2.0, 1.5, 3.0]
    assert (ratio.median, ratio.low, ratio.high) == (2.0, 1.5, 3.0)
    assert ratio.certain
    assert not ab.Ratio(metric="x", a=[1, 1], b=[0.9, 1.2]).certain
    assert "within the noise" in tables.ratio_table([ab.Ratio(metric="x", a=[1, 1], b=[0.9, 1.2])]).rows[0].cells


def test_neither_a_folder_nor_a_commit_is_refused():
    with pytest.raises(ConfigError, match="neither a repository folder nor a commit"), ab.repository("no-such-thing", "x"):
        pass


@pytest.fixture
def invoke(run, tmp_path, monkeypatch):
    folder = tmp_path / "results" / "20260101-000000"
    run.save(folder)
    for raw in tmp_path.glob("*.npz"):
        (folder / raw.name).write_bytes(raw.read_bytes())
    monkeypatch.setattr(cli, "latest_run", lambda: folder)
    return lambda *arguments, **options: CliRunner().invoke(cli.app, [str(argument) for argument in arguments], **options)


def slo_file(folder: Path, text: str) -> Path:
    (folder / "slo.toml").write_text(text)
    return folder / "slo.toml"


@pytest.mark.parametrize(("at_most", "exit_code", "word"), [(1_000, 0, "kept"), (0.001, 1, "broken")])
def test_the_gate_answers_with_its_exit_code_and_a_last_line(invoke, tmp_path, at_most, exit_code, word):
    answer = invoke("gate", "--slo", slo_file(tmp_path, f"[p99_ms]\nat_most = {at_most}\n"))
    assert answer.exit_code == exit_code
    document = json.loads(answer.stdout.splitlines()[-1])
    assert document["slo"] == word
    assert document["broken"] == ([] if exit_code == 0 else ["p99_ms"])


def test_the_gate_reads_the_last_line_of_a_log(invoke, tmp_path):
    bounds = slo_file(tmp_path, "[p99_ms]\nat_most = 5\n")
    (tmp_path / "log").write_text('a table\n{"p99_ms": 4.0}\n')
    assert invoke("gate", tmp_path / "log", "--slo", bounds).exit_code == 0
    assert invoke("gate", "-", "--slo", bounds, input='{"p99_ms": 6.0}').exit_code == 1
    (tmp_path / "log").write_text("a table\n")
    assert isinstance(invoke("gate", tmp_path / "log", "--slo", bounds).exception, ConfigError)


def test_report_and_compare_end_in_one_line_of_json(invoke, tmp_path):
    folder = tmp_path / "results" / "20260101-000000"
    for arguments in (("report", "--run", folder), ("compare", folder, folder)):
        answer = invoke(*arguments)
        assert answer.exit_code == 0, answer.exception
        assert isinstance(json.loads(answer.stdout.splitlines()[-1]), dict)
    assert (folder / "report.html").exists()
    assert (folder / "comparison.html").exists()


@pytest.mark.parametrize("text", ["", "a,b", "0", "1,-2"])
def test_levels_must_be_positive_numbers(invoke, text):
    assert isinstance(invoke("sweep", "--clients", text).exception, ConfigError)


@pytest.mark.parametrize(
    ("model", "stages", "message"),
    [("rank", (), "fused layout has no model 'rank' of its own"), ("renk", STAGES, "these are: recommend, preprocess")],
)
def test_a_model_that_is_not_served_is_refused(model, stages, message):
    with pytest.raises(ConfigError, match=message):
        cli._require_model(model, stages)


def test_commits_are_told(tmp_path):
    assert results.commit_of(tmp_path) == ""
    assert re.fullmatch(r"[0-9a-f]{7,}\+?", results.commit_of())
