"""Early stopping: keep the parameters with the least loss on users kept aside."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn


class Best:
    """The parameters with the least loss so far; the latest ones where there is no loss to look at.

    in_vain: looks since the loss last fell
    """

    def __init__(self, model: nn.Module, loss: Callable[[], float] | None):
        """loss: of users kept aside; None without any"""
        self.model, self.loss = model, loss
        self.least, self.latest, self.in_vain = np.inf, np.nan, 0
        self.parameters: list[Tensor] = []

    @torch.no_grad()
    def look(self) -> None:
        if self.loss is None:
            return
        self.latest = self.loss()
        if self.latest < self.least:
            self.least, self.in_vain = self.latest, 0
            self.parameters = [parameter.detach().clone() for parameter in self.model.parameters()]
        else:
            self.in_vain += 1

    @torch.no_grad()
    def restore(self) -> None:
        for parameter, value in zip(self.model.parameters(), self.parameters, strict=bool(self.parameters)):
            parameter.copy_(value)
