"""The ranker's embedding tables."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from serving.contract.tensors import OOV_ROW, PAD_ROW


class Table(nn.Module):
    """One embedding table. Row 0 is padding and stays zero; rows with too few examples share OOV's vector.

    Vectors that no row uses are dropped: of a million rows only thousands have enough examples to be trained.
    """

    shared: torch.Tensor
    owners: torch.Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.vectors = _make_embedding(rows, width, padding_idx=PAD_ROW)
        self.register_buffer("shared", torch.arange(rows))  # row -> the place of its vector
        self.register_buffer("owners", torch.arange(rows))  # place -> the row whose vector it is

    def share_rare(self, seen: np.ndarray, at_least: int) -> None:
        """Let rows with fewer than `at_least` examples share OOV's vector. seen: int [rows] examples per row."""
        self._share(*torch.unique(self._find_rows_used(seen, at_least), return_inverse=True))

    def share_like(self, other: Table) -> None:
        """Let the same rows share OOV's vector as in another table with these rows."""
        self._share(other.owners, other.shared)

    def _find_rows_used(self, seen: np.ndarray, at_least: int) -> torch.Tensor:
        """Return the row whose vector each row uses, int64 [rows]."""
        rare = torch.from_numpy(seen < at_least)
        rare[PAD_ROW] = False
        return torch.where(rare, OOV_ROW, torch.arange(len(rare)))

    def _share(self, owners: torch.Tensor, shared: torch.Tensor) -> None:
        self.vectors = nn.Embedding.from_pretrained(self.vectors.weight.detach()[owners], freeze=False, padding_idx=PAD_ROW)
        self.owners, self.shared = owners.clone(), shared.clone()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean of the non-padding rows, float32 [..., D], zeros where all are padding. rows: int64 [..., L]."""
        vectors = self.look_up(self.shared[rows])
        if rows.shape[-1] == 1:
            return vectors.squeeze(-2)
        return vectors.sum(dim=-2) / (rows != PAD_ROW).sum(dim=-1, keepdim=True).clamp(min=1)

    def look_up(self, places: torch.Tensor) -> torch.Tensor:
        """Return the vectors at places, int64 [...], as float32 [..., D]."""
        return self.vectors(places)

    def array(self) -> np.ndarray:
        """Return the table as it is served, float32 [rows, D]."""
        return self.vectors.weight.detach()[self.shared].numpy()


class MixedTable(Table):
    """A table whose rows from `first_cold` on have width W (`cold_width`) and are widened by a projection.

    Cold rows with too few examples share a separate narrow row.
    """

    def __init__(self, rows: int, width: int, first_cold: int, cold_width: int) -> None:
        super().__init__(first_cold, width)
        self.first_cold = first_cold
        self.narrow = _make_embedding(rows - first_cold + 1, cold_width)  # the last row is shared by rare ones
        self.projection = nn.Parameter(torch.randn(cold_width, width) / cold_width**0.5)  # keeps the size of a row
        self.register_buffer("shared", torch.arange(rows))

    def share_rare(self, seen: np.ndarray, at_least: int) -> None:
        self.shared.copy_(self._find_rows_used(seen, at_least))
        self.shared[self.first_cold :][torch.from_numpy(seen[self.first_cold :] < at_least)] = len(self.shared)

    def share_like(self, other: Table) -> None:
        self.shared.copy_(other.shared)

    def look_up(self, places: torch.Tensor) -> torch.Tensor:
        wide = self.vectors(places.clamp(max=self.first_cold - 1))
        narrow = self.narrow((places - self.first_cold).clamp(min=0))
        return torch.where((places < self.first_cold).unsqueeze(-1), wide, narrow @ self.projection)

    def array(self) -> np.ndarray:
        """Return the hot rows, float32 [first_cold, D]."""
        return self.vectors.weight.detach()[self.shared[: self.first_cold]].numpy()

    def cold_array(self) -> np.ndarray:
        """Return the cold rows, float32 [rows - first_cold, W]."""
        return self.narrow.weight.detach()[self.shared[self.first_cold :] - self.first_cold].numpy()


def _make_embedding(rows: int, width: int, padding_idx: int | None = None) -> nn.Embedding:
    vectors = nn.Embedding(rows, width, padding_idx=padding_idx)
    nn.init.normal_(vectors.weight, std=0.05)
    with torch.no_grad():
        if padding_idx is not None:
            vectors.weight[padding_idx] = 0.0
    return vectors
