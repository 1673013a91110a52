"""Replay the last part of a log in time order and predict each event before it is observed: frozen and live quality.

    python -m experiments.prequential --data online-retail

    log ──split by time──▶ first 80 % ─▶ export            (frozen: this is all that is ever known)
                           last 20 %  ─▶ questions, one per event

A question is a positive event of an item that the user never had before (export/continuous/prequential.py). Three answerers:

    frozen   the repository as it was exported
    live     the same repository; every event before the question has gone through `observe` into the live store
    V-SKNN   a session-based baseline that knows every event before the question

V-SKNN is tuned on the end of the exported part. Where popular items alone answer that better, they are the baseline.

The figures are Recall@20 (is the item in the list?), NDCG@10, and the mean reciprocal rank (MRR, 0 for items not in the list).
Live must not be below frozen or V-SKNN by any of them, and its NDCG@10 must be 1.15 times that of frozen.
The spread of a ratio is its 95 % interval by the bootstrap over users, because the questions of one user are alike; both
answerers get the same ones. Events of one time count as one after the other, in the order of the log: in a log of invoices,
most questions are of a further line of the invoice. The conditions name the share.
"""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console

from experiments.harness import RESULTS, DataSets, Figure, ResultsFolder, finish, read_machine
from export.build import build_repository
from export.continuous.prequential import LIST_LENGTH, Quality, answer_frozen, answer_live, choose_questions, judge_questions
from export.settings import Settings
from perf.command import run
from serving.contract.tensors import PAD_ID
from serving.live.store import find_live_folder
from training.dataset import Dataset, load_dataset
from training.evaluation.session_knn import POPULAR, VARIANTS, Visits, answer_events

WORK = Path(".run/prequential")
DATA = ["online-retail", "movielens", "amazon-grocery", "amazon-sports", "complete-journey"]
REPLAYED_SHARE = 0.2
MOST = 5_000  # questions, evenly spaced over the replayed part
TUNED_ON = {"online-retail", "movielens", "amazon-grocery"}  # whose replays chose the constants of live pairs (docs/models.md)
TUNED_SHARE = 0.1  # of what is exported: its end, on which the baseline's variant is chosen
VISIT_GAP_S = 8 * 3_600.0  # as in training/models/rankers/item_statistics.py
FROZEN, LIVE, KNN = "frozen", "live", "V-SKNN"
LEAST_RATIOS = {  # bounds of live quality over that of others
    FROZEN: {"recall_at_20": 1.0, "ndcg_at_10": 1.15, "mrr": 1.0},
    KNN: {"recall_at_20": 1.0, "ndcg_at_10": 1.0, "mrr": 1.0},
}
RESAMPLES = 1_000
TITLES = {"recall_at_20": "Recall@20", "ndcg_at_10": "NDCG@10", "mrr": "MRR"}


class Gains(NamedTuple):
    """An answerer's gain at each question, such as its NDCG@10, float64 [Q], and whose question it is, int64 [Q]."""

    values: np.ndarray
    user_ids: np.ndarray


class Measured(NamedTuple):
    """The quality of one answerer. gains: by the fields of Quality, which are their means"""

    quality: Quality
    gains: dict[str, Gains]


def find_split_row(dataset: Dataset) -> int:
    """Return the row of the log at which the replay begins."""
    return int(len(dataset.interactions) * (1 - REPLAYED_SHARE))


def take_exported_part(dataset: Dataset) -> Dataset:
    """Return the data set as it was when the replay begins."""
    return replace(dataset, interactions=dataset.interactions.iloc[: find_split_row(dataset)].reset_index(drop=True))


def measure(dataset: Dataset, repository: Path, most: int) -> dict[str, Measured]:
    """Return quality by answerer. repository: exported from `take_exported_part`; most: limit of questions"""
    events, first = dataset.interactions, find_split_row(dataset)
    rows = choose_questions(events, first, len(events), most)
    tuned_rows = choose_questions(events, int(first * (1 - TUNED_SHARE)), first, most)
    lists_by_name = answer_frozen_and_live(dataset, repository, rows) | {KNN: answer_by_knn(dataset, rows, tuned_rows)}
    user_ids, targets = (events[name].to_numpy()[rows] for name in ("user_id", "item_id"))
    return {
        name: Measured(
            Quality.of(lists, targets),
            {field: Gains(values, user_ids) for field, values in judge_questions(lists, targets).items()},
        )
        for name, lists in lists_by_name.items()
    }


