"""The retriever: item-item neighbours in closed form, and two towers that begin as their low-rank half and then learn the rest.

    data = retriever_data(features, train, rows)
    retriever = fit_retriever(data, RetrieverSettings(), seed)
    positions, scores = retriever.retrieve(features.encode_users(user_ids), seen, count=256)

It retrieves in process exactly as the published stage does (`training/retrieval/save.py` writes that). The defaults found
held-out positives best, or nearly so, on logs of a shop, of films and of groceries; l2 from 100 to 1000 changes little there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from sklearn.utils.extmath import randomized_svd

from serving.stages.search.search import Blocked, Neighbours, Search, recency_weights
from training.dataset.matrix import matrix_of
from training.features.build import Examples, Features, context_of
from training.models.item_item import ItemItemSettings, fit_neighbours
from training.models.train_two_tower import TowerSettings, train_towers
from training.models.two_tower import ItemInputs, TwoTower

USERS_PER_BLOCK = 128  # each scores the whole catalogue
MOST_EXAMPLES = TowerSettings.most_examples
LOGITS_PER_WEIGHT = 10.0  # weights of EASE are shares of an item's demand, far smaller than differences of logits


@dataclass(frozen=True)
class RetrieverSettings:
    item_item: ItemItemSettings = field(default_factory=ItemItemSettings)
    towers: TowerSettings = field(default_factory=TowerSettings)
    blend: float = 100.0  # logits of the towers per unit of item-item score


@dataclass(frozen=True)
class RetrieverData:
    """One training log as the retriever reads it.

    positives: CSR float32 [n_users, n_items], 1.0 where a user took an item
    items: the encoded catalogue; user_rows: rows of the tables of user_categorical
    examples: users at the N moments just before they took targets, int64 [N] positions; takers: int64 [N] rows of positives
    """

    positives: sp.csr_matrix
    items: ItemInputs
    user_rows: tuple[int, ...]
    examples: Examples
    targets: np.ndarray
    takers: np.ndarray

    @property
    def n_items(self) -> int:
        return self.positives.shape[1]


@dataclass(frozen=True)
class Retriever:
    model: TwoTower
    neighbours: Neighbours  # weights as fitted, before the blend
    settings: RetrieverSettings
    item_vectors: np.ndarray = field(repr=False)  # float32 [n_items, D]

    @property
    def search(self) -> Search:
        """Exact, over the whole catalogue."""
        return Search(self.item_vectors, self.blended_neighbours, np.ones(len(self.item_vectors), bool))

    @property
    def blended_neighbours(self) -> Neighbours:
        return Neighbours(self.neighbours.positions, self.neighbours.weights * np.float32(self.settings.blend))

    def user_vectors(self, users: Examples) -> np.ndarray:
        """float32 [N, D]"""
        return user_vectors(self.model, users)

    def retrieve(self, users: Examples, seen: sp.csr_matrix, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (int64 [N, count] positions by falling score, n_items padded; float32 [N, count] scores, -inf padded).

        seen: CSR [N, n_items]; stored entries are not retrieved
        """
        return _exact(self.search, self.user_vectors(users), users, seen, count)


def fit_retriever(
    data: RetrieverData, settings: RetrieverSettings, seed: int = 0, say: Callable[[str], None] = print
) -> Retriever:
    """Minutes on one core, seconds on small logs."""
    neighbours = fit_neighbours(data.positives, settings.item_item, np.random.default_rng(seed))
    say(f"  item-item: {(neighbours.weights > 0).sum():,} neighbours of {data.n_items:,} items")
    torch.manual_seed(seed)
    model = TwoTower(data.items, data.user_rows, data.examples.user_continuous.shape[1], settings.towers.width)
    model.begin_as(*low_rank(neighbours, settings.towers.width - 1, seed), log_popularity(data.positives))
    train_towers(model, data.examples, data.targets, data.takers, settings.towers, seed, say)
    return Retriever(model, neighbours, settings, item_vectors(model))


