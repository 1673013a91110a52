"""Helpers of all experiments: figures with their bounds (perf/figures.py), rounds in turns, draws of keys, and bootstraps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated

import numpy as np
import typer
from pydantic import BaseModel

from perf.figures import NOT_MEASURED, RESULTS, Figure, Record, Result, ResultsFolder, finish
from perf.report.results import read_machine

__all__ = [
    "NOT_MEASURED",
    "RESULTS",
    "DataSets",
    "Drop",
    "Figure",
    "Record",
    "Result",
    "ResultsFolder",
    "Seeds",
    "bootstrap_drop",
    "draw_zipf_keys",
    "finish",
    "read_machine",
    "run_in_turns",
    "split_into_rows",
]

RESAMPLES = 2_000  # of a bootstrap

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


class Drop(BaseModel, frozen=True):
    """The drop from one mean over users to another; `low` … `high` is the 95 % bootstrap interval."""

    mean: float
    low: float
    high: float

    @property
    def values(self) -> list[float]:
        """Low, mean and high; the mean is the middle one unless the draws are very skewed."""
        return [self.low, self.mean, self.high]


def bootstrap_drop(values: np.ndarray, reference: np.ndarray) -> Drop:
    """Return how much lower `values` is than `reference`, paired by user.

    values, reference: float [seeds, users], NaN where a user does not count. The bootstrap is over users and seeds.
    """
    counted = np.isfinite(reference).all(axis=0) & np.isfinite(values).all(axis=0)
    values, reference = values[:, counted], reference[:, counted]
    rng, (n_seeds, n_users) = np.random.default_rng(0), values.shape
    means = []
    for _ in range(RESAMPLES):
        users = rng.integers(0, n_users, n_users)
        value_seeds, reference_seeds = rng.integers(0, n_seeds, (2, n_seeds))
        means.append((reference[reference_seeds].mean(axis=0) - values[value_seeds].mean(axis=0))[users].mean())
    low, high = np.quantile(means, (0.025, 0.975)).tolist()
    return Drop(mean=float(reference.mean() - values.mean()), low=low, high=high)
