"""Train the sequence model on windows of the log, each moment of a window against the next item.

Windows of similar length form a batch, so that little is computed for padding. The negatives are drawn by popularity and
shared by a batch, with a correction (training/models/candidates/train_two_tower.py). Held-out users tell when to stop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from serving.loops.hashing import hash_integers
from training.models.candidates.sequence import SequenceModel, SequenceShape, compute_sampled_loss
from training.models.candidates.train_two_tower import Negatives
from training.models.early_stopping import EarlyStopping
from training.models.schedule import rise_and_fall
from training.time_left import TimeLeft

DAY_S = 86_400.0
HASHES = 10_000
WARM_SHARE = 0.3  # of the steps from scratch, where training starts from the weights of an earlier model


@dataclass(frozen=True)
class SequenceSettings:
    shape: SequenceShape = field(default_factory=SequenceShape)
    epochs: int = 30  # at most
    most_events: int = 3_000_000  # that are learned over all epochs
    batch_events: int = 4_096
    negatives: int = 512  # shared by a batch
    learning_rate: float = 2e-3
    decay: float = 0.0
    held_out_share: float = 0.05  # of the users
    most_held_out: int = 4_096  # windows
    checks: int = 20  # evaluations on held-out users
    patience: int = 4  # evaluations in vain before training ends


class Taken(NamedTuple):
    """Positive events in the log's order: int64 [N] user ids, item positions and times.

    repeats: whether to learn items again that the user already had
    """

    users: np.ndarray
    items: np.ndarray
    times_s: np.ndarray
    repeats: bool = False


class Windows(NamedTuple):
    """W windows of L + 1 consecutive positives of a user, oldest first; shorter ones are padded at the end.

    items: int32 [W, L + 1] positions, padded with n_items; times_s: int64 [W, L + 1]; users: int64 [W]
    learned: bool [W, L], whether the item after this one is a target
    """

    items: np.ndarray
    times_s: np.ndarray
    learned: np.ndarray
    users: np.ndarray

    @property
    def lengths(self) -> np.ndarray:
        """Number of items before the last target, int64 [W]."""
        width = self.learned.shape[1]
        return width - np.argmax(self.learned[:, ::-1], axis=1)

    def take(self, rows: np.ndarray) -> Windows:
        return Windows(*(values[rows] for values in self))


def cut_windows(taken: Taken, n_items: int, length: int) -> Windows:
    """Cut each user's events into windows from the newest event back."""
    users, items, times_s, repeats = taken
    order = np.lexsort((times_s, users))
    users, items, times_s = users[order], items[order], times_s[order]
    learnable = np.ones(len(users), bool) if repeats else find_first_times(users, items)
    starts = np.flatnonzero(np.append(True, users[1:] != users[:-1])[: len(users)])
    ends = np.append(starts[1:], len(users))
    n_windows = np.maximum(-(-(ends - starts - 1) // length), 0)  # windows overlap by one event, the first one's target
    owner = np.repeat(np.arange(len(starts)), n_windows)
    back = np.arange(len(owner)) - np.repeat(np.cumsum(n_windows) - n_windows, n_windows)
    window_ends = ends[owner] - back * length
    firsts = np.maximum(window_ends - length - 1, starts[owner])
    rows = firsts[:, None] + np.arange(length + 1)
    inside = rows < window_ends[:, None]
    rows = np.minimum(rows, max(len(users) - 1, 0))
    learned = (inside & learnable[rows])[:, 1:]
    windows = Windows(
        np.where(inside, items[rows], n_items).astype(np.int32), np.where(inside, times_s[rows], 0), learned, users[firsts]
    )
    return windows.take(learned.any(axis=1))


def find_first_times(users: np.ndarray, items: np.ndarray) -> np.ndarray:
    """Return bool [N]: whether the user did not have the item before. Events are in order of time within each user."""
    _, dense = np.unique(users, return_inverse=True)
    keys = dense * (items.max(initial=0) + 1) + items
    first = np.zeros(len(keys), bool)
    first[np.unique(keys, return_index=True)[1]] = True
    return first


def train_sequence(
    windows: Windows,
    n_items: int,
    settings: SequenceSettings,
    seed: int = 0,
    say: Callable[[str], None] = print,
    start: SequenceModel | None = None,
) -> SequenceModel:
    """Train a model: a minute or two of two cores on a log of 200,000 events. start: a model to train further, in place"""
    torch.manual_seed(seed)
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    model = start or SequenceModel(n_items, settings.shape)
    is_held_out = hold_out(windows.users, settings.held_out_share)
    learned, held_out = windows.take(~is_held_out), windows.take(is_held_out)
    n_events = int(learned.learned.sum())
    if not n_events:
        return model
    targets = learned.items[:, 1:][learned.learned].astype(np.int64)
    negatives = Negatives(targets, n_items, settings.negatives)
    steps = max(1, min(n_events * settings.epochs, settings.most_events) // settings.batch_events)
    if start:
        steps = math.ceil(steps * WARM_SHARE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, weight_decay=settings.decay, fused=True)
    schedule = rise_and_fall(optimizer, settings.learning_rate, steps + 1)
    stopping = EarlyStopping(model, make_held_out_loss(model, held_out, negatives, negatives.draw(generator), settings))
    stopping.evaluate()  # so that training never ends with weights that are worse than those it began with
    left = TimeLeft(steps)
    for step, batch in zip(range(1, steps + 1), yield_batches(learned, settings, rng), strict=False):
        model.train()
        loss = compute_loss(model, batch, negatives.draw(generator), negatives.log_drawn)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % max(1, steps // settings.checks) == 0 or step == steps:
            stopping.evaluate()
            losses = f"loss {loss.item():.3f}, of held-out users {stopping.latest_loss:.3f}"
            say(f"  sequence: step {step:,} of {steps:,}, {left.describe(step)}, {losses}")
            if stopping.evaluations_in_vain >= settings.patience:
                break
    stopping.restore_best()
    model.eval()
    return model


def compute_loss(model: SequenceModel, batch: Windows, negatives: torch.Tensor, log_drawn: torch.Tensor) -> torch.Tensor:
    """Return `compute_sampled_loss` over the targets of the windows."""
    length = int(batch.lengths.max())
    items, ages = torch.from_numpy(batch.items[:, :length].astype(np.int64)), torch.from_numpy(compute_ages_days(batch, length))
    learned = torch.from_numpy(batch.learned[:, :length])
    targets = torch.from_numpy(batch.items[:, 1 : length + 1].astype(np.int64))[learned]
    return compute_sampled_loss(model.encode_moments(items, ages)[learned], targets, model, negatives, log_drawn)


def compute_ages_days(batch: Windows, length: int) -> np.ndarray:
    """Return the days from each event to the last target of its window, float32 [W, length]: the target's time is now."""
    now = np.take_along_axis(batch.times_s, batch.lengths[:, None], axis=1)
    return (np.maximum(now - batch.times_s[:, :length], 0) / DAY_S).astype(np.float32)


def yield_batches(windows: Windows, settings: SequenceSettings, rng: np.random.Generator) -> Iterator[Windows]:
    """Yield batches of about `batch_events` events, epoch after epoch. Windows of a batch have similar lengths."""
    lengths = windows.lengths
    while True:
        order = np.argsort(lengths + rng.random(len(lengths)) * (0.2 * lengths + 1.0))
        bounds, start = [], 0
        while start < len(order):
            end = start + max(1, settings.batch_events // int(lengths[order[start]]))
            bounds.append(slice(start, end))
            start = end
        for number in rng.permutation(len(bounds)):
            yield windows.take(order[bounds[number]])


def hold_out(users: np.ndarray, share: float) -> np.ndarray:
    """Return which users are held out, bool [N]: the same ones in each generation. users: int64 [N] ids

    A model that starts from an earlier one's weights must not be judged by users whom that one learned from.
    """
    return hash_integers(users) % HASHES < share * HASHES


def make_held_out_loss(
    model: SequenceModel, windows: Windows, negatives: Negatives, drawn_items: torch.Tensor, settings: SequenceSettings
) -> Callable[[], float] | None:
    """Return the function that computes the mean loss of windows against the same negatives each time; None for no windows."""
    rows = np.argsort(windows.lengths)[-settings.most_held_out :]
    size = max(1, settings.batch_events // settings.shape.length)
    batches = [windows.take(rows[start : start + size]) for start in range(0, len(rows), size)]

    def measure_loss() -> float:
        model.eval()
        losses = [compute_loss(model, batch, drawn_items, negatives.log_drawn).item() for batch in batches]
        return float(np.average(losses, weights=[batch.learned.sum() for batch in batches]))

    return measure_loss if batches else None
