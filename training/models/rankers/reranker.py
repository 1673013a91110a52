"""The listwise re-ranker: one layer of self-attention over the best candidates that corrects their rank scores.

It is initialised to no correction. Half of the users who validate, whom neither it nor the ranker was trained on, choose the
epoch and the weight of the learned correction (`trust`). The other half judges the choice: it serves if it is better than no
correction by more than chance, and their figures are reported.

Letters: N requests, M places of the list, F list features, D width of the item vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from serving.stages.best_lists import LIST_FEATURES, list_features, pick_best_columns
from training.gain import is_gain
from training.models.rankers.ranking_data import Requests
from training.models.rankers.train_ranker import compute_listwise_loss, measure_gains, measure_ranking_quality

MASKED = 1e4  # attention logit of padding is -MASKED, other logits are below MASKED; float16 holds twice that


@dataclass(frozen=True)
class RerankerSettings:
    """Settings; the defaults work on shop, film and grocery logs."""

    list_length: int = 100  # M
    width: int = 16  # 32 with two heads take 1.7 times the time: docs/architecture.md
    epochs: int = 8  # of which the best one is kept
    requests_per_batch: int = 64
    learning_rate: float = 1e-3
    decay: float = 1e-2
    trusts: tuple[float, ...] = (0.0, 0.25, 0.5, 1.0)


@dataclass(frozen=True)
class Lists:
    """The best M candidates of N requests. Arrays [N, M, …] by falling rank score; positions padded with n_items."""

    positions: np.ndarray  # int64
    rank_scores: np.ndarray  # float32, 0 where not valid
    features: np.ndarray  # float32 [N, M, F]
    valid: np.ndarray  # bool
    taken: np.ndarray  # bool
    user_ids: np.ndarray  # int64 [N]

    def __len__(self) -> int:
        return len(self.positions)

    def take(self, rows: np.ndarray) -> Lists:
        return Lists(*(values[rows] for values in vars(self).values()))

    @classmethod
    def of(cls, requests: Requests, rank_scores: np.ndarray, length: int) -> Lists:
        """Build lists of the best `length` candidates. rank_scores: float32 [N, C], -inf at padding."""
        best = pick_best_columns(rank_scores, length)
        positions, scores, retrieval, taken = (
            np.take_along_axis(values, best, axis=1)
            for values in (requests.candidates, rank_scores, requests.retrieval_scores, requests.taken)
        )
        valid = np.isfinite(scores)
        scores = np.where(valid, scores, 0.0).astype(np.float32)
        return cls(positions.astype(np.int64), scores, list_features(scores, retrieval, valid), valid, taken, requests.user_ids)


class ListNetwork(nn.Module):
    """features f4 [N, M, F], vectors f4 [N, M, D], valid f4 [N, M] (1 or 0) -> correction f4 [N, M] of the rank scores."""

    def __init__(self, vector_width: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Linear(LIST_FEATURES + vector_width, width)
        self.qkv = nn.Linear(width, 3 * width)
        self.merge = nn.Linear(width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.widen, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.leave = nn.Linear(width, 1)
        nn.init.zeros_(self.leave.weight)
        nn.init.zeros_(self.leave.bias)

    def forward(self, features: torch.Tensor, vectors: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.enter(torch.cat([features, vectors], dim=2)))
        hidden = self.norms[0](hidden + self._attend(hidden, valid))
        hidden = self.norms[1](hidden + self.narrow(torch.relu(self.widen(hidden))))
        return self.leave(hidden).squeeze(2)

    def _attend(self, hidden: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        """Attend from every place to all valid ones."""
        query, key, value = self.qkv(hidden).chunk(3, dim=2)
        weight = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5  # [N, M, M]
        most = 2 * MASKED * valid - MASKED  # not a sum, which would leave rounding errors where all is padding
        weight = torch.softmax(torch.minimum(weight, most[:, None, :]), dim=2)
        return self.merge(weight @ value)


@dataclass(frozen=True)
class Reranker:
    """A trained ListNetwork. The served score is rank score + trust * correction.

    quality: NDCG@10 + Recall@20 "with" it and "without" it, of users who had no part in choosing it
    """

    network: ListNetwork
    list_length: int
    trust: float
    quality: dict[str, float]


def train_reranker(
    teaching: Lists,
    validation: Lists,
    item_vectors: np.ndarray,
    settings: RerankerSettings,
    seed: int,
    report: Callable[[str], None],
) -> Reranker:
    """Train on `teaching`; `validation` are lists of users whom the ranker was not trained on.

    item_vectors: float32 [n_items + 1, D], the last row padding
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    network = ListNetwork(item_vectors.shape[1], settings.width)
    vectors = torch.from_numpy(item_vectors)
    teaching = teaching.take(np.flatnonzero(teaching.taken.any(axis=1)))
    is_judge = np.unique(validation.user_ids, return_inverse=True)[1] % 2 == 1
    choosing, judging = (validation.take(np.flatnonzero(rows)) for rows in (~is_judge, is_judge))
    optimizer = torch.optim.AdamW(network.parameters(), lr=settings.learning_rate, weight_decay=settings.decay)
    n_batches = max(len(teaching) // settings.requests_per_batch, 1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, settings.learning_rate, total_steps=n_batches * settings.epochs + 1
    )
    best = (-1.0, 0.0, {name: value.clone() for name, value in network.state_dict().items()})
    for epoch in range(1, (settings.epochs if len(teaching) else 0) + 1):
        network.train()
        for rows in np.array_split(rng.permutation(len(teaching)), n_batches):
            batch = teaching.take(rows)
            scores = torch.from_numpy(batch.rank_scores) + compute_corrections(network, batch, vectors)
            loss = compute_listwise_loss(scores, torch.from_numpy(batch.taken), torch.from_numpy(batch.valid))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        network.eval()
        quality, trust = find_best_trust(network, choosing, vectors, settings.trusts)
        report(f"re-ranker: epoch {epoch} of {settings.epochs}, validation NDCG@10 + Recall@20 {quality:.4f} at trust {trust}")
        if quality > best[0]:
            best = (quality, trust, {name: value.clone() for name, value in network.state_dict().items()})
    network.load_state_dict(best[2])
    network.eval()
    trust, quality_of = judge_trust(network, judging, vectors, best[1])
    report(f"re-ranker: of other users, {quality_of['with']:.4f} at trust {trust}, {quality_of['without']:.4f} without it")
    return Reranker(network, settings.list_length, trust, quality_of)


