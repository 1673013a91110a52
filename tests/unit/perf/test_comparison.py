"""Two runs, or two repositories in turns: by objective, by ratio, by round."""

import pytest

from perf import ab
from perf.figure import Ratio
from perf.report import tables
from perf.report.page import write_comparison
from serving.contract.errors import ConfigError


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
    assert "data:image/png" in write_comparison(run, run, tmp_path).read_text()


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
    assert not Ratio(metric="x", a=[1, 1], b=[0.9, 1.2]).certain
    assert "within the noise" in tables.ratio_table([Ratio(metric="x", a=[1, 1], b=[0.9, 1.2])]).rows[0].cells


def test_neither_a_folder_nor_a_commit_is_refused():
    with pytest.raises(ConfigError, match="neither a repository folder nor a commit"), ab.repository("no-such-thing", "x"):
        pass
