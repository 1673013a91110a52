"""The generation that answers now: learned from every answer, and from the server when the last answer is too old."""

from __future__ import annotations

from collections.abc import Callable


class Belief:
    """A generation that the server answered with at some moment, and that moment. Older news never replaces newer."""

    def __init__(self, max_age_s: float, clock_s: Callable[[], float]) -> None:
        self._max_age_s, self._clock_s = max_age_s, clock_s
        self._known: tuple[int | None, float] = (None, float("-inf"))

    def now(self) -> float:
        return self._clock_s()

    @property
    def generation(self) -> int | None:
        """None: not known, or too long ago."""
        generation, as_of_s = self._known
        return generation if self._clock_s() - as_of_s < self._max_age_s else None

    def observed(self, generation: int, asked_s: float) -> None:
        """Record a generation that an answer reported.

        asked_s: when its request was sent, the last time it is known to be valid.
        """
        if asked_s >= self._known[1]:
            self._known = (generation, asked_s)
