"""Find out whether the servers answer, by at most one real request in 0.5 s, however many callers ask."""

from __future__ import annotations

import asyncio
import logging
import time
from pathlib import Path

from serving.contract.errors import ArtifactError
from serving.contract.generations import read_pinned_generation
from triton_recommender import AsyncRecommender, Health

log = logging.getLogger("gateway")

SILENT = "it does not answer; the gateway's log has the reason"
KEPT_S = 0.5  # a paused process is found after 1 s, and readiness must fail within 2 s


class Readiness:
    """Asks the servers on demand, and reuses their answers for KEPT_S. Belongs to one event loop."""

    def __init__(self, recommender: AsyncRecommender) -> None:
        self._recommender, self._asking = recommender, asyncio.Lock()
        self._health: list[Health] = []
        self._asked_s = float("-inf")
        self._unready: set[str] = set()  # addresses of servers that are logged as not ready

    async def ask_servers(self) -> list[Health]:
        """Return how each server answered one real request, at most KEPT_S ago.

        A server that is not ready is logged once, until it is ready again.
        """
        async with self._asking:
            if time.monotonic() - self._asked_s > KEPT_S:
                self._health = await self._recommender.health()
                self._asked_s = time.monotonic()
                for health in self._health:
                    if not health.ready and health.url not in self._unready:
                        log.warning("the server at %s is not ready: %s", health.url, health.reason)
                self._unready = {health.url for health in self._health if not health.ready}
            return self._health


def find_pinned(repo: Path) -> int | None:
    """Return the generation that a start serves; None where its config cannot be read."""
    try:
        return read_pinned_generation(repo)
    except ArtifactError:  # the servers go on
        return None
