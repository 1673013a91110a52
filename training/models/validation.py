"""Split what models learn from and what validates them: the training log by time, the ranker's requests by user."""

from __future__ import annotations

import numpy as np
import pandas as pd

from serving.loops.hashing import hash_integers
from training.dataset import split_log
from training.models.rankers.ranking_data import Requests

LATER_SHARE = 0.2
HASHES = 10_000


def split_training_log(train: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Split the training log, or an earlier part of it, by time: (earlier, later), as an evaluation splits off its test set.

    In both, the column "row" is the row number in the whole training log; it is added when `train` is that log.

    Where one part would have no positive event (no user returns, or everybody buys last), the earlier part is all of `train`,
    and the later part its last positive event: later steps then have one request, from which `train_ranker` does not learn.
    """
    numbered = train if "row" in train else train.assign(row=np.arange(len(train)))
    earlier, later = split_log(numbered, LATER_SHARE)
    if not (earlier["positive"].any() and later["positive"].any()):
        return numbered, numbered[numbered["positive"]].tail(1)
    return earlier, later


def split_validation(requests: Requests, share: float) -> tuple[Requests, Requests]:
    """Return training requests and validation requests. Two or more are split so that neither is empty; a single one validates.

    A user validates in each generation or in none: a ranker that starts from an earlier one's weights must not be validated by
    requests of users whom that one learned from.
    """
    hashes = _hash_users(requests)
    validates = hashes < share * HASHES
    if not validates.any() or validates.all():
        validates = np.arange(len(requests)) == np.argmin(hashes)
    return requests.take(np.flatnonzero(~validates)), requests.take(np.flatnonzero(validates))


def drop_validating(requests: Requests, validation: Requests, share: float) -> Requests:
    """Return the requests of users who validate in no generation. validation, share: of `split_validation`"""
    validates = (_hash_users(requests) < share * HASHES) | np.isin(requests.user_ids, validation.user_ids)
    return requests.take(np.flatnonzero(~validates))


def _hash_users(requests: Requests) -> np.ndarray:
    return hash_integers(requests.user_ids) // HASHES % HASHES  # not the digits by which retrievers hold users out
