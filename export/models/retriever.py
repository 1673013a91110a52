"""The retriever: item-item neighbours in closed form, and two towers that begin as their low-rank half and then learn the rest.

    chosen = choose_retriever(retriever_data(features, train, earlier_rows), held_out_of(features, train, later, …), settings)
    served = fit_retriever(retriever_data(features, train, all_rows), chosen.settings)

A `Retriever` retrieves in process exactly as the published stage does (`export/retrieval/save.py` writes it). `chosen`, which
has not seen the held-out positives, is what the ranker learns from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from sklearn.utils.extmath import randomized_svd

from export.evaluation.metrics import countable, ndcg_at, recall_at
from export.features.build import Examples, Features, context_of
from export.models.item_item import ItemItemSettings, fit_neighbours
from export.models.train_two_tower import TowerSettings, train_towers
from export.models.two_tower import ItemInputs, TwoTower
from stages.search import Blocked, Neighbours, Search, recency_weights

USERS_PER_BLOCK = 512
LOGITS_PER_WEIGHT = 10.0  # weights of EASE are shares of an item's demand, far smaller than differences of logits
L2_GRID = (100.0, 300.0, 1000.0)
MOST_COMPARED = 256  # candidates
BLEND_GRID = (0.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


@dataclass(frozen=True)
class RetrieverSettings:
    item_item: ItemItemSettings = field(default_factory=ItemItemSettings)
    towers: TowerSettings = field(default_factory=TowerSettings)
    blend: float = 100.0  # logits of the towers per unit of item-item score; chosen on validation


@dataclass(frozen=True)
class RetrieverData:
    """One training log as the retriever reads it.

    positives: CSR float32 [n_users, n_items], 1.0 where a user took an item
    items: the encoded catalogue; user_rows: rows of the tables of user_categorical
    examples: users at the N moments just before they took targets, int64 [N] positions
    """

    positives: sp.csr_matrix
    items: ItemInputs
    user_rows: tuple[int, ...]
    examples: Examples
    targets: np.ndarray

    @property
    def n_items(self) -> int:
        return self.positives.shape[1]


class HeldOut(NamedTuple):
    """Positives the fitted log does not hold: of N users at the moment after it, who have `seen` (CSR [N, n_items]) and then
    took `relevant` (CSR [N, n_items], at least one each)."""

    users: Examples
    seen: sp.csr_matrix
    relevant: sp.csr_matrix


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

    def blended(self, blend: float) -> Retriever:
        """The same with another weight of the neighbours."""
        return replace(self, settings=replace(self.settings, blend=blend))

    def retrieve(self, users: Examples, seen: sp.csr_matrix, count: int) -> tuple[np.ndarray, np.ndarray]:
        """-> (int64 [N, count] positions by falling score, n_items padded; float32 [N, count] scores, -inf padded).

        seen: CSR [N, n_items]; stored entries are not retrieved
        """
        return _exact(self.search, self.user_vectors(users), users, seen, count)


def fit_retriever(
    data: RetrieverData, settings: RetrieverSettings, seed: int = 0, say: Callable[[str], None] = print
) -> Retriever:
    """Minutes on one core, seconds on small logs."""
    neighbours = fit_neighbours(data.positives, settings.item_item, np.random.default_rng(seed))
    say(f"  item-item: {(neighbours.weights > 0).sum():,} neighbours of {data.n_items:,} items")
    return _with_towers(data, neighbours, settings, seed, say)


def choose_retriever(
    data: RetrieverData, held_out: HeldOut, settings: RetrieverSettings, seed: int = 0, say: Callable[[str], None] = print
) -> Retriever:
    """As `fit_retriever`, with the item-item regularisation and the blend that find the held-out positives best.

    held_out is not learned from. The settings chosen are in the result.
    """
    best, neighbours, best_found = settings, None, -np.inf
    for l2 in L2_GRID:
        tried = replace(settings, item_item=replace(settings.item_item, l2=l2))
        fitted = fit_neighbours(data.positives, tried.item_item, np.random.default_rng(seed))
        nobody = np.zeros((len(held_out.users.history_positions), 1), np.float32)
        alone = Search(np.zeros((data.n_items, 1), np.float32), fitted, np.ones(data.n_items, bool))
        found = _found(_exact(alone, nobody, held_out.users, held_out.seen, MOST_COMPARED)[0], held_out.relevant)
        say(f"  item-item: l2 {l2:g} finds {found:.4f}")
        if found > best_found:
            best, neighbours, best_found = tried, fitted, found
    retriever = _with_towers(data, neighbours, best, seed, say)
    found = {}
    for blend in BLEND_GRID:
        retrieved, _ = retriever.blended(blend).retrieve(held_out.users, held_out.seen, MOST_COMPARED)
        found[blend] = _found(retrieved, held_out.relevant)
        say(f"  towers + {blend:g} item-item finds {found[blend]:.4f}")
    return retriever.blended(max(found, key=found.get))


def _with_towers(
    data: RetrieverData, neighbours: Neighbours, settings: RetrieverSettings, seed: int, say: Callable[[str], None]
) -> Retriever:
    torch.manual_seed(seed)
    model = TwoTower(data.items, data.user_rows, data.examples.user_continuous.shape[1], settings.towers.width)
    model.begin_as(*low_rank(neighbours, settings.towers.width - 1, seed), log_popularity(data.positives))
    train_towers(model, data.examples, data.targets, settings.towers, seed, say)
    return Retriever(model, neighbours, settings, item_vectors(model))


def _exact(
    search: Search, vectors: np.ndarray, users: Examples, seen: sp.csr_matrix, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """`Search.exact` of many users, a block at a time: a block scores the whole catalogue."""
    parts = []
    for start in range(0, len(vectors), USERS_PER_BLOCK):
        block = slice(start, start + USERS_PER_BLOCK)
        parts.append(search.exact(vectors[block], users.history_positions[block], blocked_of(seen[block]), count))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


def _found(retrieved: np.ndarray, relevant: sp.csr_matrix) -> float:
    """What settings are chosen by: the head of the list, and with half the weight what a ranker could still bring up."""
    head = ndcg_at(retrieved, relevant, 10) + recall_at(retrieved, relevant, 20)
    return float(np.mean(head + 0.5 * recall_at(retrieved, relevant, MOST_COMPARED)))


def low_rank(neighbours: Neighbours, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """-> (history side, item side), float32 [n_items, width] each: their inner products are the neighbours' weights, nearly."""
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


