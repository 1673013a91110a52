"""DLRM, arranged so that the user's part is computed once per request, not once per candidate.

    user numbers ─┐                                     user table rows ──┐
                  ├▶ bottom MLP ─▶ row 0 [D] ───────────────────────────▶ ├▶ dots of all row pairs ─▶ top MLP ─▶ logit
    pair numbers ─┘                                     item table rows ──┘   (and row 0 itself)

Rows are ordered: bottom MLP, user slots, item slots. HugeCTR's Interaction gives row 0 itself, then the pairs, for j in 1..n-1:
for i in 0..j-1: (i, j), then a zero column. `collect_layers()` returns the weights in that layout, so that a plain DLRM over
one flat row per pair (tests/long/training/models/test_dlrm.py) computes the same logits.

Letters: B requests, C candidates, D embedding width, Fu / Si user and item slots, Gu / Gp numbers of the user and of the pair.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from training.models.modules import Modules
from training.models.rankers.embedding import Table


@dataclass(frozen=True)
class Shape:
    """Sizes of the network. Tables: name -> rows, in the order of their slots."""

    user_tables: Mapping[str, int]
    item_tables: Mapping[str, int]
    user_numbers: int  # Gu
    pair_numbers: int  # Gp
    width: int = 16  # D
    bottom: tuple[int, ...] = (64,)  # hidden layers; a layer of `width` follows
    top: tuple[int, ...] = (128, 64)  # hidden layers; one logit follows

    def make_table(self, rows: int) -> Table:
        """Return a new table of that many rows."""
        return Table(rows, self.width)

    @property
    def n_rows(self) -> int:
        """The rows of the interaction: bottom MLP and all slots."""
        return 1 + len(self.user_tables) + len(self.item_tables)

    @property
    def interaction_width(self) -> int:
        return self.width + self.n_rows * (self.n_rows - 1) // 2 + 1


class Network(nn.Module):
    """DLRM without its tables, for export to ONNX.

    user_numbers f4 [B, Gu], user_rows f4 [B, Fu, D], pair_numbers f4 [B, C, Gp], item_rows f4 [B, C, Si, D] -> logits f4 [B, C]
    """

    mean: torch.Tensor
    scale: torch.Tensor
    own: torch.Tensor
    crossed: torch.Tensor
    user_user: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        numbers = shape.user_numbers + shape.pair_numbers
        self.bottom = _make_linears(numbers, *shape.bottom, shape.width)
        self.top = _make_linears(shape.interaction_width, *shape.top, 1)
        # Standardisation of the numbers: `fold` moves it into the first layer before export.
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("scale", torch.ones(numbers))
        self.folded = False
        for name, index in _find_pair_columns(shape).items():
            self.register_buffer(name, torch.from_numpy(index), persistent=False)

    def forward(
        self, user_numbers: torch.Tensor, user_rows: torch.Tensor, pair_numbers: torch.Tensor, item_rows: torch.Tensor
    ) -> torch.Tensor:
        dense = self._run_bottom(user_numbers, pair_numbers)  # [B, C, D]
        candidate_rows = torch.cat([dense.unsqueeze(2), item_rows], dim=2)  # [B, C, 1 + Si, D]
        hidden = self._interact(dense, candidate_rows, user_rows)
        for number, layer in enumerate(self.top[1:], 1):
            hidden = self.multiply(f"top{number}", torch.relu(hidden), layer.weight, layer.bias)
        return hidden.squeeze(2)

    def multiply(self, name: str, values: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return a candidate's values times a weight: `values` f4 [B, C, in], `weight` [out, in], `bias` [out] -> [B, C, out].

        name: of the product; a quantised network stores its ranges under it
        """
        return functional.linear(values, weight, bias)

    def _run_bottom(self, user_numbers: torch.Tensor, pair_numbers: torch.Tensor) -> torch.Tensor:
        n_user = self.shape.user_numbers
        if not self.folded:
            user_numbers = (user_numbers - self.mean[:n_user]) * self.scale[:n_user]
            pair_numbers = (pair_numbers - self.mean[n_user:]) * self.scale[n_user:]
        weight = self.bottom[0].weight
        user_part = user_numbers @ weight[:, :n_user].T + self.bottom[0].bias
        hidden = torch.relu(user_part.unsqueeze(1) + self.multiply("bottom0", pair_numbers, weight[:, n_user:]))
        for number, layer in enumerate(self.bottom[1:], 1):
            hidden = torch.relu(self.multiply(f"bottom{number}", hidden, layer.weight, layer.bias))
        return hidden

    def _interact(self, dense: torch.Tensor, candidate_rows: torch.Tensor, user_rows: torch.Tensor) -> torch.Tensor:
        """Return the first layer of the top MLP, [B, C, top[0]], with the weights in HugeCTR's column order.

        Products are computed as full squares; those that HugeCTR lacks (the diagonal, the other triangle) have zero weights.
        """
        weight = torch.cat([self.top[0].weight.T, self.top[0].weight.new_zeros(1, self.top[0].out_features)])
        user_user = (user_rows @ user_rows.transpose(1, 2)).flatten(1)  # [B, Fu * Fu]
        user_part = user_user @ weight[self.user_user] + self.top[0].bias
        crossed = (candidate_rows.flatten(1, 2) @ user_rows.transpose(1, 2)).unflatten(
            1, (-1, candidate_rows.shape[2])
        )  # [B, C, 1 + Si, Fu]
        return (
            user_part.unsqueeze(1)
            + dense @ weight[: self.shape.width]
            + self.interact_own(candidate_rows, weight)
            + crossed.flatten(2) @ weight[self.crossed]
        )

    def interact_own(self, candidate_rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return the weighted products of a candidate's rows with each other, [B, C, top[0]].

        candidate_rows: [B, C, 1 + Si, D]; weight: [columns + 1, top[0]], the last row zero
        """
        products = (candidate_rows @ candidate_rows.transpose(2, 3)).flatten(2)  # [B, C, (1 + Si)²]
        return products @ weight[self.own]

    @torch.no_grad()
    def fold(self) -> None:
        """Fold the standardisation of the numbers into the first layer; logits stay the same."""
        if not self.folded:
            first = self.bottom[0]
            first.weight.mul_(self.scale)
            first.bias.sub_(first.weight @ self.mean)
            self.folded = True

    def collect_layers(self) -> dict[str, np.ndarray]:
        """Return weights float32 [in, out] and biases [out] of a folded network, in HugeCTR's order."""
        named_layers = [(f"bottom{i}", layer) for i, layer in enumerate(self.bottom)]
        named_layers += [(f"top{i}", layer) for i, layer in enumerate(self.top)]
        arrays: dict[str, np.ndarray] = {}
        for name, layer in named_layers:
            arrays[f"{name}.weight"] = np.ascontiguousarray(layer.weight.detach().numpy().T)
            arrays[f"{name}.bias"] = layer.bias.detach().numpy().copy()
        return arrays


class RankingModel(nn.Module):
    """Tables, and a network over their rows. reads_history: the network also takes the rows of the history"""

    network: nn.Module
    reads_history = False

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.user_tables = Modules(map(shape.make_table, shape.user_tables.values()))
        self.item_tables = Modules(map(shape.make_table, shape.item_tables.values()))

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of users, then of items."""
        return (*self.user_tables, *self.item_tables)

    def list_table_rows(self) -> Iterator[torch.Tensor]:
        """Yield the parameters that are rows of tables."""
        return (table.vectors.weight for table in self.tables)

    def read_like(self, other: RankingModel) -> None:
        """Copy the standardisation and the rows that share OOV's vector from another model with these tables."""
        for name in ("mean", "scale"):
            getattr(self.network, name).copy_(getattr(other.network, name))
        for table, other_table in zip(self.tables, other.tables, strict=True):
            table.share_like(other_table)

    def look_up_users(self, user_categorical: torch.Tensor) -> torch.Tensor:
        """Return the user rows, float32 [B, Fu, D], of int64 [B, Fu]."""
        return torch.stack([table(user_categorical[:, [slot]]) for slot, table in enumerate(self.user_tables)], dim=1)

    def look_up_items(self, slots: list[torch.Tensor]) -> torch.Tensor:
        """Return the item rows, float32 [..., Si, D], of one int64 [..., L] per slot."""
        return torch.stack([table(rows) for table, rows in zip(self.item_tables, slots, strict=True)], dim=-2)


class DLRM(RankingModel):
    """The model that is served, or compressed."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.network: Network = Network(shape)


def _make_linears(*sizes: int) -> Modules[nn.Linear]:
    return Modules(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))


def _find_pair_columns(shape: Shape) -> dict[str, np.ndarray]:
    """Return the interaction's column of each product in the three squares, int64; one past the end for products it lacks.

    own: candidate rows (bottom MLP, item slots) by each other; crossed: candidate rows by user slots; user_user: user slots by
    each other
    """
    n_user, n_rows = len(shape.user_tables), shape.n_rows
    columns = np.full((n_rows, n_rows), shape.interaction_width)
    columns[np.tril_indices(n_rows, -1)] = shape.width + np.arange(n_rows * (n_rows - 1) // 2)
    users = np.arange(1, 1 + n_user)
    candidates = np.concatenate([[0], np.arange(1 + n_user, n_rows)])
    either_way = np.minimum(columns, columns.T)
    return {
        "own": columns[np.ix_(candidates, candidates)].ravel(),
        "crossed": either_way[np.ix_(candidates, users)].ravel(),
        "user_user": columns[np.ix_(users, users)].ravel(),
    }
