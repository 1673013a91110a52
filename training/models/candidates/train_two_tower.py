"""Train the two towers by sampled softmax over items drawn by popularity, with a correction for the sampling.

Training stops early, by the loss on held-out users, and restores the best weights: after about two epochs on a sparse log of a
large catalogue, after ten on a dense log of a small one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from scipy.optimize import brentq
from torch import Tensor

from serving.stages.search.search import compute_recency_weights
from training.features.build import Examples
from training.models.candidates.two_tower import TwoTower, forget_users
from training.models.early_stopping import EarlyStopping
from training.models.schedule import rise_and_fall
from training.time_left import TimeLeft


@dataclass(frozen=True)
class TowerSettings:
    width: int = 64  # D
    epochs: int = 10  # at most
    most_examples: int = 600_000  # over all epochs: a minute or two of one core
    batch: int = 1_024
    negatives: int = 2_048  # shared by a batch
    learning_rate: float = 4e-3
    forget_user: float = 0.5  # share of examples whose user id is masked
    forget_history: float = 0.1  # share of examples whose history is masked
    forget_item: float = 0.2  # share of history items that are masked
    held_out_share: float = 0.05  # of the users
    most_held_out: int = 4_096  # examples
    checks: int = 20  # number of evaluations on held-out users
    patience: int = 4  # evaluations without improvement before training ends


@dataclass(frozen=True)
class Batch:
    """A training batch."""

    user_categorical: Tensor  # int64 [B, Fu]
    user_continuous: Tensor  # float32 [B, Gu]
    history: Tensor  # int64 [B, H] positions
    targets: Tensor  # int64 [B] positions of the taken items


class Negatives:
    """Samples items by damped popularity, none twice. log_drawn: float32 [n_items], logarithm of the chance to be drawn."""

    def __init__(self, targets: np.ndarray, n_items: int, count: int):
        self.count = min(count, n_items)
        weights = (np.bincount(targets, minlength=n_items) + 1.0) ** 0.75
        self.weights = torch.from_numpy(weights)
        self.log_drawn = torch.from_numpy(np.log(compute_chances(weights, self.count)).astype(np.float32))

    def draw(self, generator: torch.Generator) -> Tensor:
        """Return distinct positions, int64 [count]."""
        return torch.multinomial(self.weights, self.count, replacement=False, generator=generator)


def compute_chances(weights: np.ndarray, count: int) -> np.ndarray:
    """Return each item's chance to be in a sample without replacement, float64 [n_items], approximately.

    Such a sample is the `count` items whose exponential clocks of rate `weight` ring first. So the chance is
    1 - exp(-time * weight), where `time` makes the chances sum to `count` (Rosen 1972).

    weights: float64 [n_items], positive; count: 1 … n_items
    """
    if count >= len(weights):
        return np.ones(len(weights))
    shares = weights / weights.sum()
    # 1 - exp(-x) <= x, so the sum at `count` is too small; at the other end, the least chance alone is count / n_items.
    ends = count, -np.log1p(-count / len(weights)) / shares.min()
    return -np.expm1(-shares * brentq(lambda time: -np.expm1(-time * shares).sum() - count, *ends))


def train_towers(
    model: TwoTower,
    examples: Examples,
    targets: np.ndarray,
    users: np.ndarray,
    settings: TowerSettings,
    seed: int,
    say: Callable[[str], None],
) -> None:
    """Train in place. targets: int64 [N] positions of the taken items; users: int64 [N] who took them, 0 … U - 1."""
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    learned, held_out_rows = hold_out_users(users, settings, rng)
    negatives = Negatives(targets[learned], model.n_items, settings.negatives)
    held_out = make_held_out_batches(examples, targets, held_out_rows, settings)
    stopping = EarlyStopping(model, make_held_out_loss(model, held_out, negatives, negatives.draw(generator)))
    stopping.evaluate()
    initial_rows = model.user_tables[0].weight.detach().clone()
    steps = max(1, min(len(learned) * settings.epochs, settings.most_examples) // settings.batch)
    optimizers, left = make_optimizers(model, settings.learning_rate), TimeLeft(steps)
    schedules = [rise_and_fall(optimizer, settings.learning_rate, steps) for optimizer in optimizers]
    for step, chosen in enumerate(_draw_batches(len(learned), settings.batch, steps, rng), start=1):
        batch = mask_features(make_batch(examples, targets, learned[chosen]), model.n_items, settings, generator)
        loss = compute_sampled_loss(model, batch, negatives.draw(generator), negatives.log_drawn)
        model.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if step % max(1, steps // settings.checks) == 0 or step == steps:
            stopping.evaluate()
            losses = f"loss {loss.item():.3f}, of held-out users {stopping.latest_loss:.3f}"
            say(f"  towers: step {step:,} of {steps:,}, {left.describe(step)}, {losses}")
            if stopping.evaluations_in_vain >= settings.patience:
                break
    stopping.restore_best()
    model.treat_as_unknown(initial_rows)


def make_optimizers(model: TwoTower, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Return Adam for the model's parameters, and one that updates only the rows of a step for its large tables."""
    dense, sparse = model.split_parameters()
    optimizers: list[torch.optim.Optimizer] = [torch.optim.Adam(dense, lr=learning_rate, fused=True)]  # 5 times faster
    if sparse:
        optimizers.append(torch.optim.SparseAdam(sparse, lr=learning_rate))
    return optimizers


