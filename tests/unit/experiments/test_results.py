"""docs/results.md and the summary of README.md say what the result files say."""

import contextlib
import io
import json
import math

import pytest
from pydantic import ValidationError

from experiments import overload, sizing
from experiments.harness import Figure, Result
from experiments.rest_load import Answers
from experiments.results import (
    MODELS,
    PAGE,
    README,
    SUMMARY,
    describe_result,
    insert_table,
    read_results,
    write_costs,
    write_page,
    write_summary,
)
from perf.figures import print_table, tabulate_figures
from serving.contract.errors import ConfigError, ServerError


def test_the_page_is_current():
    assert PAGE.read_text() == write_page(read_results()), "run `make docs`"


def test_the_summary_of_the_readme_is_current():
    readme = README.read_text()
    assert readme == insert_table(readme, write_summary(read_results())), "run `make docs`"


def test_the_costs_of_the_models_are_current():
    page = MODELS.read_text()
    assert page == insert_table(page, write_costs(read_results())), "run `make docs`"


def test_a_models_costs_are_those_where_it_costs_most():
    def result(data: str, one_us: float) -> Result:
        figures = [
            Figure(name="graph: one request", values=[one_us], unit="µs", at_most=130.0),
            Figure(name="graph: 16 requests", values=[10 * one_us], unit="µs", at_most=1_650.0),
            Figure(name="graph: one request over its stage", values=[0.25]),
            Figure(name="stage retrieve: one request", values=[4 * one_us], unit="µs"),
        ]
        records = [figure.to_record() for figure in figures]
        return Result(name=data, title=f"What each model costs: {data}", command="", conditions="", figures=records)

    table = write_costs({"models-a": result("a", 20.0), "models-b": result("b:c", 30.0), "other": result("d", 99.0)})
    assert table.splitlines()[2:] == ["| `graph` | 30 µs | 130 µs | 300 µs | 0.25 | b:c |"]


def test_figures_of_one_measure_stand_beside_each_other_and_none_is_left_out():
    figures = [
        Figure(name="one client: p99", values=[1.0, 2.0, 6.0], unit="ms", at_most=3.0),
        Figure(name="one client: errors", values=[2.0]),
        Figure(name="eight clients: p99", values=[4.0], unit="ms", at_most=3.0),
        Figure(name="all: lost", values=[0.0]),
        Figure(name="eight over one", values=[2.0]),
    ]
    records = [figure.to_record() for figure in figures]
    section = describe_result(Result(name="new", title="New", command="run", conditions="none", figures=records))
    assert section.splitlines()[4:] == [
        "| | p99 |",
        "|---|---|",
        "| one client | 2 ms (1 to 6), met: at most 3 |",
        "| eight clients | 4 ms, **missed**: at most 3 |",
        "",
        "| figure | value | low to high | bound | |",
        "|---|---|---|---|---|",
        "| one client: errors | 2 |  |  |  |",
        "| all: lost | 0 |  |  |  |",
        "| eight over one | 2 |  |  |  |",
    ]


def test_goodput_under_overload_is_held_to_one_bound():
    """Over REST and over gRPC, with a deadline and without: a failure is nowhere shown as a mere number."""
    bounds = {record.figure: record.at_least for record in read_results()["overload"].figures if "goodput" in record.figure}
    assert len(bounds) == 8
    assert set(bounds.values()) == {0.8}


def test_the_summary_is_short():
    assert len(SUMMARY) <= 12


def test_a_readme_without_markers_is_refused():
    with pytest.raises(ConfigError, match="lacks the markers"):
        insert_table("# A readme", "a table")


def test_a_figure_that_was_not_measured_is_refused():
    with pytest.raises(ConfigError, match="lacks the figure"):
        write_summary({})


@pytest.mark.parametrize(
    ("values", "bounds", "met"),
    [
        ([1.0, 3.0, 9.0], {"at_most": 3.0}, True),
        ([1.0, 3.1, 9.0], {"at_most": 3.0}, False),
        ([2.0], {"at_least": 2.5}, False),
        ([0.96], {"at_least": 0.945, "at_most": 0.96}, True),
        ([0.97], {"at_least": 0.945, "at_most": 0.96}, False),
        ([0.98997], {"at_least": 0.99}, False),  # four digits of it are the bound
        ([1.10004], {"at_most": 1.1}, False),
        ([5.0], {}, None),
    ],
)
def test_the_median_is_judged(values, bounds, met):
    figure = Figure(name="a figure", values=values, **bounds)
    assert figure.met is met
    assert figure.to_record().met is met


