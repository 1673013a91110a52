"""The retriever: item-item neighbours in closed form, and two towers initialised with their low-rank factors and then trained.
Where they help, it also has a transformer over the history (sequence.py) and a graph model (graph.py).

    data = prepare_data(features, train, rows)
    retriever = fit_retriever(data, RetrieverSettings(), seed)
    positions, scores = retriever.retrieve(features.encode_users(user_ids), seen, count=256)

It retrieves in process exactly as the published stage (`training/retrieval/save.py` writes it). The defaults suit shop, film
and grocery logs. A smaller l2 orders the candidates better, by 3 % on the shop's log and 10 % on the grocery's. But after the
ranker, the lists of the latter are no better, so validation of the candidates alone cannot choose l2.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pandas as pd
import scipy.sparse as sp
import torch
from sklearn.utils.extmath import randomized_svd
from torch import Tensor

from serving.stages.search.search import Neighbours, Search, compute_recency_weights
from training.dataset.matrix import make_matrix
from training.features.build import Examples, Features, take_context
from training.features.items import ItemArrays
from training.models.candidates.exact_search import search_exactly
from training.models.candidates.graph import Graph, GraphAndTower, GraphSettings, fit_graph
from training.models.candidates.item_item import ItemItemSettings, fit_neighbours
from training.models.candidates.sequence import SequenceModel
from training.models.candidates.train_sequence import SequenceSettings, Taken, cut_windows, train_sequence
from training.models.candidates.train_two_tower import TowerSettings, train_towers
from training.models.candidates.two_tower import ItemInputs, TwoTower, UserTower

MOST_SCORED = 512  # users whose scores give the graph model its scale
USERS_PER_BLOCK = 128
MOST_EXAMPLES = TowerSettings.most_examples
SMOOTHING = 10.0  # imaginary users added to those who took an item; they took it again as often as users do on average
LOGITS_PER_WEIGHT = 10.0  # scales EASE's weights, which are far smaller than differences of logits


@dataclass(frozen=True)
class RetrieverSettings:
    item_item: ItemItemSettings = field(default_factory=ItemItemSettings)
    towers: TowerSettings = field(default_factory=TowerSettings)
    blend: float = 100.0  # logits of the towers per unit of item-item score
    sequence: SequenceSettings | None = None  # None: without the transformer
    graph: GraphSettings | None = None  # None: without the graph model


@dataclass(frozen=True)
class RetrieverData:
    """One training log, prepared for the retriever.

    positives: CSR float32 [n_users, n_items], 1.0 where a user took an item
    items: the encoded catalogue; user_rows: number of rows of each embedding table of user_categorical
    examples: users just before N positives; targets: their items, int64 [N] positions; takers: int64 [N] rows of positives
    taken: the positives, for the sequence model; empty where there is none
    repeat_shares: float32 [n_items], from `compute_repeat_shares`; zeros where what users took before is not served again
    """

    positives: sp.csr_matrix
    items: ItemInputs
    user_rows: tuple[int, ...]
    examples: Examples
    targets: np.ndarray
    takers: np.ndarray
    taken: Taken
    repeat_shares: np.ndarray

    @property
    def n_items(self) -> int:
        return self.positives.shape[1]


@dataclass(frozen=True)
class Retriever:
    """The models of a retriever, whose scores are added up.

    In a vector, the values of the sequence model and of the graph model come before those of the towers.

    neighbours: weights as fitted, before the blend; tower_vectors: float32 [n_items, D]
    sequence_weight: logits of the towers per logit of the sequence model; graph_weight: per unit of the graph's scores
    repeat_shares: as in RetrieverData; repeat_weight: item-item weight of an item with itself, per unit of its share
    started: whether the sequence model was trained from the weights of an earlier generation
    """

    model: TwoTower
    neighbours: Neighbours
    settings: RetrieverSettings
    tower_vectors: np.ndarray = field(repr=False)
    sequence: SequenceModel | None = None
    sequence_weight: float = 1.0
    graph: Graph | None = field(default=None, repr=False)
    graph_weight: float = 1.0
    repeat_shares: np.ndarray = field(default_factory=lambda: np.empty(0, np.float32), repr=False)
    repeat_weight: float = 0.0
    started: bool = False

    @cached_property
    def item_vectors(self) -> np.ndarray:
        """float32 [n_items, S + G + D], S or G 0 without such a model"""
        blocks = [model.item_vectors for model in (self.sequence, self.graph) if model is not None]
        return np.ascontiguousarray(np.hstack([*blocks, self.tower_vectors]) if blocks else self.tower_vectors)

    @cached_property
    def history_table(self) -> np.ndarray:
        """float32 [n_items + 1, D - 1 + G]; `user_network` reads the rows of a history's items"""
        model_table = self.model.history_table.weight.detach().numpy()
        return model_table if self.graph is None else np.hstack([model_table, self.graph.history])

    @property
    def user_network(self) -> UserTower | GraphAndTower:
        """The network of the last G + D values of a user vector."""
        tower = self.model.user_tower
        return tower if self.graph is None else GraphAndTower(tower, self.graph.history.shape[1], self.graph_weight)

    @property
    def search(self) -> Search:
        """Return an exact searcher over the whole catalogue."""
        return Search(self.item_vectors, self.blended_neighbours, np.ones(len(self.item_vectors), bool))

    @property
    def blended_neighbours(self) -> Neighbours:
        """Return the neighbours whose weights are logits of the towers, with each item itself where repeats are served."""
        neighbours = self.neighbours
        if self.repeat_weight:
            neighbours = add_themselves(neighbours, self.repeat_shares * np.float32(self.repeat_weight))
        return Neighbours(neighbours.positions, neighbours.weights * np.float32(self.settings.blend))

    def compute_user_vectors(self, users: Examples) -> np.ndarray:
        """Return user vectors, float32 [N, S + G + D]."""
        vectors = self._compute_network_vectors(users)
        if self.sequence is None:
            return vectors
        return np.concatenate([self.sequence.compute_user_vectors(users) * np.float32(self.sequence_weight), vectors], axis=1)

    @torch.no_grad()
    def make_network_inputs(self, users: Examples) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of `user_network` for N users."""
        history = users.history_positions.astype(np.int64)
        return (
            torch.from_numpy(self.history_table[history]),
            torch.from_numpy(compute_recency_weights(history, self.model.n_items)),
            self.model.embed_users(torch.from_numpy(np.ascontiguousarray(users.user_categorical))),
            torch.from_numpy(np.ascontiguousarray(users.user_continuous)),
        )

    @torch.no_grad()
    def _compute_network_vectors(self, users: Examples) -> np.ndarray:
        """Return the last G + D values of user vectors, float32 [N, G + D]."""
        network, blocks = self.user_network, []
        for start in range(0, len(users.user_continuous), USERS_PER_BLOCK):
            part = Examples(*(values[start : start + USERS_PER_BLOCK] for values in users))
            blocks.append(network(*self.make_network_inputs(part)).numpy())
        return np.concatenate(blocks)

    def weigh(self, *, sequence: float, graph: float, repeats: float) -> Retriever:
        """Return the retriever with other weights of its optional sources; a weight of 0 removes the source."""
        return replace(
            self,
            sequence=self.sequence if sequence else None,
            sequence_weight=sequence,
            graph=self.graph if graph else None,
            graph_weight=graph,
            repeat_weight=repeats,
        )

    def retrieve(self, users: Examples, seen: sp.csr_matrix, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions int64 [N, count], best first, padded with n_items, and scores float32 [N, count], padded with -inf.

        seen: CSR [N, n_items]; stored entries are not retrieved
        """
        return search_exactly(self.search, self.compute_user_vectors(users), users.history_positions, seen, count)


