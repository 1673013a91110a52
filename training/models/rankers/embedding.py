"""The ranker's embedding tables."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from serving.contract.tensors import OOV_ROW, PAD_ROW


class Table(nn.Module):
    """One embedding table. Row 0 is padding and stays zero; rows with too few examples share OOV's vector.

    Vectors that no row uses are dropped: of a million rows only thousands have enough examples to be trained.
    """

    shared: torch.Tensor
    owners: torch.Tensor

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.vectors = _make_embedding(rows, width)
        self.register_buffer("shared", torch.arange(rows))  # row -> the place of its vector
        self.register_buffer("owners", torch.arange(rows))  # place -> the row whose vector it is

    def share_rare(self, seen: np.ndarray, at_least: int) -> None:
        """Let rows with fewer than `at_least` examples share OOV's vector. seen: int [rows] examples per row."""
        rare = torch.from_numpy(seen < at_least)
        rare[PAD_ROW] = False
        rows_used = torch.where(rare, OOV_ROW, torch.arange(len(rare)))
        self._share(*torch.unique(rows_used, return_inverse=True))

    def share_like(self, other: Table) -> None:
        """Let the same rows share OOV's vector as in another table with these rows."""
        self._share(other.owners, other.shared)

    def _share(self, owners: torch.Tensor, shared: torch.Tensor) -> None:
        self.vectors = nn.Embedding.from_pretrained(self.vectors.weight.detach()[owners], freeze=False, padding_idx=PAD_ROW)
        self.owners, self.shared = owners.clone(), shared.clone()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean of the non-padding rows, float32 [..., D], zeros where all are padding. rows: int64 [..., L]."""
        if rows.shape[-1] == 1:
            return self.vectors(self.shared[rows]).squeeze(-2)
        is_known = rows != PAD_ROW
        counts = is_known.sum(dim=-1).flatten()
        offsets = counts.cumsum(0) - counts
        means = functional.embedding_bag(self.shared[rows[is_known]], self.vectors.weight, offsets, mode="mean")
        return means.view(*rows.shape[:-1], self.vectors.embedding_dim)

    def array(self) -> np.ndarray:
        """Return the table as it is served, float32 [rows, D]."""
        return self.vectors.weight.detach()[self.shared].numpy()


def _make_embedding(rows: int, width: int) -> nn.Embedding:
    vectors = nn.Embedding(rows, width, padding_idx=PAD_ROW)
    nn.init.normal_(vectors.weight, std=0.05)
    with torch.no_grad():
        vectors.weight[PAD_ROW] = 0.0
    return vectors
