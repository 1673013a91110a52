"""Keep track of the generation that the server answers with, as its answers report it."""

from __future__ import annotations

from collections.abc import Callable


class KnownGeneration:
    """The generation that the server was last known to serve. An answer to an older request never replaces a newer one's."""

    def __init__(self, max_age_s: float, clock_s: Callable[[], float]) -> None:
        self._max_age_s, self._clock_s = max_age_s, clock_s
        self._known: tuple[int | None, float] = (None, float("-inf"))

    @property
    def generation(self) -> int | None:
        """The generation, or None where it is not known or was learned more than `max_age_s` ago."""
        generation, as_of_s = self._known
        return generation if self._clock_s() - as_of_s < self._max_age_s else None

    def record(self, generation: int, asked_s: float) -> None:
        """Record a generation that an answer reported.

        asked_s: when its request was sent; the generation may have changed since
        """
        if asked_s >= self._known[1]:
            self._known = (generation, asked_s)