def retriever_data(features: Features, train: pd.DataFrame, rows: np.ndarray, filter_seen: bool = True) -> RetrieverData:
    """rows: int64 [N] ascending, the positive events of `train`, the frame the features were built from, to learn from.

    filter_seen: what a user already had is not served again, so it is not learned as a target either.
    """
    if filter_seen:
        rows = rows[~train.iloc[rows].duplicated(["user_id", "item_id"]).to_numpy()]
    events = train.iloc[rows]
    positives = _matrix(features, np.unique(events["user_id"].to_numpy()), events)
    targets = features.items.positions(events["item_id"].to_numpy())
    examples = _at_the_clock(features, train, rows)
    return RetrieverData(positives, item_inputs(features), tuple(features.user_rows.values()), examples, targets)


def held_out_of(
    features: Features, train: pd.DataFrame, later: pd.DataFrame, max_users: int, rng: np.random.Generator
) -> HeldOut:
    """later: a later part of `train`, each user's last events, with their row number in `train` as "row"."""
    first = later.drop_duplicates("user_id").sort_values("user_id")
    user_ids, rows = first["user_id"].to_numpy(), first["row"].to_numpy()
    earlier = np.ones(len(train), bool)
    earlier[later["row"].to_numpy()] = False
    seen = _matrix(features, user_ids, train[earlier])
    taken = _matrix(features, user_ids, later[later["positive"].to_numpy()])
    relevant = (taken - taken.multiply(seen)).tocsr()
    relevant.eliminate_zeros()
    kept = np.flatnonzero(countable(relevant))
    if len(kept) > max_users:
        kept = np.sort(rng.choice(kept, max_users, replace=False))
    return HeldOut(_at_the_clock(features, train, rows[kept]), seen[kept], relevant[kept])


def _at_the_clock(features: Features, train: pd.DataFrame, rows: np.ndarray) -> Examples:
    """Users just before rows of `train`, seen from the store's clock, from which they are seen when they are served."""
    clocks = np.full(len(rows), features.as_of_s)
    context = context_of(train.iloc[rows], features.context)
    return features.encode_moments(features.log.before_rows(train, rows), clocks, context)


def _matrix(features: Features, user_ids: np.ndarray, events: pd.DataFrame) -> sp.csr_matrix:
    """CSR float32 [len(user_ids), n_items], 1.0 where one of these users met an item. user_ids: int64, ascending."""
    events = events[events["user_id"].isin(user_ids).to_numpy()]
    entries = (
        np.searchsorted(user_ids, events["user_id"].to_numpy()),
        features.items.positions(events["item_id"].to_numpy()),
    )
    matrix = sp.csr_matrix((np.ones(len(events), np.float32), entries), shape=(len(user_ids), features.items.n_items))
    matrix.data[:] = 1.0  # met twice is met
    return matrix


def blocked_of(seen: sp.csr_matrix) -> Blocked:
    """The stored entries of a CSR [B, n_items] as pairs."""
    return Blocked(np.repeat(np.arange(seen.shape[0]), np.diff(seen.indptr)), seen.indices.astype(np.int64))


def item_inputs(features: Features) -> ItemInputs:
    """The catalogue without its ids: every item has rows of its own by position."""
    arrays = features.item_arrays
    return ItemInputs(
        arrays.categorical[:, 1:], tuple(arrays.lists.values()), arrays.continuous, tuple(features.item_rows.values())[1:]
    )
