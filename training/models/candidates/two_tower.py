"""Two towers that map a user at a moment, and an item, to vectors of width D, whose inner product ranks the catalogue.

    history rows, newest first ─▶ weighted sum ──────────────┬──────────────▶ + ─▶ user vector = [ taste (D - 1) | 1 ]
    user_categorical ─▶ embedding rows ─┐                    │                ▲
    user_continuous ────────────────────┴▶ concatenate ◀─────┘ ─▶ MLP ────────┘

    item row + rows of its features + lists' means + numbers ─▶ item vector = [ taste (D - 1) | appeal ]

Histories and items have separate tables, because what an item says about its buyer differs from what makes it bought. They are
initialised as the two sides of a truncated SVD of the item-item weights: untrained towers are low-rank EASE. The last
dimension holds an item's popularity, which alone ranks items for an unknown user.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from serving.contract.tensors import NULL_ROW, OOV_ROW
from serving.stages.features.encode import Ragged
from training.models.modules import Modules

MOST_USER_WIDTH = 16
HIDDEN = 128  # units of the user tower
MOST_DENSE_ROWS = 250_000  # a table with more gets sparse gradients: a step touches few of its rows


@dataclass(frozen=True)
class ItemInputs:
    """The encoded catalogue, n_items + 1 rows, the last one padding.

    categorical: int64 [n_items + 1, Si]; lists: one Ragged of n_items + 1 lists per list; continuous: float32 [n_items + 1, Gi]
    table_rows: rows of the tables of the columns of `categorical`, then of the lists
    """

    categorical: np.ndarray
    lists: tuple[Ragged, ...]
    continuous: np.ndarray
    table_rows: tuple[int, ...]


class UserTower(nn.Module):
    """The user side without its tables, exported to `user_tower.onnx`.

    Inputs: history_vectors [B, H, D - 1] rows of the history table; history_weights [B, H], 0 at padding;
    user_embeddings [B, Eu] the rows of all user tables, side by side; user_continuous [B, Gu]. Output: user vectors [B, D].
    """

    def __init__(self, taste_width: int, embedding_width: int, n_continuous: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        first, last = nn.Linear(taste_width + embedding_width + n_continuous, HIDDEN), nn.Linear(HIDDEN, taste_width)
        self.mlp = nn.Sequential(first, nn.GELU(), last)
        nn.init.zeros_(last.weight)  # starts as the history alone
        nn.init.zeros_(last.bias)

    def forward(
        self, history_vectors: Tensor, history_weights: Tensor, user_embeddings: Tensor, user_continuous: Tensor
    ) -> Tensor:
        total = (history_vectors * history_weights.unsqueeze(2)).sum(dim=1)
        length = history_weights.square().sum(dim=1, keepdim=True).clamp(min=1.0).sqrt()
        pooled = total / length
        taste = self.scale * pooled + self.mlp(torch.cat([pooled, user_embeddings, user_continuous], dim=1))
        return torch.cat([taste, torch.ones_like(length)], dim=1)


class TwoTower(nn.Module):
    """Both towers with their tables."""

    item_categorical: Tensor
    item_continuous: Tensor

    def __init__(self, items: ItemInputs, user_rows: tuple[int, ...], user_continuous: int, width: int):
        """width: D, of both vectors; user_rows: table rows of the columns of user_categorical"""
        super().__init__()
        taste_width, self.n_items = width - 1, len(items.categorical) - 1
        self.history_table = _make_table(self.n_items + 1, taste_width, padding_idx=self.n_items)
        self.item_table = _make_table(self.n_items, taste_width)
        self.appeal = nn.Parameter(torch.zeros(self.n_items))
        self.user_tables = Modules(_make_table(rows, _choose_user_table_width(rows)) for rows in user_rows)
        self.user_tower = UserTower(taste_width, sum(_choose_user_table_width(rows) for rows in user_rows), user_continuous)
        n_single = items.categorical.shape[1]
        self.item_feature_tables = Modules(_make_table(rows, width) for rows in items.table_rows[:n_single])
        self.list_tables = Modules(nn.EmbeddingBag(rows, width, mode="mean") for rows in items.table_rows[n_single:])
        self.item_numbers = nn.Linear(items.continuous.shape[1], width)
        self._initialise_small()
        self.register_buffer("item_categorical", torch.from_numpy(np.ascontiguousarray(items.categorical[:-1])))
        self.register_buffer("item_continuous", torch.from_numpy(np.ascontiguousarray(items.continuous[:-1])))
        self.item_lists = [_pad_list(ragged, self.n_items) for ragged in items.lists]

    def initialise(self, history_side: np.ndarray, item_side: np.ndarray, appeal: np.ndarray) -> None:
        """Initialise the towers. history_side, item_side: float32 [n_items, D - 1]; appeal: float32 [n_items]."""
        with torch.no_grad():
            self.history_table.weight[:-1] = torch.from_numpy(history_side)
            self.item_table.weight.copy_(torch.from_numpy(item_side))
            self.appeal.copy_(torch.from_numpy(appeal))

    def compute_user_vectors(
        self, user_categorical: Tensor, user_continuous: Tensor, history: Tensor, weights: Tensor
    ) -> Tensor:
        """Return user vectors, float32 [B, D]. history: int64 [B, H] positions; weights: float32 [B, H]."""
        return self.user_tower(self.history_table(history), weights, self.embed_users(user_categorical), user_continuous)

    def embed_users(self, user_categorical: Tensor) -> Tensor:
        """Return the concatenated table rows, float32 [B, Eu], of int64 [B, Fu]."""
        if not len(self.user_tables):
            return torch.zeros(len(user_categorical), 0)
        return torch.cat([table(user_categorical[:, slot]) for slot, table in enumerate(self.user_tables)], dim=1)

    def compute_item_vectors(self, items: Tensor) -> Tensor:
        """Return item vectors, float32 [n, D], of positions int64 [n]."""
        vectors = self.item_numbers(self.item_continuous[items])
        for slot, table in enumerate(self.item_feature_tables):
            vectors = vectors + table(self.item_categorical[items, slot])
        for bag, (padded, lengths) in zip(self.list_tables, self.item_lists, strict=True):
            list_lengths = lengths[items]
            mask = torch.arange(padded.shape[1]) < list_lengths.unsqueeze(1)
            rows = padded[items][mask]
            offsets = torch.cumsum(list_lengths, 0) - list_lengths
            vectors = vectors + bag(rows, offsets)
        item_rows = torch.cat([self.item_table(items), self.appeal[items].unsqueeze(1)], dim=1)
        return vectors + item_rows

    def split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the parameters with dense gradients, and those with sparse ones."""
        sparse = {id(table.weight) for table in self.modules() if isinstance(table, nn.Embedding) and table.sparse}
        parameters = list(self.parameters())
        return [p for p in parameters if id(p) not in sparse], [p for p in parameters if id(p) in sparse]

    @torch.no_grad()
    def treat_as_unknown(self, initial_rows: Tensor) -> None:
        """Set the rows of the user id table that training left as they were to the unknown user's row.

        initial_rows: float32 [rows, W], the table before training
        """
        table = self.user_tables[0].weight
        table[(table == initial_rows).all(dim=1)] = table[OOV_ROW].clone()

    def _initialise_small(self) -> None:
        """Initialise the items' features to zero, so that the towers start exactly as `initialise` sets them."""
        for table in (*self.item_feature_tables, *self.list_tables):
            nn.init.zeros_(table.weight)
        nn.init.zeros_(self.item_numbers.weight)
        nn.init.zeros_(self.item_numbers.bias)
        for table in (*self.user_tables, self.item_table):
            nn.init.normal_(table.weight, std=0.05)
        with torch.no_grad():
            self.history_table.weight.normal_(std=0.05)
            self.history_table.weight[self.n_items] = 0.0


