"""Bounds: read, refused, and kept or broken by the summary of a run."""

import pytest

from perf import slo
from perf.report.results import summarise
from serving.contract.errors import ConfigError


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
        ({"at_most": 3.0}, "abc", False),
    ],
)
def test_a_bound_is_kept_or_broken(side, value, kept):
    (verdict,) = slo.judge({"p99_ms": bound(**side)}, {} if value is None else {"p99_ms": value})
    assert verdict.kept is kept


def test_the_bounds_of_the_project_are_read_and_each_speaks_of_something_measured(run):
    bounds = slo.read_slo()
    assert bounds.keys() <= summarise(run).keys()
    assert all(entry.why for entry in bounds.values())


@pytest.mark.parametrize(("layout", "at_most"), [("fused", 0.7), ("ensemble", 2.3), ("", 2.3)])
def test_a_layout_may_have_bounds_of_its_own(layout, at_most):
    two = bound(at_most=2.3, why="hops", fused=bound(at_most=0.7))
    (verdict,) = slo.judge({"overhead_p50_ms": two}, {"overhead_p50_ms": 0.8, "layout": layout})
    assert (verdict.bound.at_most, verdict.bound.why, verdict.kept) == (at_most, "hops", at_most > 0.8)


@pytest.mark.parametrize("layout", ["fused", "ensemble"])
def test_a_bound_of_no_layout_of_its_own_holds_for_all(layout):
    (verdict,) = slo.judge({"p99_ms": bound(at_most=3.0)}, {"p99_ms": 3.1, "layout": layout})
    assert not verdict.kept


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[p99_ms]\nat_most = 1\nfused = { at_most = 1, at_least = 2 }\n", "p99_ms.fused: .*either at_most or at_least"),
        ("[p99_ms]\n", "p99_ms: .*either at_most or at_least"),
        ("[p99_ms]\nat_most = 1\nat_least = 2\n", "p99_ms: .*either at_most or at_least"),
        ("[p99_ms]\nat_most = 'x'\n", "p99_ms.at_most: .*valid number"),
        ("[p99_ms]\nat_most = '1'\n", "p99_ms.at_most: .*valid number, got '1'"),
        ("[p99_ms]\nbelow = 1\n", "p99_ms.below: "),
        ("not toml", "not valid TOML"),
        ("p99_ms = 3", "p99_ms: "),
        ("# nothing\n", "holds no bounds"),
        ("[p99_msec]\nat_most = 1\n", "no run measures: p99_msec"),
    ],
)
def test_wrong_bounds_are_refused(tmp_path, text, message):
    (tmp_path / "slo.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        slo.read_slo(tmp_path / "slo.toml")


def test_what_a_run_can_be_held_to_is_a_number_of_its_summary(run):
    assert all(isinstance(summarise(run)[key], int | float) for key in slo.OBJECTIVES)


def test_bounds_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        slo.read_slo(tmp_path / "slo.toml")