def _exact(
    search: Search, vectors: np.ndarray, users: Examples, seen: sp.csr_matrix, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """`Search.exact` of many users, a block at a time."""
    parts = []
    for start in range(0, len(vectors), USERS_PER_BLOCK):
        block = slice(start, start + USERS_PER_BLOCK)
        parts.append(search.exact(vectors[block], users.history_positions[block], blocked_of(seen[block]), count))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def low_rank(neighbours: Neighbours, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (history side, item side), float32 [n_items, width] each: their inner products are the neighbours' weights,
    nearly."""
    n_items = len(neighbours.positions) - 1
    rows = np.repeat(np.arange(n_items), neighbours.positions.shape[1])
    known = neighbours.positions[:-1].ravel() < n_items
    entries = (neighbours.weights[:-1].ravel()[known], (rows[known], neighbours.positions[:-1].ravel()[known]))
    matrix = sp.csr_matrix(entries, shape=(n_items, n_items))
    left, strength, right = randomized_svd(matrix, min(width, n_items), n_iter=4, random_state=seed)
    sides = [np.zeros((n_items, width), np.float32) for _ in range(2)]
    sides[0][:, : len(strength)] = left * np.sqrt(strength) * LOGITS_PER_WEIGHT
    sides[1][:, : len(strength)] = right.T * np.sqrt(strength)
    return sides[0], sides[1]


def log_popularity(positives: sp.csr_matrix) -> np.ndarray:
    """float32 [n_items]: logarithm of each item's share of all positives, one imagined positive each."""
    counts = np.asarray(positives.sum(axis=0)).ravel() + 1.0
    return np.log(counts / counts.sum()).astype(np.float32)


@torch.no_grad()
def item_vectors(model: TwoTower) -> np.ndarray:
    """float32 [n_items, D]"""
    blocks = torch.arange(model.n_items).split(8_192)
    return torch.cat([model.item_vectors(block) for block in blocks]).numpy()


@torch.no_grad()
def user_vectors(model: TwoTower, users: Examples) -> np.ndarray:
    """float32 [N, D]"""
    vectors = []
    for start in range(0, len(users.user_continuous), USERS_PER_BLOCK):
        part = Examples(*(values[start : start + USERS_PER_BLOCK] for values in users))
        weights = recency_weights(part.history_positions, model.n_items)
        tensors = (part.user_categorical, part.user_continuous, part.history_positions.astype(np.int64), weights)
        vectors.append(model.user_vectors(*(torch.from_numpy(np.ascontiguousarray(values)) for values in tensors)))
    return torch.cat(vectors).numpy()


def retriever_data(
    features: Features, train: pd.DataFrame, rows: np.ndarray, filter_seen: bool = True, seed: int = 0
) -> RetrieverData:
    """rows: int64 [N] ascending, the positive events of `train`, the frame the features were built from, to learn from.

    filter_seen: what a user already had is not served again, so it is not learned as a target either
    seed: which events the towers learn from, where there are more than they have time for
    """
    if filter_seen:
        rows = rows[~train.iloc[rows].duplicated(["user_id", "item_id"]).to_numpy()]
    events = train.iloc[rows]
    user_ids = np.unique(events["user_id"].to_numpy())
    positives = matrix_of(events, user_ids, features.items.ids)
    if len(rows) > MOST_EXAMPLES:
        rows = np.sort(np.random.default_rng(seed).choice(rows, MOST_EXAMPLES, replace=False))
    return RetrieverData(
        positives=positives,
        items=item_inputs(features),
        user_rows=tuple(features.user_rows.values()),
        examples=_at_the_clock(features, train, rows),
        targets=features.items.positions(train["item_id"].to_numpy()[rows]),
        takers=np.searchsorted(user_ids, train["user_id"].to_numpy()[rows]),
    )


def _at_the_clock(features: Features, train: pd.DataFrame, rows: np.ndarray) -> Examples:
    """Users just before rows of `train`, seen from the store's clock, from which they are seen when they are served."""
    clocks = np.full(len(rows), features.as_of_s)
    context = context_of(train.iloc[rows], features.context)
    return features.encode_moments(features.log.before_rows(train, rows), clocks, context)


def blocked_of(seen: sp.csr_matrix) -> Blocked:
    """The stored entries of a CSR [B, n_items]."""
    return Blocked(seen.indices.astype(np.int64), seen.indptr.astype(np.int64))


def item_inputs(features: Features) -> ItemInputs:
    """The catalogue without its ids: every item has rows of its own by position."""
    arrays = features.item_arrays
    return ItemInputs(
        arrays.categorical[:, 1:], tuple(arrays.lists.values()), arrays.continuous, tuple(features.item_rows.values())[1:]
    )