def forget_users(user_categorical: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Mask the user id (column 0) in a random share of rows, so that the towers work for cold users."""
    forgotten = torch.rand(len(user_categorical), generator=generator) < share
    changed = user_categorical.clone()
    changed[forgotten, 0] = OOV_ROW
    return changed


def _make_table(rows: int, width: int, padding_idx: int | None = None) -> nn.Embedding:
    return nn.Embedding(rows, width, padding_idx=padding_idx, sparse=rows > MOST_DENSE_ROWS)


def _choose_user_table_width(rows: int) -> int:
    """Return the width of a user table, smaller for small vocabularies."""
    return int(min(MOST_USER_WIDTH, max(4, round(rows**0.5))))


def _pad_list(ragged: Ragged, n_items: int) -> tuple[Tensor, Tensor]:
    """Return rows int64 [n_items, L] and lengths int64 [n_items] >= 1; an empty list is one NULL_ROW."""
    lengths = np.diff(ragged.offsets)[:n_items]
    filled = np.maximum(lengths, 1)
    padded = np.full((n_items, int(filled.max(initial=1))), NULL_ROW, np.int64)
    padded[np.arange(padded.shape[1]) < lengths[:, None]] = ragged.values[: ragged.offsets[n_items]]
    return torch.from_numpy(padded), torch.from_numpy(filled)
