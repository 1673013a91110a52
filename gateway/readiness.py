"""Find out whether the servers answer, by at most one real request in 0.8 s, however many callers ask."""

from __future__ import annotations

import asyncio
import time

from triton_recommender import AsyncRecommender, Health

KEPT_S = 0.8  # with the second after which a paused process is found, readiness fails within two


class Readiness:
    """Asks the servers on demand, and keeps what they said for KEPT_S. Belongs to one event loop."""

    def __init__(self, recommender: AsyncRecommender) -> None:
        self._recommender, self._asking = recommender, asyncio.Lock()
        self._health: list[Health] = []
        self._asked_s = float("-inf")

    async def ask_servers(self) -> list[Health]:
        """Return what each server said to one real request, at most KEPT_S ago."""
        async with self._asking:
            if time.monotonic() - self._asked_s > KEPT_S:
                self._health = await self._recommender.health()
                self._asked_s = time.monotonic()
            return self._health