def fit_retriever(
    data: RetrieverData,
    settings: RetrieverSettings,
    seed: int,
    say: Callable[[str], None],
    start: SequenceModel | None = None,
) -> Retriever:
    """Fit the retriever: minutes on one core, seconds on small logs. start: a sequence model to train further, in place"""
    neighbours = fit_neighbours(data.positives, settings.item_item, np.random.default_rng(seed), say)
    say(f"  item-item: {(neighbours.weights > 0).sum():,} neighbours of {data.n_items:,} items")
    torch.manual_seed(seed)
    model = TwoTower(data.items, data.user_rows, data.examples.user_continuous.shape[1], settings.towers.width)
    model.initialise(*factorise(neighbours, settings.towers.width - 1, seed), compute_log_popularity(data.positives))
    train_towers(model, data.examples, data.targets, data.takers, settings.towers, seed, say)
    graph = None
    if settings.graph:
        scale = settings.blend * compute_root_mean_square(data.positives, neighbours, np.random.default_rng(seed))
        graph = fit_graph(data.positives, settings.graph, scale, seed)
    fitted = Retriever(model, neighbours, settings, compute_item_vectors(model), graph=graph, repeat_shares=data.repeat_shares)
    if settings.sequence is None:
        return fitted
    windows = cut_windows(data.taken, data.n_items, settings.sequence.shape.length)
    if not len(windows.users):
        return fitted
    sequence = train_sequence(windows, data.n_items, settings.sequence, seed, say, start)
    return replace(fitted, sequence=sequence, started=start is not None)