def compute_corrections(network: ListNetwork, lists: Lists, vectors: torch.Tensor) -> torch.Tensor:
    """Return the corrections, float32 [N, M]."""
    valid = torch.from_numpy(lists.valid.astype(np.float32))
    return network(torch.from_numpy(lists.features), vectors[torch.from_numpy(lists.positions)], valid)


@torch.no_grad()
def find_best_trust(
    network: ListNetwork, validation: Lists, vectors: torch.Tensor, trusts: tuple[float, ...]
) -> tuple[float, float]:
    """Return the best quality and its trust; the smallest trust on a tie."""
    correction = compute_corrections(network, validation, vectors).numpy()
    qualities = [(measure_quality(validation, validation.rank_scores + trust * correction), -trust) for trust in trusts]
    quality, trust = max(qualities)
    return quality, -trust


@torch.no_grad()
def judge_trust(network: ListNetwork, judging: Lists, vectors: torch.Tensor, trust: float) -> tuple[float, dict[str, float]]:
    """Return the trust if it is a gain beyond chance, else 0, and the quality that serves so and the one without it."""
    lists = judging.take(np.flatnonzero(judging.taken.any(axis=1)))
    if not len(lists):
        return 0.0, {"with": 0.0, "without": 0.0}
    correction = compute_corrections(network, lists, vectors).numpy()
    before, after = (measure_each(lists, lists.rank_scores + weight * correction) for weight in (0.0, trust))
    if not is_gain([after], [before], [lists.user_ids], 1.0):
        trust, after = 0.0, before
    return trust, {"with": float(after.mean()), "without": float(before.mean())}


def measure_each(lists: Lists, scores: np.ndarray) -> np.ndarray:
    """Return NDCG@10 + Recall@20 of each list, ordered by scores, float64 [N]. Each must have a taken item."""
    ndcg, recall = measure_gains(np.where(lists.valid, scores, -np.inf), lists.taken).values()
    return ndcg + recall


def measure_quality(lists: Lists, scores: np.ndarray) -> float:
    """Return NDCG@10 + Recall@20 of the lists, ordered by scores."""
    return sum(measure_ranking_quality(np.where(lists.valid, scores, -np.inf), lists.taken).values())
