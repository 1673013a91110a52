"""The ratio of two measurements, paired by round."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel

FEWEST_ROUNDS = 5  # if both sides are equal, all five ratios are on one side of 1 by chance in 6 % of the comparisons


class Ratio(BaseModel, frozen=True):
    """B / A of one metric, by round."""

    metric: str
    a: list[float]
    b: list[float]

    @property
    def by_round(self) -> np.ndarray:
        return np.divide(self.b, self.a)

    @property
    def median(self) -> float:
        return float(np.median(self.by_round))

    @property
    def low(self) -> float:
        return float(self.by_round.min())

    @property
    def high(self) -> float:
        return float(self.by_round.max())

    @property
    def certain(self) -> bool:
        """Whether every round is above 1, or every round below, and there are enough of them."""
        return len(self.a) >= FEWEST_ROUNDS and (self.low > 1.0 or self.high < 1.0)
