"""Predict a user's next item from the order and the ages of their history, by a transformer.

    rows of the history's items ─▶ + attention, + MLP (twice) ─▶ norm ─▶ user vector [S] · item vectors [n_items, S] ─▶ logits

It is SASRec (Kang and McAuley 2018), in which the history and the items to score share a table, with two changes that are
known to help. Training is by sampled softmax (train_sequence.py). And attention is biased by the number of events and the time
between two moments, not by their places in a window, so that windows may begin anywhere.

Letters: B requests, L length of a window, S width, K heads. Windows are ordered from the oldest event to the newest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from serving.stages.features.sequence import make_feeds
from training.features.build import Examples

MINUTES_PER_DAY = 1_440.0
TIME_BUCKETS = 24  # the bucket of a time difference is the base-2 logarithm of its minutes, plus 1, rounded down
HIDDEN = -1e9
USERS_PER_BLOCK = 256


@dataclass(frozen=True)
class SequenceShape:
    width: int = 64  # S
    blocks: int = 2
    heads: int = 2
    length: int = 64  # L, the longest window
    dropout: float = 0.2
    knows_time: bool = True


class Block(nn.Module):
    """Attention to earlier events, then an MLP; each is added to its input."""

    def __init__(self, shape: SequenceShape) -> None:
        super().__init__()
        width, self.heads, self.knows_time = shape.width, shape.heads, shape.knows_time
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key_value, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.by_distance = nn.Parameter(torch.zeros(shape.heads, shape.length))
        self.by_time = nn.Parameter(torch.zeros(shape.heads, TIME_BUCKETS))
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, values: Tensor, queries: Tensor, hidden: Tensor, distance: Tensor, time_bucket: Tensor) -> Tensor:
        """Return float32 [B, Q, S] for the queries, a part of values [B, L, S].

        hidden: bool [B or 1, Q, L], the events that a query must not see
        distance, time_bucket: int64 [Q, L] and [B, Q, L], columns of by_distance and by_time
        """
        batch, n_queries, width = queries.shape
        query = self._split_heads(self.query(self.norm(queries)))
        key, value = (self._split_heads(part) for part in self.key_value(self.norm(values)).chunk(2, dim=2))
        logits = query @ key.transpose(2, 3) / math.sqrt(width / self.heads) + self.by_distance[:, distance]
        if self.knows_time:
            logits = logits + self.by_time[:, time_bucket].transpose(0, 1)
        shares = torch.softmax(logits.masked_fill(hidden.unsqueeze(1), HIDDEN), dim=3)
        seen = (shares @ value).transpose(1, 2).reshape(batch, n_queries, width)
        queries = queries + self.dropout(self.out(seen))
        return queries + self.dropout(self.mlp(self.mlp_norm(queries)))

    def _split_heads(self, values: Tensor) -> Tensor:
        """Reshape [B, L, S] to [B, K, L, S / K]."""
        batch, length, width = values.shape
        return values.reshape(batch, length, self.heads, width // self.heads).transpose(1, 2)


class SequenceEncoder(nn.Module):
    """The network without its item table, exported to `sequence.onnx`.

    vectors f4 [B, L, S] rows of the table, oldest first; known f4 [B, L] 1 where there is an event, 0 at padding, which comes
    first; age_days f4 [B, L] -> user vectors f4 [B, S]. L is at least 2.
    """

    def __init__(self, shape: SequenceShape) -> None:
        super().__init__()
        self.shape = shape
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.blocks))
        self.norm = nn.LayerNorm(shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, vectors: Tensor, known: Tensor, age_days: Tensor) -> Tensor:
        """Encode the newest moment. The last block also computes the moment before it: BLAS sums a single row in another order
        than several, and an answer must not depend on the size of its batch."""
        return self.encode(vectors, known, age_days, last_only=True)[:, -1]

    def encode(self, vectors: Tensor, known: Tensor, age_days: Tensor, last_only: bool = False) -> Tensor:
        """Return float32 [B, L, S]: the user at each moment just before the next event; or the last two, [B, 2, S]."""
        length = vectors.shape[1]
        index = torch.arange(length)
        distance = (index[:, None] - index[None]).clamp(min=0)
        now = torch.cat([age_days[:, 1:], torch.zeros_like(age_days[:, :1])], dim=1)  # the age of each moment
        time_bucket = find_time_bucket(age_days[:, None, :] - now[:, :, None])
        hidden = (index[None] > index[:, None])[None] | (known < 0.5)[:, None, :]
        values = self.dropout(vectors * math.sqrt(self.shape.width))
        for number, block in enumerate(self.blocks, start=1):
            moments = slice(-2, None) if last_only and number == len(self.blocks) else slice(None)
            values = block(values, values[:, moments], hidden[:, moments], distance[moments], time_bucket[:, moments])
        return self.norm(values)


def find_time_bucket(days: Tensor) -> Tensor:
    """Return int64 columns of `by_time` for time differences."""
    return torch.log2(days.clamp(min=0.0) * MINUTES_PER_DAY + 1.0).floor().clamp(max=TIME_BUCKETS - 1).long()


class SequenceModel(nn.Module):
    def __init__(self, n_items: int, shape: SequenceShape) -> None:
        super().__init__()
        self.n_items = n_items
        self.encoder = SequenceEncoder(shape)
        self.table = nn.Embedding(n_items + 1, shape.width, padding_idx=n_items)
        with torch.no_grad():
            self.table.weight.normal_(std=shape.width**-0.5)
            self.table.weight[n_items] = 0.0

    @property
    def item_vectors(self) -> np.ndarray:
        """float32 [n_items, S]"""
        return self.table.weight.detach().numpy()[:-1]

    def encode_moments(self, items: Tensor, age_days: Tensor) -> Tensor:
        """Return the user at each moment of windows, float32 [B, L, S]. items: int64 [B, L] positions, padded with n_items."""
        return self.encoder.encode(self.table(items), (items < self.n_items).float(), age_days)

    @torch.no_grad()
    def compute_user_vectors(self, users: Examples) -> np.ndarray:
        """Return user vectors, float32 [N, S], as they are served."""
        self.eval()
        vectors = []
        for start in range(0, len(users.history_positions), USERS_PER_BLOCK):
            block = slice(start, start + USERS_PER_BLOCK)
            feeds = make_feeds(
                self.item_vectors, users.history_positions[block], users.history_age_days[block], self.encoder.shape.length
            )
            vectors.append(self.encoder(*map(torch.from_numpy, feeds.values())).numpy())
        return np.concatenate(vectors) if vectors else np.empty((0, self.encoder.shape.width), np.float32)


def compute_sampled_loss(
    vectors: Tensor, targets: Tensor, model: SequenceModel, negatives: Tensor, log_drawn: Tensor
) -> Tensor:
    """Return the mean cross-entropy of T targets against shared negatives, corrected for how often these are drawn.

    vectors: float32 [T, S]; targets: int64 [T]; negatives: int64 [n]; log_drawn: float32 [n_items]
    """
    table = model.table.weight
    target_logits = (vectors * table[targets]).sum(dim=1) - log_drawn[targets]
    negative_logits = vectors @ table[negatives].T - log_drawn[negatives]
    negative_logits = negative_logits.masked_fill(targets.unsqueeze(1) == negatives, -torch.inf)
    return (torch.logaddexp(torch.logsumexp(negative_logits, dim=1), target_logits) - target_logits).mean()
