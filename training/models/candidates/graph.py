"""The graph model in closed form: items are near when users connect them, over one step or several.

    users x items, divided by the roots of both degrees ──SVD──▶ item vectors
    user vector = weighted sum of the vectors of the history, each divided by the root of its item's degree

These singular vectors are the smoothest signals on the graph of users and items, which LightGCN approaches by gradient descent;
GF-CF (Shen et al. 2021) and SVD-GCN (Peng et al. 2022) showed that computing them directly serves as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from sklearn.utils.extmath import randomized_svd
from torch import Tensor, nn

from training.models.candidates.two_tower import UserTower


@dataclass(frozen=True)
class GraphSettings:
    width: int = 64  # G, singular vectors kept
    popularity: float = 0.25  # power of an item's degree in its vector: 0 ignores how popular it is, 0.5 is the graph's own


class Graph(NamedTuple):
    """item_vectors: float32 [n_items, G]; history: float32 [n_items + 1, G], what an event adds to its user, padding last."""

    item_vectors: np.ndarray
    history: np.ndarray


def fit_graph(positives: sp.csr_matrix, settings: GraphSettings, scale: float, seed: int) -> Graph:
    """Fit to a log, CSR float32 [n_users, n_items] of 1.0.

    scale: root mean square of the scores of all users for all items; the vectors are scaled to it
    """
    item_degrees, user_degrees = (np.maximum(np.asarray(positives.sum(axis=axis)).ravel(), 1.0) for axis in (0, 1))
    scaled = sp.diags(user_degrees**-0.5) @ positives @ sp.diags(item_degrees**-0.5)
    width = min(settings.width, min(scaled.shape))
    rows = randomized_svd(scaled.astype(np.float32), width, n_iter=4, random_state=seed)[2].T
    items = rows * item_degrees[:, None] ** settings.popularity
    history = rows * item_degrees[:, None] ** -0.5
    users = positives @ history
    mean_square = np.trace((users.T @ users / len(users)) @ (items.T @ items / len(items)))
    history *= scale / np.sqrt(max(mean_square, np.finfo(np.float32).tiny))
    return Graph(items.astype(np.float32), np.append(history, np.zeros((1, width)), axis=0).astype(np.float32))


class GraphAndTower(nn.Module):
    """The user side of the towers and of the graph model, exported to `user_tower.onnx`.

    Rows of the history table hold the towers' columns, then the graph's.

    Inputs as those of UserTower, with history_vectors [B, H, D - 1 + G]. Output: user vectors [B, G + D].
    """

    def __init__(self, tower: UserTower, width: int, weight: float):
        super().__init__()
        self.tower, self.width, self.weight = tower, width, weight

    def forward(
        self, history_vectors: Tensor, history_weights: Tensor, user_embeddings: Tensor, user_continuous: Tensor
    ) -> Tensor:
        tower_width = history_vectors.shape[2] - self.width
        graph_vectors = (history_vectors[:, :, tower_width:] * history_weights.unsqueeze(2)).sum(dim=1) * self.weight
        vectors = self.tower(history_vectors[:, :, :tower_width], history_weights, user_embeddings, user_continuous)
        return torch.cat([graph_vectors, vectors], dim=1)