def add_themselves(neighbours: Neighbours, weights: np.ndarray) -> Neighbours:
    """Make each item a neighbour of itself, in place of its weakest one. weights: float32 [n_items]"""
    own_positions = np.arange(len(neighbours.positions), dtype=np.int32)[:, None]  # the padding row names the padding position
    padded = np.append(weights, np.float32(0.0))[:, None]
    return Neighbours(np.hstack([own_positions, neighbours.positions[:, :-1]]), np.hstack([padded, neighbours.weights[:, :-1]]))


def compute_repeat_shares(users: np.ndarray, positions: np.ndarray, n_items: int) -> np.ndarray:
    """Return the share of each item's takers who took it again, float32 [n_items], smoothed towards that of all items.

    users, positions: int64 [N], of positive events
    """
    _, row, times = np.unique(users * np.int64(n_items) + positions, return_index=True, return_counts=True)
    takers, again = (np.bincount(positions[row], values, n_items) for values in (None, times > 1))
    overall = again.sum() / max(takers.sum(), 1)
    return ((again + overall * SMOOTHING) / (takers + SMOOTHING)).astype(np.float32)


def make_neighbour_matrix(neighbours: Neighbours) -> sp.csr_matrix:
    """Return the weights, CSR float32 [n_items, n_items]."""
    n_items = len(neighbours.positions) - 1
    is_known = neighbours.positions[:-1] < n_items
    starts = np.append(0, np.cumsum(is_known.sum(axis=1)))
    entries = (neighbours.weights[:-1][is_known], neighbours.positions[:-1][is_known], starts)
    matrix = sp.csr_matrix(entries, shape=(n_items, n_items))
    matrix.sort_indices()
    return matrix


def compute_root_mean_square(positives: sp.csr_matrix, neighbours: Neighbours, rng: np.random.Generator) -> float:
    """Return the root mean square of the item-item scores of users (MOST_SCORED, drawn at random) for all items."""
    n_users, n_items = positives.shape
    sample = positives[rng.choice(n_users, min(MOST_SCORED, n_users), replace=False)]
    scores = sample @ make_neighbour_matrix(neighbours)
    return float(np.sqrt(np.square(scores.data).sum() / (sample.shape[0] * n_items)))


