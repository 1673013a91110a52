"""Train teachers besides the DLRM, and choose which of them teach together.

DLRM ─▶ always a teacher, and served itself where no student keeps enough quality
cross, attention (teacher_networks.py) ─▶ teach beside it where lists by the mean of all shares are better on validation
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from training.gain import is_gain
from training.models.rankers.dlrm import RankingModel, Shape
from training.models.rankers.ranking_data import Requests
from training.models.rankers.teacher_networks import AttentionNetwork, CrossNetwork
from training.models.rankers.train_ranker import (
    Ranker,
    RankerSettings,
    Report,
    compute_blended_scores,
    compute_shares,
    describe_quality,
    find_best_blend,
    fit,
    measure_gains,
)

NETWORKS: dict[str, type[CrossNetwork | AttentionNetwork]] = {"cross": CrossNetwork, "attention": AttentionNetwork}
LEAST_GAIN = 1.005  # factor by which other teachers must raise NDCG@10 + Recall@20
FEWEST_REQUESTS = 50  # for validation; from fewer, it learns too little for a trial


class TeacherModel(RankingModel):
    """A teacher other than the DLRM. name: of its network, in NETWORKS"""

    def __init__(self, shape: Shape, name: str) -> None:
        super().__init__(shape)
        self.network: CrossNetwork | AttentionNetwork = NETWORKS[name](shape)
        self.reads_history = isinstance(self.network, AttentionNetwork)


@dataclass(frozen=True)
class Teacher:
    """blend: weight of the retrieval score beside the logits"""

    model: RankingModel
    blend: float

    def give_shares(self, requests: Requests) -> np.ndarray:
        """Return the share of each candidate of N lists, float32 [N, C], 0 at padding."""
        return compute_shares(compute_blended_scores(self.model, self.blend, requests))


@dataclass(frozen=True)
class Teachers:
    """members: by name, the DLRM first; quality: NDCG@10 + Recall@20 of every combination that was tried, by its names."""

    members: dict[str, Teacher]
    quality: dict[str, float]

    def report(self) -> dict[str, float]:
        """Return the qualities for the manifest, and the number of members; nothing where no other network was tried."""
        if len(self.quality) == 1:
            return {}
        return {f"taught_by_{names}": value for names, value in self.quality.items()} | {"teachers": float(len(self.members))}

    def give_shares(self, requests: Requests) -> np.ndarray:
        """Return the mean of the members' shares, float32 [N, C], 0 at padding."""
        return average_shares([teacher.give_shares(requests) for teacher in self.members.values()])


def choose_teachers(
    dlrm: Ranker,
    names: Sequence[str],
    teaching: Sequence[Requests],
    validation: Requests,
    settings: RankerSettings,
    seed: int,
    report: Report,
) -> Teachers:
    """Train the named networks, and return the combination that ranks validation requests best.

    It is the DLRM alone unless another one is better by LEAST_GAIN and beyond chance.
    """
    trained = {"dlrm": Teacher(dlrm.model, dlrm.blend)}
    for name in names:
        trained[name] = train_teacher(name, dlrm, teaching, validation, settings, seed, report)
    shares = {name: teacher.give_shares(validation) for name, teacher in trained.items()}
    teams = [("dlrm", *others) for count in range(len(names) + 1) for others in itertools.combinations(names, count)]
    gains = {"+".join(members): add_gains(average_shares([shares[name] for name in members]), validation) for members in teams}
    quality = {names: float(values.mean()) if len(values) else 0.0 for names, values in gains.items()}
    user_ids = [validation.user_ids[validation.taken.any(axis=1)]]
    better = [members for members in teams if is_gain([gains["+".join(members)]], [gains["dlrm"]], user_ids, LEAST_GAIN)]
    best = max(better, key=lambda members: quality["+".join(members)], default=("dlrm",))
    report(f"teachers: NDCG@10 + Recall@20 of {describe_quality(quality)}; {'+'.join(best)} teaches")
    return Teachers({name: trained[name] for name in best}, quality)


def train_teacher(
    name: str,
    dlrm: Ranker,
    teaching: Sequence[Requests],
    validation: Requests,
    settings: RankerSettings,
    seed: int,
    report: Report,
) -> Teacher:
    """Train a network of NETWORKS as `train_ranker` trains the DLRM, with its standardisation and shared rare rows."""
    torch.manual_seed(seed)
    model = TeacherModel(dlrm.model.shape, name)
    model.read_like(dlrm.model)
    teaching = [part.take(np.flatnonzero(part.taken.any(axis=1))) for part in teaching]
    fit(model, teaching, validation, settings, np.random.default_rng(seed), lambda text: report(f"{name} {text}"))
    return Teacher(model, find_best_blend(model, validation, settings.blends)[0])


def average_shares(shares: Sequence[np.ndarray]) -> np.ndarray:
    return np.mean(shares, axis=0, dtype=np.float32)


def add_gains(shares: np.ndarray, requests: Requests) -> np.ndarray:
    """Return NDCG@10 + Recall@20 of each list with a taken item, in the order of shares, float32 [N, C]."""
    return np.add(*measure_gains(np.where(requests.valid, shares, -np.inf), requests.taken).values())