@pytest.mark.parametrize(("bounds", "met"), [({}, None), ({"at_most": 3.0}, False), ({"at_least": 0.0}, False)])
def test_a_figure_without_values_is_written_read_and_shown_as_not_measured(bounds, met, tmp_path):
    figure = Figure(name="a figure", values=[], unit="ms", **bounds)
    assert figure.met is met
    result = Result(name="new", title="New", command="run", conditions="none", figures=[figure.to_record()])
    result.write(tmp_path)
    assert read_results(tmp_path) == {"new": result}
    assert result.figures[0].met is met
    assert "| a figure | not measured |" in describe_result(result)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        print_table(tabulate_figures("New", [figure]))
    assert "not measured" in printed.getvalue()


@pytest.mark.parametrize("values", [[math.nan], [1.0, math.nan], [math.inf]])
def test_a_figure_that_is_no_finite_number_is_not_measured_and_misses_its_bound(values, tmp_path):
    figure = Figure(name="a figure", values=values, at_least=1.0)
    assert figure.met is False
    result = Result(name="new", title="New", command="run", conditions="none", figures=[figure.to_record()])
    json.dumps(result.model_dump(), allow_nan=False)  # its last line is JSON
    result.write(tmp_path)
    assert "| a figure | not measured |  | at least 1 | **missed** |" in describe_result(read_results(tmp_path)["new"])


def test_a_bound_must_be_finite_because_a_result_file_would_be_without_it():
    with pytest.raises(ValidationError, match="finite"):
        Figure(name="a figure", values=[1.0], at_most=math.nan)
    with pytest.raises(ServerError, match="answered none of 3 requests"):  # before its p99 becomes a bound
        overload.compute_idle_ms(Answers.empty(3))


def test_a_damaged_result_is_named(tmp_path):
    Result(name="new", title="New", command="run", conditions="none", figures=[]).write(tmp_path)
    (tmp_path / "old.json").write_text('{"name": "ol')
    with pytest.raises(ConfigError, match=r"old\.json is no readable result"):
        read_results(tmp_path)


def test_figures_of_another_machine_are_not_divided_by_the_cores_of_this_one():
    results = read_results()
    moved = results["overhead-200"].model_copy(
        update={"conditions": "5 rounds in turns; 2026-11-27, 16 cores, load average 2.1"}
    )
    with pytest.raises(ConfigError, match="was not measured on 2 cores"):
        sizing.write_page(results | {"overhead-200": moved})


def test_a_result_without_a_section_is_refused():
    result = Result(name="new", title="New", command="python -m experiments.new", conditions="none", figures=[])
    with pytest.raises(ConfigError, match="No section"):
        write_page({"new": result})


def test_the_sizing_page_is_current():
    assert sizing.PAGE.read_text() == sizing.write_page(read_results()), "run `make docs`"


def test_nodes_memory_and_cost_follow_from_what_was_measured():
    measured = sizing.Measured(500.0, 1_000.0, 20.0, 1e9, 1_000.0, 2_000.0, growth=0.5)
    node = sizing.Node(cores=10, memory_gb=64, dollars_per_h=3.6)
    size = sizing.compute_size(measured, node, 10_000, users=1_000_000, items=100_000)
    # 5,000/s a node, 3,333/s with gateways, and one node to spare.
    assert (size.nodes, size.rest_nodes, size.memory_gb) == (3, 4, 5.0 + 1.0 + 0.2)
    assert abs(size.dollars - 3 * 3.6 / 3_600 / 10_000 * 1e6) < 1e-9
    assert abs(size.rest_dollars - 4 * 3.6 / 3_600 / 10_000 * 1e6) < 1e-9
    four_times_the_items = sizing.compute_size(measured, node, 10_000, 1_000_000, 400_000)
    assert four_times_the_items.nodes == 5  # each is half as fast
    assert sizing.compute_size(measured, node, 1, 10, 10).nodes == 2
