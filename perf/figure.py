"""A measured figure beside its bound."""

from __future__ import annotations

import numpy as np
from pydantic import BaseModel


class Figure(BaseModel, frozen=True):
    """One figure, by round. bound: None where none was set; "at most" it, or "at least"."""

    name: str
    values: list[float]
    bound: float | None = None
    at_most: bool = True

    @property
    def median(self) -> float:
        return float(np.median(self.values))

    @property
    def met(self) -> bool | None:
        if self.bound is None:
            return None
        return self.median <= self.bound if self.at_most else self.median >= self.bound
