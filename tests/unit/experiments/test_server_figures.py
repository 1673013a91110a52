"""Figures and bounds of experiments that need a server, from made-up measurements."""

from __future__ import annotations

from experiments import overload


def test_bounds_under_load_hold_at_the_peak_too():
    values = {
        "goodput over peak": 0.7,
        "p99 of accepted": 301.0,
        "p99 of accepted, high priority": 21.0,
        "share of high priority accepted": 0.5,
        "without any answer": 1.0,
        "recovered after": 2.5,
    }
    figures = {figure.name: figure for figure in overload.make_figures("1 times the peak", values, idle_ms=10.0)}
    missed = [name.partition(": ")[2] for name, figure in figures.items() if figure.met is False]
    assert missed == [name for name in values if name != "share of high priority accepted"]
    assert figures["1 times the peak: p99 of accepted, high priority"].unit == "ms"
