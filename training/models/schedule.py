"""The learning rate schedule: a short warm-up, then a long decay."""

from __future__ import annotations

import torch

RISING = 0.1  # share of the steps


def rise_and_fall(optimizer: torch.optim.Optimizer, learning_rate: float, steps: int) -> torch.optim.lr_scheduler.OneCycleLR:
    """Return a schedule for `steps` steps.

    It is one step longer where the rise would take a single step, because torch divides by the rise's length minus one.
    """
    total = steps + 1 if steps * RISING == 1 else steps
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=total, pct_start=RISING)
