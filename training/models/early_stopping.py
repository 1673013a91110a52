"""Early stopping: keep the parameters with the lowest loss on held-out users."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class EarlyStopping:
    """Keeps the parameters with the lowest loss so far; the latest ones without held-out users.

    evaluations_in_vain: since the loss last fell
    """

    def __init__(self, model: nn.Module, loss: Callable[[], float] | None):
        """loss: computes that of held-out users; None without any"""
        self.model, self.loss = model, loss
        self.lowest_loss, self.latest_loss, self.evaluations_in_vain = np.inf, np.nan, 0
        self.parameters: list[Tensor] = []

    @torch.no_grad()
    def evaluate(self) -> None:
        """Compute the loss, and keep the parameters if it is the lowest."""
        if self.loss is None:
            return
        self.latest_loss = self.loss()
        if self.latest_loss < self.lowest_loss:
            self.lowest_loss, self.evaluations_in_vain = self.latest_loss, 0
            self.parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        else:
            self.evaluations_in_vain += 1

    @torch.no_grad()
    def restore_best(self) -> None:
        """Set the model to the kept parameters; leave it alone where none were kept."""
        for parameter, value in zip(self.model.parameters(), self.parameters, strict=bool(self.parameters)):
            parameter.copy_(value)
