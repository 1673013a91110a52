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
    epochs: int = 10
    most_examples: int = 600_000  # over all epochs together: a minute or two of one core
    batch: int = 1_024
    negatives: int = 2_048  # shared by a batch
    learning_rate: float = 4e-3
    forget_user: float = 0.5  # share of examples without their user id
    forget_history: float = 0.1  # share of examples without any history
    forget_item: float = 0.2  # share of history items left out


def train_towers(
    model: TwoTower,
    examples: Examples,
    targets: np.ndarray,
    settings: TowerSettings,
    seed: int,
    say: Callable[[str], None] = print,
) -> None:
    """In place. targets: int64 [N] positions of the items taken at the examples' moments."""
    generator = torch.Generator().manual_seed(seed)
    rng = np.random.default_rng(seed)
    counts = np.bincount(targets, minlength=model.n_items)
    draw = torch.from_numpy((counts + 1.0) ** 0.75)
    log_expected = torch.log(draw / draw.sum() * settings.negatives).float()
    steps = _steps(len(targets), settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate, fused=True)  # large tables: 5 times faster
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, settings.learning_rate, total_steps=steps, pct_start=0.1)
    batches = _batches(len(targets), settings.batch, steps, rng)
    model.train()
    loss_sum, since, told = 0.0, 0, time.monotonic()
    for step, rows in enumerate(batches, start=1):
        negatives = torch.multinomial(draw, min(settings.negatives, model.n_items), replacement=False, generator=generator)
        loss = _loss(model, examples, rows, torch.from_numpy(targets[rows]), negatives, log_expected, settings, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        loss_sum, since = loss_sum + loss.item(), since + 1
        if step == steps or time.monotonic() - told > 10:
            say(f"  towers: step {step:,} of {steps:,}, loss {loss_sum / since:.3f}")
            loss_sum, since, told = 0.0, 0, time.monotonic()
    model.eval()


def _loss(
    model: TwoTower,
    examples: Examples,
    rows: np.ndarray,
    targets: Tensor,
    negatives: Tensor,
    log_expected: Tensor,
    settings: TowerSettings,
    generator: torch.Generator,
) -> Tensor:
    """Mean cross entropy of each row's target against the batch's negatives."""
    history = torch.from_numpy(examples.history_positions[rows].astype(np.int64))
    lost = torch.rand(history.shape, generator=generator) < settings.forget_item
    lost |= (torch.rand(len(rows), generator=generator) < settings.forget_history).unsqueeze(1)
    history = torch.where(lost, model.n_items, history)
    weights = torch.from_numpy(recency_weights(history.numpy(), model.n_items))
    user_categorical = forget_users(torch.from_numpy(examples.user_categorical[rows]), settings.forget_user, generator)
    users = model.user_vectors(user_categorical, torch.from_numpy(examples.user_continuous[rows]), history, weights)
    own = (users * model.item_vectors(targets)).sum(dim=1) - log_expected[targets]
    others = users @ model.item_vectors(negatives).T - log_expected[negatives]
    others = others.masked_fill(targets.unsqueeze(1) == negatives, -torch.inf)
    return F.cross_entropy(torch.cat([own.unsqueeze(1), others], dim=1), torch.zeros(len(rows), dtype=torch.int64))


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
