"""Helpers of all experiments: figures with their bounds (perf/figures.py), rounds in turns, and draws of keys."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import numpy as np
import typer

from perf.figures import NOT_MEASURED, RESULTS, Figure, Record, Result, ResultsFolder, finish
from perf.report.results import read_machine

__all__ = [
    "NOT_MEASURED",
    "RESULTS",
    "DataSets",
    "Figure",
    "Record",
    "Result",
    "ResultsFolder",
    "Seeds",
    "draw_zipf_keys",
    "finish",
    "read_machine",
    "run_in_turns",
    "split_into_rows",
]

DataSets = Annotated[list[str], typer.Option(help="a folder with a dataset.toml, or a bundled name; may be given again")]
Seeds = Annotated[str, typer.Option(help="of the exports, a comma list")]


def run_in_turns(
    tasks: Mapping[str, Callable[[], dict[str, float]]], rounds: int, step: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Run every task once per round and return what they measured, by name: a value per round.

    Each round starts one task later than the one before, because a machine's speed drifts. step: called with each task's name.
    """
    names = list(tasks)
    values: dict[str, list[float]] = {}
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            step(f"round {number + 1}: {name}")
            for key, value in tasks[name]().items():
                values.setdefault(key, []).append(value)
    return values


def draw_zipf_keys(n_keys: int, exponent: float, shape: int | tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Draw int64 keys of `shape`: key k with a probability proportional to 1 / (k + 1) ** exponent."""
    cumulative = np.cumsum(np.arange(1, n_keys + 1, dtype=np.float64) ** -exponent)
    return np.searchsorted(cumulative, rng.random(shape) * cumulative[-1]).astype(np.int64)


def split_into_rows(tensors: dict[str, np.ndarray]) -> Iterator[dict[str, np.ndarray]]:
    """Yield requests of one row each."""
    for row in range(len(next(iter(tensors.values())))):
        yield {name: values[row : row + 1] for name, values in tensors.items()}
