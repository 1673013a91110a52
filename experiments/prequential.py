"""Replay the last part of a log in time order and predict each event before it is observed: frozen and live quality.

    python -m experiments.prequential --data online-retail

    log ──split by time──▶ first 80 % ─▶ export            (frozen: this is all that is ever known)
                           last 20 %  ─▶ questions, one per event

A question is a positive event of an item that the user never had before: at its moment the whole pipeline is asked, in process,
and the answer is good if it holds the item of the event. Three answerers:

    frozen   the repository as it was exported
    live     the same repository; every event before the question has gone through `observe` into the live store
    V-SKNN   a session-based baseline that knows every event before the question

The figures are Recall@20 (is the item in the list?), NDCG@10, and the mean reciprocal rank (MRR, 0 for items not in the list).
"""

from __future__ import annotations

import shutil
from contextlib import closing
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.console import Console

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from export.build import build_repository
from export.settings import Settings
from perf.command import run
from serving.contract.generations import pinned_generation
from serving.contract.tensors import OBSERVE, PAD_ID, live_specs
from serving.live.reader import Reader
from serving.live.store import live_folder
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe
from training.dataset import Dataset, load_dataset
from training.evaluation.session_knn import VARIANTS, Visits, answer_events
from training.features.build import context_of

WORK = Path(".run/prequential")
DATA = ("online-retail", "movielens", "amazon-grocery", "complete-journey")
REPLAYED_SHARE = 0.2
TUNED_SHARE = 0.1  # of what is exported: its end, on which the baseline's variant is chosen
VISIT_GAP_S = 8 * 3_600.0  # as in training/models/item_statistics.py
QUESTIONS_PER_CALL = 64
EVENTS_PER_BATCH = 256
LIST_LENGTH = 20
FROZEN, LIVE, KNN = "frozen", "live", "V-SKNN"
TITLES = {"recall_at_20": "Recall@20", "ndcg_at_10": "NDCG@10", "mrr": "MRR"}

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True)
class Quality:
    """Means over questions."""

    recall_at_20: float
    ndcg_at_10: float
    mrr: float

    @classmethod
    def of(cls, answers: np.ndarray, items: np.ndarray) -> Quality:
        """answers: int64 [Q, 20], best first; items: int64 [Q], the one that each answer should hold"""
        hits = answers == items[:, None]
        rank = np.where(hits.any(axis=1), hits.argmax(axis=1), np.inf)
        gain = np.where(rank < 10, 1 / np.log2(rank + 2), 0.0)
        return cls(float(np.isfinite(rank).mean()), float(gain.mean()), float((1 / (rank + 1)).mean()))


def split_row(dataset: Dataset) -> int:
    """Return the row of the log at which the replay begins."""
    return int(len(dataset.interactions) * (1 - REPLAYED_SHARE))


def exported_part(dataset: Dataset) -> Dataset:
    """Return the data set as it was when the replay begins."""
    return replace(dataset, interactions=dataset.interactions.iloc[: split_row(dataset)].reset_index(drop=True))


def measure(dataset: Dataset, repository: Path, most: int) -> dict[str, Quality]:
    """Return quality by answerer. repository: exported from `exported_part`; most: questions at most"""
    events, first = dataset.interactions, split_row(dataset)
    rows = choose_questions(events, first, len(events), most)
    tuned_rows = choose_questions(events, int(first * (1 - TUNED_SHARE)), first, most)
    answers = {
        FROZEN: answer_frozen(repository, dataset, rows),
        LIVE: answer_live(repository, dataset, rows, first),
        KNN: answer_by_knn(dataset, rows, tuned_rows),
    }
    wanted = events["item_id"].to_numpy()[rows]
    return {name: Quality.of(found, wanted) for name, found in answers.items()}


def choose_questions(events: pd.DataFrame, first: int, end: int, most: int) -> np.ndarray:
    """Return int64 [Q] rows from `first` to `end` whose item the user never had before: `most`, evenly spaced, or fewer."""
    new = ~events.duplicated(["user_id", "item_id"]).to_numpy() & events["positive"].to_numpy()
    rows = first + np.flatnonzero(new[first:end])
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)]