def answer_frozen_and_live(dataset: Dataset, repository: Path, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the lists, int64 [Q, 20] each, by FROZEN and LIVE. rows: int64 [Q] of the questions, ascending"""
    live_folder = find_live_folder(repository)
    return {
        FROZEN: answer_frozen(repository, dataset, rows).items,
        LIVE: answer_live(repository, dataset, rows, find_split_row(dataset), live_folder).items,
    }


def answer_by_knn(dataset: Dataset, rows: np.ndarray, tuned_rows: np.ndarray) -> np.ndarray:
    """Return int64 [Q, 20] item ids from the variant of V-SKNN, or the popular items, that answer `tuned_rows` best."""
    events, item_ids = dataset.interactions, dataset.items["item_id"].to_numpy()
    items, times_s = np.searchsorted(item_ids, events["item_id"].to_numpy()), events["timestamp"].to_numpy()
    visits = Visits.of(events["user_id"].to_numpy(), items, times_s, events["positive"].to_numpy(), VISIT_GAP_S)
    variants = (*VARIANTS, POPULAR)
    tuned = [Quality.of(answer_events(visits, tuned_rows, len(item_ids), v), items[tuned_rows]).ndcg_at_10 for v in variants]
    positions = answer_events(visits, rows, len(item_ids), variants[int(np.argmax(tuned))], LIST_LENGTH)
    return np.append(item_ids, PAD_ID)[positions]


def make_figures(measured: dict[str, Measured]) -> list[Figure]:
    """Return the figures. measured: by FROZEN, LIVE and KNN"""
    figures = [
        Figure(name=f"{name}: {TITLES[field.name]}", values=[getattr(measurement.quality, field.name)])
        for name, measurement in measured.items()
        for field in fields(measurement.quality)
    ]
    for other, bounds in LEAST_RATIOS.items():
        for field, at_least in bounds.items():
            gains = measured[other].gains[field]
            values = list(resample_ratio(measured[LIVE].gains[field], gains)) if gains.values.any() else []
            figures.append(Figure(name=f"live over {other}: {TITLES[field]}", values=values, unit="x", at_least=at_least))
    return figures


def resample_ratio(own_gains: Gains, other_gains: Gains) -> tuple[float, float, float]:
    """Return (low, ratio, high) of two means: their ratio and the ends of its 95 % interval. Both have the same questions."""
    users = np.unique(own_gains.user_ids, return_inverse=True)[1]
    sums, other_sums = (np.bincount(users, gains.values) for gains in (own_gains, other_gains))
    draws = np.random.default_rng(0).integers(0, len(sums), (RESAMPLES, len(sums)))
    ratios = sums[draws].sum(axis=1) / np.maximum(other_sums[draws].sum(axis=1), 1e-12)
    low, high = np.percentile(ratios, (2.5, 97.5)).tolist()
    return low, float(own_gains.values.mean() / other_gains.values.mean()), high


def describe_conditions(dataset: Dataset, most: int) -> str:
    """Return what a reader has to know of the questions, at most `most`, and of the figures."""
    events = dataset.interactions
    rows = choose_questions(events, find_split_row(dataset), len(events), most)
    further = events.duplicated(["user_id", "timestamp"]).to_numpy()[rows].mean()
    conditions = (
        f"the last 20 % of the log, {len(rows):,} questions, {further:.0%} of them of an event at the time of an earlier one "
        "of its user; default settings, in process; the ends of a ratio are its 95 % interval over users"
    )
    if dataset.description.name in TUNED_ON:
        conditions += "; constants of live pairs were chosen on replays of this log, so the gain is somewhat optimistic"
    return conditions


def main(
    data: DataSets = DATA,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure frozen and live quality on the last 20 % of a log, beside a session-based baseline. Some minutes per data set."""
    for source in data:
        machine, dataset = read_machine(), load_dataset(source)
        name, command = dataset.description.name, f"python -m experiments.prequential --data {source}"
        build_repository(take_exported_part(dataset), WORK / name, Settings(), Console(stderr=True))
        figures = make_figures(measure(dataset, WORK / name, MOST))
        conditions = describe_conditions(dataset, MOST)
        finish(f"prequential-{name}", f"Frozen and live on {name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.prequential")
