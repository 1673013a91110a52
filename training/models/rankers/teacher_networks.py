"""Networks that teach beside the DLRM and are never served: they read the same tables and numbers, and cost more.

    cross       DCNv2 (Wang et al. 2021): products of up to three inputs, beside a deep network, as in Wide & Deep
    attention   DIN (Zhou et al. 2018): the history's items, weighted by likeness to the candidate, are one more row of a DLRM

Letters as in dlrm.py; H: events of the history.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import nn

from training.models.modules import Modules
from training.models.rankers.dlrm import Network, Shape

CROSS_LAYERS, CROSS_RANK = 2, 32  # W of a cross layer is a product of two narrow matrices
DEEP = (128, 64)
ATTENTION_WIDTH = 32


class CrossNetwork(nn.Module):
    """Inputs and output are those of `Network` (dlrm.py)."""

    mean: torch.Tensor
    scale: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        numbers = shape.user_numbers + shape.pair_numbers
        width = numbers + (shape.n_rows - 1) * shape.width
        self.register_buffer("mean", torch.zeros(numbers))
        self.register_buffer("scale", torch.ones(numbers))
        self.narrow = Modules(nn.Linear(width, CROSS_RANK, bias=False) for _ in range(CROSS_LAYERS))
        self.wide = Modules(nn.Linear(CROSS_RANK, width) for _ in range(CROSS_LAYERS))
        self.deep = nn.Sequential(nn.Linear(width, DEEP[0]), nn.ReLU(), nn.Linear(DEEP[0], DEEP[1]), nn.ReLU())
        self.last = nn.Linear(width + DEEP[1], 1)

    def forward(
        self, user_numbers: torch.Tensor, user_rows: torch.Tensor, pair_numbers: torch.Tensor, item_rows: torch.Tensor
    ) -> torch.Tensor:
        n_candidates = pair_numbers.shape[1]
        of_user = torch.cat([user_numbers, user_rows.flatten(1)], dim=1).unsqueeze(1).expand(-1, n_candidates, -1)
        n_user = user_numbers.shape[1]
        numbers = (torch.cat([of_user[..., :n_user], pair_numbers], dim=2) - self.mean) * self.scale
        first = torch.cat([numbers, of_user[..., n_user:], item_rows.flatten(2)], dim=2)
        crossed = first
        for narrow, wide in zip(self.narrow, self.wide, strict=True):
            crossed = first * wide(narrow(crossed)) + crossed
        return self.last(torch.cat([crossed, self.deep(first)], dim=2)).squeeze(2)


class AttentionNetwork(nn.Module):
    """A DLRM with one more row per candidate: the history's items, weighted by likeness to the candidate and by age."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        slots = len(shape.item_tables) * shape.width
        self.query = nn.Linear(slots, ATTENTION_WIDTH, bias=False)
        self.key = nn.Linear(slots, ATTENTION_WIDTH, bias=False)
        self.value = nn.Linear(slots, shape.width, bias=False)
        self.by_age = nn.Parameter(torch.zeros(()))
        self.network = Network(replace(shape, item_tables={**shape.item_tables, "history": 1}))

    @property
    def mean(self) -> torch.Tensor:
        return self.network.mean

    @property
    def scale(self) -> torch.Tensor:
        return self.network.scale

    def forward(
        self,
        user_numbers: torch.Tensor,
        user_rows: torch.Tensor,
        pair_numbers: torch.Tensor,
        item_rows: torch.Tensor,
        history_rows: torch.Tensor,
        history_known: torch.Tensor,
        history_age_days: torch.Tensor,
    ) -> torch.Tensor:
        """Return logits, f4 [B, C]. history_rows: f4 [B, H, Si, D]; history_known: bool [B, H]; history_age_days: f4 [B, H]"""
        history = history_rows.flatten(2)
        likeness = self.query(item_rows.flatten(2)) @ self.key(history).transpose(1, 2) / math.sqrt(ATTENTION_WIDTH)
        likeness = likeness + (self.by_age * torch.log1p(history_age_days.clamp(min=0.0))).unsqueeze(1)
        likeness = likeness.masked_fill(~history_known.unsqueeze(1), -torch.inf)
        nothing = likeness.new_zeros(*likeness.shape[:2], 1)  # takes all the weight of an empty history
        weights = torch.softmax(torch.cat([likeness, nothing], dim=2), dim=2)[..., :-1]
        attended = (weights @ self.value(history)).unsqueeze(2)
        return self.network(user_numbers, user_rows, pair_numbers, torch.cat([item_rows, attended], dim=2))
