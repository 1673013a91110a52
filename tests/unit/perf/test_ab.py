"""Two repositories in turns: their ratio by round, and what is refused."""

import pytest

from perf import ab
from perf.ratio import Ratio
from perf.report import tables
from serving.contract.errors import ConfigError


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
    assert "within the noise" in tables.make_ratio_table([Ratio(metric="x", a=[1, 1], b=[0.9, 1.2])]).rows[0].cells


def test_neither_a_folder_nor_a_commit_is_refused():
    with pytest.raises(ConfigError, match="neither a repository folder nor a commit"), ab.repository("no-such-thing", "x"):
        pass
