"""A measured figure beside its bound, and two of them as a ratio."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel


class Figure(BaseModel, frozen=True):
    """One figure, by round. bound: None where none was set; "at most" it, or "at least". least: beside a bound that it is to be
    at most."""

    name: str
    values: list[float]
    bound: float | None = None
    at_most: bool = True
    least: float | None = None

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        if self.least is not None:
            return self.least <= self.median <= self.bound
        return self.median <= self.bound if self.at_most else self.median >= self.bound

    @property
    def bound_in_words(self) -> str:
        """Nothing where none was set."""
        if self.bound is None:
            return ""
        if self.least is not None:
            return f"{self.least:g} to {self.bound:g}"
        return f"{'at most' if self.at_most else 'at least'} {self.bound:g}"


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
        """Every round says the same: all above 1 or all below."""
        return self.low > 1.0 or self.high < 1.0