def answer_frozen(repository: Path, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return int64 [Q, 20] item ids for the users of log rows, from what was exported."""
    with closing(Pipeline.load(repository)) as pipeline:
        return np.concatenate([ask(pipeline, dataset, part) for part in blocks(rows, QUESTIONS_PER_CALL)])


def answer_live(repository: Path, dataset: Dataset, rows: np.ndarray, first: int) -> np.ndarray:
    """Return int64 [Q, 20] item ids for the users of log rows, every event from row `first` on observed before the next answer.

    The live store beside the repository is made anew.
    """
    folder, answers, start = live_folder(repository), [], first
    shutil.rmtree(folder, ignore_errors=True)
    observe = Observe.load(repository / OBSERVE / str(pinned_generation(repository)))
    with closing(observe), closing(Reader(folder)) as reader, closing(Pipeline.load(repository, live=reader)) as pipeline:
        for row in rows:
            for part in blocks(np.arange(start, row), EVENTS_PER_BATCH):
                observe(event_inputs(dataset, part))
            answers.append(ask(pipeline, dataset, row[None]))
            start = row
    return np.concatenate(answers)


def ask(pipeline: Pipeline, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return int64 [B, 20] item ids for the users of log rows, in the context of these rows."""
    events = dataset.interactions.iloc[rows]
    inputs = {"user_id": events["user_id"].to_numpy(np.int64)} | context_of(events, dataset.context_columns)
    return pipeline({name: values[:, None] for name, values in inputs.items()})["item_ids"][:, :LIST_LENGTH]


def event_inputs(dataset: Dataset, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of `observe` for rows of the log."""
    events, log = dataset.interactions.iloc[rows], dataset.description.interactions
    given = {"user_id": events["user_id"], "item_id": events["item_id"], "timestamp_ms": 1_000 * events["timestamp"]}
    if log.label or log.weight:
        given["value"] = events["label" if log.label else "weight"]
    given |= context_of(events, dataset.context_columns)
    tensors = live_specs(tuple(column.tensor() for column in dataset.context_columns))[OBSERVE].inputs
    return {
        t.name: np.asarray(given[t.name], t.numpy_dtype)[:, None] if t.name in given else t.filled(len(rows)) for t in tensors
    }


def answer_by_knn(dataset: Dataset, rows: np.ndarray, tuned_rows: np.ndarray) -> np.ndarray:
    """Return int64 [Q, 20] item ids from the variant of V-SKNN that answers `tuned_rows` best."""
    events, item_ids = dataset.interactions, dataset.items["item_id"].to_numpy()
    items, times_s = np.searchsorted(item_ids, events["item_id"].to_numpy()), events["timestamp"].to_numpy()
    visits = Visits.of(events["user_id"].to_numpy(), items, times_s, events["positive"].to_numpy(), VISIT_GAP_S)
    tuned = [Quality.of(answer_events(visits, tuned_rows, len(item_ids), v), items[tuned_rows]).ndcg_at_10 for v in VARIANTS]
    positions = answer_events(visits, rows, len(item_ids), VARIANTS[int(np.argmax(tuned))], LIST_LENGTH)
    return np.append(item_ids, PAD_ID)[positions]


def blocks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def figures_of(qualities: dict[str, Quality]) -> list[Figure]:
    """qualities: by FROZEN, LIVE and KNN"""
    figures = [
        Figure(name=f"{name}: {TITLES[field.name]}", values=[getattr(quality, field.name)])
        for name, quality in qualities.items()
        for field in fields(quality)
    ]
    for other in (FROZEN, KNN):
        if qualities[other].ndcg_at_10 > 0:
            ratio = qualities[LIVE].ndcg_at_10 / qualities[other].ndcg_at_10
            figures.append(Figure(name=f"live over {other}: NDCG@10", values=[ratio], unit="x"))
    return figures


@app.command()
def main(
    data: Annotated[str, typer.Option(help="comma list of data sets: folders with a dataset.toml, or bundled names")] = (
        ",".join(DATA)
    ),
    most: Annotated[int, typer.Option(help="questions at most, evenly spaced over the replayed part")] = 5_000,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure frozen and live quality on the last 20 % of a log, beside a session-based baseline. Some minutes per data set."""
    for source in data.split(","):
        machine, dataset = read_machine(), load_dataset(source)
        name, command = dataset.description.name, f"python -m experiments.prequential --data {source}"
        build_repository(exported_part(dataset), WORK / name, Settings(), Console(stderr=True))
        figures = figures_of(measure(dataset, WORK / name, most))
        conditions = f"the last 20 % of the log, at most {most:,} questions, default settings, in process"
        finish(f"prequential-{name}", f"Frozen and live on {name}", command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(app, "python -m experiments.prequential")
