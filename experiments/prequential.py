"""Prequential evaluation: the last part of a log replayed in time order, each event predicted before it is observed.

    .venv/bin/python -m experiments.prequential --data online-retail

    log ──split by time──▶ first 80 % ─▶ export            (frozen: this is all that is ever known)
                           last 20 %  ─▶ questions, one per event

A question is a positive event of an item that the user never had before: at its moment the whole pipeline is asked, in process,
and the answer is good if it holds the item of the event. Three answerers:

    frozen   the repository as it was exported
    live     the same repository; users are known as of the moment before the question: history, seen items, totals
    V-SKNN   a session-based baseline that knows every event before the question

The figures are Recall@20 (is the item in the list?), NDCG@10 and the mean reciprocal rank (0 outside of the list).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pandas as pd
import typer
from rich.console import Console
from rich.table import Table

from export.build import build_repository
from export.settings import read_settings
from serving.contract.tensors import PAD_ID
from serving.pipeline import Pipeline
from serving.stages.features.ids import ItemIndex
from serving.stages.features.user_state import UserState
from training.dataset import Dataset, load_dataset
from training.evaluation.session_knn import VARIANTS, Visits, answer_events
from training.features.build import context_of, make_event_log
from training.features.items import Codes
from training.features.point_in_time import EventLog, Moments
from training.features.schema import FeatureSettings

REPLAYED_SHARE = 0.2
TUNED_SHARE = 0.1  # of what is exported: the end, on which the baseline's variant is chosen
VISIT_GAP_S = 8 * 3_600.0  # as in training/models/item_statistics.py
QUESTIONS_PER_CALL = 64
LIST_LENGTH = 20

Console_ = Console(soft_wrap=True)


@dataclass(frozen=True)
class Quality:
    recall_at_20: float
    ndcg_at_10: float
    reciprocal_rank: float

    @classmethod
    def of(cls, answers: np.ndarray, items: np.ndarray) -> Quality:
        """answers: int64 [Q, 20], best first; items: int64 [Q] what the answers should hold"""
        hits = answers[:, :LIST_LENGTH] == items[:, None]
        rank = np.where(hits.any(axis=1), hits.argmax(axis=1), np.inf)
        gain = np.where(rank < 10, 1 / np.log2(rank + 2), 0.0)
        return cls(float(np.isfinite(rank).mean()), float(gain.mean()), float((1 / (rank + 1)).mean()))


class ReplayedUsers:
    """A feature store of users as the log knows them just before the rows it was last pointed at."""

    def __init__(self, dataset: Dataset, history_length: int):
        settings = FeatureSettings(history_length=history_length)
        items = ItemIndex(dataset.items["item_id"].to_numpy())
        self._events = dataset.interactions
        self._log: EventLog = make_event_log(dataset, self._events, items, Codes.of(dataset.items["category"]), settings)
        self.point_at(np.arange(0))

    def point_at(self, rows: np.ndarray) -> None:
        """rows: int64 [B] of the log"""
        self._moments: Moments = self._log.before_rows(self._events, rows)
        self.as_of_s = self._events["timestamp"].to_numpy()[rows]

    def lookup(self, user_ids: np.ndarray) -> UserState:
        return self._log.state(self._moments, self.as_of_s)


def answer_frozen(pipeline: Pipeline, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return int64 [Q, 20] item ids for the users of log rows, from what the repository holds."""
    return np.concatenate([ask(pipeline, dataset, part) for part in blocks(rows)])