def compute_sampled_loss(model: TwoTower, batch: Batch, negatives: Tensor, log_drawn: Tensor) -> Tensor:
    """Return the mean cross-entropy of each row's target against the negatives."""
    weights = torch.from_numpy(compute_recency_weights(batch.history.numpy(), model.n_items))
    users = model.compute_user_vectors(batch.user_categorical, batch.user_continuous, batch.history, weights)
    target_logits = (users * model.compute_item_vectors(batch.targets)).sum(dim=1) - log_drawn[batch.targets]
    negative_logits = users @ model.compute_item_vectors(negatives).T - log_drawn[negatives]
    negative_logits = negative_logits.masked_fill(batch.targets.unsqueeze(1) == negatives, -torch.inf)
    logits = torch.cat([target_logits.unsqueeze(1), negative_logits], dim=1)
    return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.int64))


def make_batch(examples: Examples, targets: np.ndarray, rows: np.ndarray) -> Batch:
    """Return the examples of some rows, int64 [B], and what was taken."""
    values = (examples.user_categorical[rows], examples.user_continuous[rows], examples.history_positions[rows], targets[rows])
    categorical, continuous, history, taken_items = (torch.from_numpy(value) for value in values)
    return Batch(categorical, continuous, history.long(), taken_items)


def mask_features(batch: Batch, n_items: int, settings: TowerSettings, generator: torch.Generator) -> Batch:
    """Mask user ids, histories and items of histories at random, so that the towers work for cold users."""
    is_masked = torch.rand(batch.history.shape, generator=generator) < settings.forget_item
    is_masked |= (torch.rand(len(batch.history), generator=generator) < settings.forget_history).unsqueeze(1)
    users = forget_users(batch.user_categorical, settings.forget_user, generator)
    return Batch(users, batch.user_continuous, torch.where(is_masked, n_items, batch.history), batch.targets)


def hold_out_users(users: np.ndarray, settings: TowerSettings, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows of examples to learn from, and those of held-out users. users: int64 [N], 0 … U - 1

    A user with more examples than may be held out is learned, so that one who comes first leaves room for others.
    """
    distinct = rng.permutation(np.unique(users))
    count, lengths = int(len(distinct) * settings.held_out_share), np.bincount(users)[distinct]
    fits = lengths <= settings.most_held_out
    affordable = int(np.searchsorted(lengths[fits].cumsum(), settings.most_held_out, "right"))
    is_held_out = np.isin(users, distinct[fits][: min(count, affordable)])
    return np.flatnonzero(~is_held_out), np.flatnonzero(is_held_out)


def make_held_out_batches(examples: Examples, targets: np.ndarray, rows: np.ndarray, settings: TowerSettings) -> list[Batch]:
    """Return batches of held-out users, as unknown users, because their ids are not trained."""
    generator = torch.Generator()
    parts = [rows[start : start + settings.batch] for start in range(0, len(rows), settings.batch)]
    batches = [make_batch(examples, targets, part) for part in parts]
    return [Batch(forget_users(b.user_categorical, 1.0, generator), b.user_continuous, b.history, b.targets) for b in batches]


def make_held_out_loss(
    model: TwoTower, batches: list[Batch], negatives: Negatives, drawn_items: Tensor
) -> Callable[[], float] | None:
    """Return the function that computes the mean loss of batches against the same negatives each time; None for no batches."""

    def measure_loss() -> float:
        losses = [compute_sampled_loss(model, batch, drawn_items, negatives.log_drawn).item() for batch in batches]
        return float(np.average(losses, weights=[len(batch.targets) for batch in batches]))

    return measure_loss if batches else None


def _draw_batches(n_examples: int, batch: int, steps: int, rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Yield `steps` batches of row numbers, each epoch in its own random order."""
    waiting = np.empty(0, np.int64)
    for _ in range(steps):
        while len(waiting) < batch:
            waiting = np.concatenate([waiting, rng.permutation(n_examples)])
        yield waiting[:batch]
        waiting = waiting[batch:]
