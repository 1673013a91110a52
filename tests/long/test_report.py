"""The report of a run with every picture, its notes and tables."""

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import typer
from typer.testing import CliRunner

from perf import cli, slo
from perf.report import plots, tables
from perf.report.page import write_report
from perf.report.results import Run, summarise
from tests.unit.perf.conftest import stage_times


def test_the_report_is_one_file_with_every_picture(run, tmp_path):
    verdicts = slo.judge(slo.read_slo(), summarise(run))
    page = write_report(run, tmp_path, verdicts).read_text()
    pictures = {path.stem for path in tmp_path.glob("*.png")}
    assert pictures == {"latency_throughput", "stage_breakdown", "histogram", "bursts", "batch_sizes", "memory"}
    assert page.count("data:image/png;base64,") == len(pictures)
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert "a &lt;label&gt;" in page
    assert "The machine was busy" in page
    assert [name for name in run.hit_rates if f"<td>{name}</td>" in page] == list(run.hit_rates) != []
    for verdict in verdicts:
        assert verdict.key in page


@pytest.fixture
def loads(run) -> Run:
    """A run with nothing but open loads."""
    return run.model_copy(update={"closed": [], "yardstick": None, "memory": [], "hit_rates": {}})


def test_a_report_shows_what_there_is(loads, tmp_path):
    bare = loads.model_copy(update={"open": []})
    page = write_report(bare, tmp_path, []).read_text()
    assert "data:image/png" not in page
    assert not list(tmp_path.glob("*.png"))


def test_a_fused_model_is_shown_as_what_it_is(run):
    closed = [level.model_copy(update={"stages": {"recommend": stage_times(1.0)}}) for level in run.closed[:2]]
    fused = run.model_copy(update={"closed": closed})
    assert [row.cells[0] for row in tables.make_stage_table(fused).rows] == ["1 clients, recommend", "8 clients, recommend"]
    with plt.rc_context(plots.STYLE):
        stages, sizes = plots.draw_stage_breakdown(fused, Path()), plots.draw_batch_sizes(fused, Path())
    assert stages is not None
    assert sizes is not None
    bars = {container.get_label(): [bar.get_width() for bar in container] for container in stages.axes[0].containers}
    assert len(sizes.axes) == 1
    assert bars["recommend: queue"] == pytest.approx([0.1, 0.1])
    assert bars["recommend: work"] == pytest.approx([0.45, 0.45])
    plt.close("all")


@pytest.mark.parametrize("change", [{"transport": "http"}, {"mode": "request_rate"}])
def test_a_sweep_of_one_kind_has_its_curve(run, loads, tmp_path, change):
    levels = [level.model_copy(update=change) for level in run.closed[:2]]
    write_report(loads.model_copy(update={"closed": levels, "open": []}), tmp_path, [])
    assert {"latency_throughput.png", "stage_breakdown.png"} <= {path.name for path in tmp_path.glob("*.png")}


def test_a_single_load_has_its_pictures(loads, tmp_path):
    one = loads.open[-1].model_copy(update={"name": "bursts 40/s"})
    write_report(loads.model_copy(update={"open": [one]}), tmp_path, [])
    assert {"histogram.png", "bursts.png"} <= {path.name for path in tmp_path.glob("*.png")}


def test_a_load_whose_answers_differ_is_broken_without_a_bound(loads, tmp_path, capsys):
    one = loads.open[0].model_copy(update={"compared": 9, "differing_answers": "1 of 9 id lists differ"})
    with pytest.raises(typer.Exit):
        cli.finish_run(loads.model_copy(update={"open": [one]}), tmp_path, {})
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["broken"] == ["answers_equal"]


def test_the_report_is_drawn_again_and_ends_in_one_line_of_json(loads, tmp_path):
    folder = tmp_path / "results" / "20260101-000000"
    loads.save(folder)
    for raw in tmp_path.glob("*.npz"):
        raw.rename(folder / raw.name)
    answer = CliRunner().invoke(cli.app, ["report", "--run", str(folder)])
    assert answer.exit_code == 0, answer.exception
    assert isinstance(json.loads(answer.stdout.splitlines()[-1]), dict)
    assert (folder / "report.html").exists()
