"""Which part of the log a retriever is fitted on.

served     the whole log: the retriever that is published
training   the events before a label window: its candidates teach the ranker, which would learn nothing true from one that
           had seen the labels (leakage)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import scipy.sparse as sp

from training.dataset import Dataset
from training.dataset.matrix import matrix_of
from training.features.build import Examples, Features
from training.models.retriever import Retriever, RetrieverSettings, fit_retriever, retriever_data

Say = Callable[[str], None]


@dataclass(frozen=True)
class RetrievalSettings:
    """candidates: C; filter_seen: items the user already had are neither learned as targets nor retrieved."""

    candidates: int
    filter_seen: bool = True
    seed: int = 0


@dataclass(frozen=True)
class FittedRetriever:
    """A retriever, and what its users had met by the end of the events that it was fitted on: it leaves that out.

    user_ids: int64 [U] ascending; seen: CSR [U, n_items]
    """

    retriever: Retriever
    user_ids: np.ndarray
    seen: sp.csr_matrix
    candidates: int

    def __call__(self, users: Examples, user_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Retrieve for N users -> (int64 [N, C] positions, n_items padded; float32 [N, C] scores)."""
        seen = self.seen[np.searchsorted(self.user_ids, user_ids)]
        return self.retriever.retrieve(users, seen, self.candidates)


def fit_served_retriever(dataset: Dataset, features: Features, settings: RetrievalSettings, say: Say) -> FittedRetriever:
    """Fit on the whole log, as it will be served."""
    log = dataset.interactions
    return _fit(dataset, features, log, np.flatnonzero(log["positive"].to_numpy()), settings, say)


def fit_training_retriever(
    dataset: Dataset, features: Features, settings: RetrievalSettings, say: Say, earlier: pd.DataFrame
) -> FittedRetriever:
    """Fit on the events before a label window alone. earlier: these, with their row number in the log as "row"."""
    rows = np.sort(earlier.loc[earlier["positive"].to_numpy(), "row"].to_numpy())
    return _fit(dataset, features, earlier, rows, settings, say)


def _fit(
    dataset: Dataset, features: Features, events: pd.DataFrame, rows: np.ndarray, settings: RetrievalSettings, say: Say
) -> FittedRetriever:
    """rows: int64 ascending, the positive ones of `events` by their number in the log."""
    data = retriever_data(features, dataset.interactions, rows, settings.filter_seen)
    retriever = fit_retriever(data, RetrieverSettings(), settings.seed, say)
    user_ids, item_ids = dataset.users["user_id"].to_numpy(), dataset.items["item_id"].to_numpy()
    seen = matrix_of(events if settings.filter_seen else events.iloc[:0], user_ids, item_ids)
    return FittedRetriever(retriever, user_ids, seen, settings.candidates)
