"""Predict events of a log before they are observed, in process: by a repository as it was exported, or with live state.

A question is the first positive event of a user with an item. The whole pipeline answers just before the event; the answer is a
hit if it holds the event's item.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from export.steps.recording import make_context_tensors
from serving.contract.generations import read_pinned_generation
from serving.contract.tensors import OBSERVE, UPSERT, make_live_specs
from serving.live.admission import keep_fitting
from serving.live.reader import Reader
from serving.pipeline import Pipeline
from serving.stages.live.models import Observe, Upsert
from serving.stages.rules.applied import FOLDER as RULES_FOLDER
from training.dataset import Dataset
from training.dataset.repeats import find_repeats

QUESTIONS_PER_CALL = 64
EVENTS_PER_BATCH = 256
CHANGES_PER_BATCH = 1_000
LIST_LENGTH = 20


class Upserted(NamedTuple):
    """Columns that `upsert` has set. kind: item or user"""

    kind: str
    id: int
    columns: Mapping[str, Any]


@dataclass(frozen=True)
class Answers:
    """Answers of a pipeline to Q questions.

    items: int64 [Q, 20], best first; candidates: int64 [Q, C], what it retrieved, padded with PAD_ID
    rank_scores: float32 [Q, C]
    """

    items: np.ndarray
    candidates: np.ndarray
    rank_scores: np.ndarray

    @classmethod
    def join(cls, parts: list[Answers]) -> Answers:
        return cls(*(np.concatenate([getattr(part, f.name) for part in parts]) for f in fields(cls)))


@dataclass(frozen=True)
class Quality:
    """Means over Q questions."""

    recall_at_20: float
    ndcg_at_10: float
    mrr: float

    @classmethod
    def of(cls, answers: np.ndarray, items: np.ndarray) -> Quality:
        """Average over questions. answers: int64 [Q, 20], best first; items: int64 [Q], what each answer should hold."""
        values = judge_questions(answers, items)
        return cls(**{name: float(gains.mean()) for name, gains in values.items()})


def judge_questions(answers: np.ndarray, items: np.ndarray) -> dict[str, np.ndarray]:
    """Return what each field of Quality is the mean of, float64 [Q] by its name. answers, items: see `Quality.of`"""
    ranks = find_ranks(answers, items)
    return {
        "recall_at_20": np.isfinite(ranks).astype(np.float64),
        "ndcg_at_10": compute_gains(ranks),
        "mrr": 1 / (ranks + 1),
    }


def find_ranks(answers: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Return float64 [Q], the rank of each item in its answer from 0, infinity where it is missing."""
    hits = answers == items[:, None]
    return np.where(hits.any(axis=1), hits.argmax(axis=1), np.inf)


def compute_gains(ranks: np.ndarray) -> np.ndarray:
    """Return the NDCG@10 of each question, float64 [Q]."""
    return np.where(ranks < 10, 1 / np.log2(ranks + 2), 0.0)


def choose_questions(
    events: pd.DataFrame, first: int, end: int, most: int, excluded: np.ndarray | bool = False, filter_seen: bool = True
) -> np.ndarray:
    """Return up to `most` questions among the rows from `first` to `end` (exclusive), evenly spaced: row numbers, int64 [Q].

    excluded: bool [N], rows that may not become questions; filter_seen: nor may what the user took before
    """
    is_asked = events["positive"].to_numpy() & ~np.asarray(excluded)
    if filter_seen:
        is_asked &= ~find_repeats(events)
    rows = first + np.flatnonzero(is_asked[first:end])
    return rows[np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(np.int64)]


def answer_frozen(repository: Path, dataset: Dataset, rows: np.ndarray) -> Answers:
    """Answer the users of log rows from the repository as it was exported."""
    with closing(Pipeline.load(repository)) as pipeline:
        return Answers.join([ask(pipeline, dataset, part) for part in split_blocks(rows, QUESTIONS_PER_CALL)])


def answer_live(
    repository: Path,
    dataset: Dataset,
    rows: np.ndarray,
    first: int,
    store: Path,
    changes: Sequence[Upserted] = (),
    rules: Path | None = None,
) -> Answers:
    """Answer the users of log rows, in ascending order, each after all events from row `first` up to its own were observed.

    store: folder for the live store of these events; an existing one is removed
    changes: of items and users, applied before the first event; what the repository's columns cannot hold is left out
    rules: folder of the rules that were applied to the repository; without it, or where it is missing, those of its export
    """
    answers, start, generation = [], first, str(read_pinned_generation(repository))
    shutil.rmtree(store, ignore_errors=True)
    if changes:
        with closing(Upsert.load(repository / UPSERT / generation, store)) as upsert:
            known = upsert.settings.columns
            fitting = [change._replace(columns=keep_fitting(change.columns, known[change.kind])) for change in changes]
            for first_change in range(0, len(fitting), CHANGES_PER_BATCH):
                upsert(make_change_inputs(fitting[first_change : first_change + CHANGES_PER_BATCH]))
    observe = Observe.load(repository / OBSERVE / generation, store)
    if rules and rules.is_dir():
        (store / RULES_FOLDER).symlink_to(rules.resolve())
    with closing(observe), closing(Reader(store)) as reader, closing(Pipeline.load(repository, live=reader)) as pipeline:
        for row in rows:
            for part in split_blocks(np.arange(start, row), EVENTS_PER_BATCH):
                observe(make_event_inputs(dataset, part))
            answers.append(ask(pipeline, dataset, row[None]))
            start = row
    return Answers.join(answers)


def ask(pipeline: Pipeline, dataset: Dataset, rows: np.ndarray) -> Answers:
    """Answer the users of log rows, in the context of these rows."""
    events = dataset.interactions.iloc[rows]
    user_ids = events["user_id"].to_numpy(np.int64)[:, None]
    tensors = pipeline.trace({"user_id": user_ids} | make_context_tensors(events, dataset.context_columns))
    return Answers(tensors["item_ids"][:, :LIST_LENGTH], tensors["candidate_ids"], tensors["rank_scores"])


def make_event_inputs(dataset: Dataset, rows: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tensors of `observe` for rows of the log."""
    events, log = dataset.interactions.iloc[rows], dataset.description.interactions
    columns = {"user_id": events["user_id"], "item_id": events["item_id"], "timestamp_ms": 1_000 * events["timestamp"]}
    if log.label or log.weight:
        columns["value"] = events["label" if log.label else "weight"]
    spec = make_live_specs(tuple(column.tensor for column in dataset.context_columns))[OBSERVE]
    tensors = {t.name: np.asarray(columns[t.name], t.numpy_dtype)[:, None] for t in spec.inputs if t.name in columns}
    return spec.fill_optional(len(rows)) | tensors | make_context_tensors(events, dataset.context_columns)


def make_change_inputs(changes: Sequence[Upserted]) -> dict[str, np.ndarray]:
    """Return the tensors of `upsert` for changes of items and users."""
    return {
        "kind": np.array([change.kind.encode() for change in changes], object)[:, None],
        "id": np.array([change.id for change in changes], np.int64)[:, None],
        "columns": np.array([json.dumps(change.columns).encode() for change in changes], object)[:, None],
    }


def split_blocks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]