def factorise(neighbours: Neighbours, width: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (history side, item side), float32 [n_items, width]: their product is about LOGITS_PER_WEIGHT * weights."""
    matrix = make_neighbour_matrix(neighbours)
    n_items = matrix.shape[0]
    left, strength, right = randomized_svd(matrix, min(width, n_items), n_iter=4, random_state=seed)
    sides = [np.zeros((n_items, width), np.float32) for _ in range(2)]
    sides[0][:, : len(strength)] = left * np.sqrt(strength) * LOGITS_PER_WEIGHT
    sides[1][:, : len(strength)] = right.T * np.sqrt(strength)
    return sides[0], sides[1]


def compute_log_popularity(positives: sp.csr_matrix) -> np.ndarray:
    """Return the logarithm of each item's share of positives, float32 [n_items], with add-one smoothing."""
    counts = np.asarray(positives.sum(axis=0)).ravel() + 1.0
    return np.log(counts / counts.sum()).astype(np.float32)


@torch.no_grad()
def compute_item_vectors(model: TwoTower) -> np.ndarray:
    """Return item vectors, float32 [n_items, D]."""
    blocks = torch.arange(model.n_items).split(8_192)
    return torch.cat([model.compute_item_vectors(block) for block in blocks]).numpy()


def prepare_data(
    features: Features,
    train: pd.DataFrame,
    rows: np.ndarray,
    filter_seen: bool = True,
    for_sequences: bool = True,
    items: ItemArrays | None = None,
    seed: int = 0,
) -> RetrieverData:
    """Prepare the data. rows: int64 [N] ascending, positives to learn from. train: the log that the features were built from.

    filter_seen: do not learn targets that the user already had, because they are not served again
    for_sequences: also list the positives that the sequence model learns from
    items: the encoded catalogue; None: as it is served
    seed: draws MOST_EXAMPLES of more rows
    """
    taken = _list_taken(features, train, rows if for_sequences else rows[:0], filter_seen)
    shares = np.zeros(len(features.items.ids), np.float32)
    if filter_seen:
        rows = rows[~train.iloc[rows].duplicated(["user_id", "item_id"]).to_numpy()]
    events = train.iloc[rows]
    if not filter_seen:
        users, sold = np.unique(events["user_id"], return_inverse=True)[1], events["item_id"].to_numpy()
        shares = compute_repeat_shares(users, features.items.find_positions(sold), len(shares))
    user_ids = np.unique(events["user_id"].to_numpy())
    positives = make_matrix(events, user_ids, features.items.ids)
    if len(rows) > MOST_EXAMPLES:
        rows = np.sort(np.random.default_rng(seed).choice(rows, MOST_EXAMPLES, replace=False))
    examples, moments = train.iloc[rows], features.log.find_moments_before_rows(train, rows)
    times_s = examples["timestamp"].to_numpy()  # requests come now, however long ago a user's last event was
    return RetrieverData(
        positives=positives,
        items=make_item_inputs(features, features.item_arrays if items is None else items),
        user_rows=tuple(features.user_rows.values()),
        examples=features.encode_moments(moments, times_s, take_context(examples, features.context)),
        targets=features.items.find_positions(train["item_id"].to_numpy()[rows]),
        takers=np.searchsorted(user_ids, train["user_id"].to_numpy()[rows]),
        taken=taken,
        repeat_shares=shares,
    )


def _list_taken(features: Features, train: pd.DataFrame, rows: np.ndarray, filter_seen: bool) -> Taken:
    events = train.iloc[rows]
    items, times_s = features.items.find_positions(events["item_id"].to_numpy()), events["timestamp"].to_numpy()
    return Taken(events["user_id"].to_numpy(), items, times_s, not filter_seen)


def make_item_inputs(features: Features, arrays: ItemArrays) -> ItemInputs:
    """Return an encoded catalogue without its ids, because every item has its own row by position."""
    return ItemInputs(
        arrays.categorical[:, 1:], tuple(arrays.lists.values()), arrays.continuous, tuple(features.item_rows.values())[1:]
    )
