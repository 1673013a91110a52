"""Fit retrievers on parts of the log.

served     the whole log: the retriever that is published
training   the events before a label window: its candidates train the ranker without leakage of labels
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import scipy.sparse as sp

from training.dataset import Dataset
from training.dataset.matrix import make_matrix
from training.features.build import Examples, Features
from training.models.candidates.graph import GraphSettings
from training.models.candidates.retriever import Retriever, RetrieverSettings, fit_retriever, prepare_data
from training.models.candidates.train_sequence import SequenceSettings
from training.models.warm_start import SERVED, read_learned

Say = Callable[[str], None]


@dataclass(frozen=True)
class RetrievalSettings:
    """candidates: C; filter_seen: neither learn nor retrieve items that the user already had
    sequence, graph: None for no such model; repeat_weight: not 0 only where what users took before is served again
    start_from: what an earlier generation learned (training/models/warm_start.py), None to learn from scratch
    """

    candidates: int
    filter_seen: bool = True
    seed: int = 0
    sequence: SequenceSettings | None = None
    sequence_weight: float = 1.0
    graph: GraphSettings | None = None
    graph_weight: float = 1.0
    repeat_weight: float = 0.0
    start_from: Path | None = None


@dataclass(frozen=True)
class FittedRetriever:
    """A retriever, and the items that users had seen in its training events, which it filters.

    user_ids: int64 [U] ascending; seen: CSR [U, n_items]; filter_seen: filter the history of a request too
    """

    retriever: Retriever
    user_ids: np.ndarray
    seen: sp.csr_matrix
    candidates: int
    filter_seen: bool = True

    def __call__(self, users: Examples, user_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Retrieve for N known users. Return positions int64 [N, C], padded with n_items, and scores float32 [N, C]."""
        seen = self.seen[np.searchsorted(self.user_ids, user_ids)]
        if self.filter_seen:
            seen = seen + _make_history_matrix(users.history_positions, seen.shape[1])
        return self.retriever.retrieve(users, seen, self.candidates)


def fit_served_retriever(dataset: Dataset, features: Features, settings: RetrievalSettings, say: Say) -> FittedRetriever:
    """Fit on the whole log, for serving."""
    log = dataset.interactions
    return _fit(dataset, features, log, np.flatnonzero(log["positive"].to_numpy()), settings, say, SERVED)


def fit_training_retriever(
    dataset: Dataset, features: Features, settings: RetrievalSettings, say: Say, earlier: pd.DataFrame, learned: str = ""
) -> FittedRetriever:
    """Fit on the events before a label window only.

    earlier: these events, with their row number in the log as "row"; learned: kept weights to start from, EARLIER; "" for none
    """
    rows = np.sort(earlier.loc[earlier["positive"].to_numpy(), "row"].to_numpy())
    return _fit(dataset, features, earlier, rows, settings, say, learned)


def _fit(
    dataset: Dataset,
    features: Features,
    events: pd.DataFrame,
    rows: np.ndarray,
    settings: RetrievalSettings,
    say: Say,
    learned: str,
) -> FittedRetriever:
    """Fit on `events`. rows: int64 ascending, row numbers of their positives in the log."""
    sequences = settings.sequence is not None
    items = features.encode_items_before(dataset.items, events)
    log = dataset.interactions
    data = prepare_data(features, log, rows, settings.filter_seen, for_sequences=sequences, items=items, seed=settings.seed)
    models = RetrieverSettings(sequence=settings.sequence, graph=settings.graph)
    start = None
    if settings.sequence and settings.start_from and learned:
        start = read_learned(settings.start_from, learned, features.items.ids, settings.sequence.shape)
    retriever = fit_retriever(data, models, settings.seed, say, start)
    retriever = retriever.weigh(sequence=settings.sequence_weight, graph=settings.graph_weight, repeats=settings.repeat_weight)
    user_ids, item_ids = dataset.users["user_id"].to_numpy(), dataset.items["item_id"].to_numpy()
    seen = make_matrix(events if settings.filter_seen else events.iloc[:0], user_ids, item_ids)
    return FittedRetriever(retriever, user_ids, seen, settings.candidates, settings.filter_seen)


def _make_history_matrix(history: np.ndarray, n_items: int) -> sp.csr_matrix:
    """Return CSR float32 [N, n_items] of int [N, H] positions, padded with n_items."""
    rows, places = np.nonzero(history < n_items)
    entries = (np.ones(len(rows), np.float32), (rows, history[rows, places]))
    return sp.csr_matrix(entries, shape=(len(history), n_items))
