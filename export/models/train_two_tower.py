"""Training of the two towers: sampled softmax over items drawn by popularity, corrected for how often each is drawn."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from export.features.build import Examples
from export.models.two_tower import TwoTower, forget_users
from stages.search import recency_weights


@dataclass(frozen=True)
class TowerSettings:
    width: int = 64  # D
    epochs: int = 10  # at most: training ends when it no longer helps users it has not learned from
    most_examples: int = 600_000  # over all epochs together: a minute or two of one core
    batch: int = 1_024
    negatives: int = 2_048  # shared by a batch
    learning_rate: float = 4e-3
    forget_user: float = 0.5  # share of examples without their user id
    forget_history: float = 0.1  # share of examples without any history
    forget_item: float = 0.2  # share of history items left out
    held_out_users: float = 0.05  # share of users
    most_held_out: int = 4_096  # of their examples
    checks: int = 20  # looks at the held-out loss
    patience: int = 4  # looks without a better one


@dataclass(frozen=True)
class Lesson:
    """What one batch is scored against. negatives: int64 [n]; log_expected: float32 [n_items], of the count of each in a draw."""

    history: Tensor
    user_categorical: Tensor
    user_continuous: Tensor
    targets: Tensor
    negatives: Tensor


def train_towers(
    model: TwoTower,
    examples: Examples,
    targets: np.ndarray,
    users: np.ndarray,
    settings: TowerSettings,
    seed: int,
    say: Callable[[str], None] = print,
) -> None:
    """In place. targets, users: int64 [N], positions of the items taken at the examples' moments, and who took them."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    learned, held_out = _hold_out(users, settings, rng)
    sampler = _Sampler(targets[learned], model.n_items, settings.negatives, generator)
    exam = _Exam(model, examples, targets, held_out, sampler)
    steps = _steps(len(learned), settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)  # large tables: 5 times faster
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps, pct_start=0.1)
    every = max(1, steps // settings.checks)
    for step, batch in enumerate(_batches(len(learned), settings.batch, steps, rng), start=1):
        rows = learned[batch]
        user_categorical, history = _forgetful(model, examples, rows, settings, generator)
        loss = _loss(model, examples, rows, targets[rows], user_categorical, history, sampler.draw(), sampler)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % every == 0 or step == steps:
            better = exam.take()
            say(f"  towers: step {step:,} of {steps:,}, loss {loss.item():.3f}, of new users {exam.loss:.3f}")
            if exam.failures >= settings.patience:
                break
    exam.restore()
    model.strangers_to_unknown(examples.user_categorical[learned, 0])


def _steps(n_examples: int, settings: TowerSettings) -> int:
    return max(1, min(n_examples * settings.epochs, settings.most_examples) // settings.batch)


def _batches(n_examples: int, batch: int, steps: int, rng: np.random.Generator):
    """`steps` batches of row numbers, each epoch in its own random order."""
    waiting = np.empty(0, np.int64)
    for _ in range(steps):
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, rng.permutation(n_examples)])
        yield waiting[:batch]
        waiting = waiting[batch:]
