"""Measure what the streaming aggregations that the models learn from are worth, frozen and live.

    python -m experiments.aggregations [--data online-retail --data amazon-grocery]

Each set of aggregations gets an export of the first 80 % of a log, which answers the questions of experiments/prequential.py.
The sets are the defaults (training/features/aggregates.py), fewer, or more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.harness import RESULTS, DataSets, Figure, ResultsFolder, finish, read_machine
from experiments.prequential import MOST, Gains, answer_frozen_and_live, find_split_row, resample_ratio, take_exported_part
from export.build import build_repository
from export.continuous.prequential import choose_questions, compute_gains, find_ranks
from export.settings import Settings
from perf.command import run
from serving.contract.errors import ConfigError
from training.dataset import Dataset, load_dataset
from training.features.aggregates import DEFAULTS

WORK = Path(".run/aggregations")
DATA = ["online-retail", "amazon-grocery"]
DEFAULT = "default (trend of items)"
VISITS = (
    {"name": "session_events", "entity": "user", "value": "count", "function": "count", "session_gap": "30min"},
    {"name": "days_since", "entity": "user", "value": "count", "function": "last", "n": 3},
    {"name": "events_7d", "entity": "user", "value": "count", "function": "count", "window": "7d"},
)
CATEGORY = "CATEGORY"  # stands for the column that the data set names as its category
OWN_CATEGORY = (
    {"name": "own_category", "entity": f"user x {CATEGORY}", "value": "count", "function": "count", "half_life": "30d"},
)
PRICES = ({"name": "price_paid", "entity": "user", "value": "price", "function": "mean", "half_life": "180d"},)
SETS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "none": (),
    DEFAULT: DEFAULTS,
    "default, session and recency": (*DEFAULTS, *VISITS),
    "default, session, recency and prices": (*DEFAULTS, *VISITS, *PRICES),
    "default and the user's events in the category": (*DEFAULTS, *OWN_CATEGORY),
}


def declare(dataset: Dataset, tables: Sequence[Mapping[str, Any]]) -> Dataset:
    """Return the data set with these aggregations in place of its own. Raises ConfigError if it has no category.

    tables: as in `[[aggregations]]`, with CATEGORY
    """
    items = dataset.description.items
    category = items.category if items else None
    if category is None:
        raise ConfigError(f"Data set {dataset.description.name} has no category. Expected [items] category in dataset.toml.")
    declared = [{**table, "entity": table["entity"].replace(CATEGORY, category)} for table in tables]
    return replace(dataset, description=dataset.description.model_copy(update={"aggregations": declared}))


def measure(dataset: Dataset, repository: Path, most: int) -> dict[str, Gains]:
    """Return the gains of the questions, frozen and live. repository: exported from the first 80 % of the log"""
    events = dataset.interactions
    rows = choose_questions(events, find_split_row(dataset), len(events), most)
    lists = answer_frozen_and_live(dataset, repository, rows)
    user_ids, targets = (events[name].to_numpy()[rows] for name in ("user_id", "item_id"))
    return {name: Gains(compute_gains(find_ranks(answer, targets)), user_ids) for name, answer in lists.items()}


def make_figures(gains: Mapping[str, Mapping[str, Gains]]) -> list[Figure]:
    """Return the figures. gains: set -> result of `measure`"""
    figures = []
    for name, by_mode in gains.items():
        figures += [
            Figure(name=f"{name}: {mode} NDCG@10", values=[float(gain.values.mean())]) for mode, gain in by_mode.items()
        ]
        for mode, gain in by_mode.items():
            if name != DEFAULT and gains[DEFAULT][mode].values.any():
                ratio = list(resample_ratio(gain, gains[DEFAULT][mode]))
                figures.append(Figure(name=f"{name}: {mode} NDCG@10 over that of the default", values=ratio, unit="x"))
    return figures


def main(
    data: DataSets = DATA,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure frozen and live quality with five sets of aggregations. Some minutes per set and data set."""
    for source in data:
        machine, dataset, gains = read_machine(), load_dataset(source), {}
        name = dataset.description.name
        sets = {set_name: declare(dataset, tables) for set_name, tables in SETS.items()}
        for number, (set_name, declared) in enumerate(sets.items()):
            repository = WORK / f"{name}-{number}"  # each set has other tensors
            build_repository(take_exported_part(declared), repository, Settings(), Console(stderr=True))
            gains[set_name] = measure(declared, repository, MOST)
        command = f"python -m experiments.aggregations --data {source}"
        conditions = (
            f"the last 20 % of the log, at most {MOST:,} questions, otherwise default settings, in process; "
            "the ends of a ratio are its 95 % interval over users"
        )
        finish(f"aggregations-{name}", f"Aggregations on {name}", command, conditions, make_figures(gains), results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.aggregations")