def answer_live(pipeline: Pipeline, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return int64 [Q, 20] item ids for the users of log rows as they were just before."""
    preprocess = pipeline.stages["preprocess"]
    users = ReplayedUsers(dataset, pipeline.info.axes.history)
    live = replace(pipeline, stages=pipeline.stages | {"preprocess": replace(preprocess, store=users, embedded=users)})
    answers = []
    for part in blocks(rows):
        users.point_at(part)
        answers.append(ask(live, dataset, part))
    return np.concatenate(answers)


def ask(pipeline: Pipeline, dataset: Dataset, rows: np.ndarray) -> np.ndarray:
    """Return int64 [B, 20] item ids."""
    events = dataset.interactions.iloc[rows]
    context = context_of(events, dataset.context_columns)
    inputs = {"user_id": events["user_id"].to_numpy(np.int64)[:, None]}
    return pipeline(inputs | {name: values[:, None] for name, values in context.items()})["item_ids"][:, :LIST_LENGTH]


def answer_by_knn(dataset: Dataset, rows: np.ndarray, tuned_rows: np.ndarray) -> tuple[np.ndarray, str]:
    """Return int64 [Q, 20] item ids of the variant of V-SKNN that answers `tuned_rows` best, and its name."""
    events, item_ids = dataset.interactions, dataset.items["item_id"].to_numpy()
    items, times_s = np.searchsorted(item_ids, events["item_id"].to_numpy()), events["timestamp"].to_numpy()
    visits = Visits.of(events["user_id"].to_numpy(), items, times_s, events["positive"].to_numpy(), VISIT_GAP_S)
    qualities = [Quality.of(answer_events(visits, tuned_rows, len(item_ids), v), items[tuned_rows]) for v in VARIANTS]
    best = VARIANTS[int(np.argmax([quality.ndcg_at_10 for quality in qualities]))]
    positions = answer_events(visits, rows, len(item_ids), best)
    told = " and ".join(name for name in ("normalise", "idf") if getattr(best, name)) or "plain"
    return np.append(item_ids, PAD_ID)[positions], f"V-SKNN ({told})"


def questions(events: pd.DataFrame, first: int, end: int, most: int) -> np.ndarray:
    """Return int64 [Q] rows from `first` on whose item the user never had before, at most `most`, evenly spaced."""
    new = ~events.duplicated(["user_id", "item_id"]).to_numpy() & events["positive"].to_numpy()
    rows = first + np.flatnonzero(new[first:end])
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)] if len(rows) else rows


def blocks(rows: np.ndarray) -> list[np.ndarray]:
    return [rows[start : start + QUESTIONS_PER_CALL] for start in range(0, len(rows), QUESTIONS_PER_CALL)]


def measure(dataset: Dataset, repository: Path, first: int, most: int) -> dict[str, Quality]:
    """Return quality by answerer. first: row of the log at which the replay begins; the repository knows what is before it."""
    events = dataset.interactions
    rows = questions(events, first, len(events), most)
    tuned = questions(events, int(first * (1 - TUNED_SHARE)), first, most)
    wanted = events["item_id"].to_numpy()[rows]
    pipeline = Pipeline.load(repository)
    try:
        found = {
            "frozen": Quality.of(answer_frozen(pipeline, dataset, rows), wanted),
            "live": Quality.of(answer_live(pipeline, dataset, rows), wanted),
        }
    finally:
        pipeline.close()
    answers, name = answer_by_knn(dataset, rows, tuned)
    return found | {name: Quality.of(answers, wanted)}


def main(
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, bundled name, or synthetic:NAME")] = "online-retail",
    work: Annotated[Path, typer.Option(help="where to export to")] = Path(".run/prequential"),
    config: Annotated[Path | None, typer.Option(help="settings file of the export")] = None,
    reuse: Annotated[bool, typer.Option(help="measure the repository that an earlier run exported")] = False,
    most: Annotated[int, typer.Option(help="questions at most, evenly spaced over the replayed part")] = 20_000,
) -> None:
    """Frozen and live quality on the last 20 % of a log, beside a session-based baseline."""
    dataset = load_dataset(data)
    repository = work / dataset.description.name
    first = int(len(dataset.interactions) * (1 - REPLAYED_SHARE))
    if not reuse:
        exported = replace(dataset, interactions=dataset.interactions.iloc[:first].reset_index(drop=True))
        build_repository(exported, repository, read_settings(config), Console_)
    qualities = measure(dataset, repository, first, most)
    table = Table(title=f"{dataset.description.name}: the last {REPLAYED_SHARE:.0%} of the log, event by event")
    for heading in ("", "Recall@20", "NDCG@10", "MRR"):
        table.add_column(heading, justify="right")
    for name, quality in qualities.items():
        table.add_row(name, *(f"{value:.4f}" for value in asdict(quality).values()))
    Console_.print(table)
    Console_.print_json(json.dumps({name: asdict(quality) for name, quality in qualities.items()}), indent=None)


if __name__ == "__main__":
    typer.run(main)
