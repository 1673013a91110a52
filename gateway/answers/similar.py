"""Find similar items, a few requests at a time: each one that is not remembered reads the vectors of the whole catalogue."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from gateway.published import SimilarItem
from gateway.shop import Shop
from triton_recommender import Overloaded

THREADS = 2  # of their own, so that explanations do not wait for them
MOST_WAITING = 64
SPARE = 64  # further items that are found, because some may be hidden since the export


class SimilarItems:
    """Belongs to one event loop."""

    def __init__(self, shop: Shop) -> None:
        self._shop, self._waiting = shop, 0
        self._threads = ThreadPoolExecutor(THREADS, "similar-items")

    async def find(self, item_id: int, count: int) -> list[SimilarItem]:
        """Return the items like one that may be shown, at most `count`. Raises Overloaded or ArtifactError."""
        if self._waiting >= MOST_WAITING:
            raise Overloaded(f"{self._waiting} requests for similar items wait already; expected fewer. Try again.")
        self._waiting += 1
        try:
            find, loop = self._shop.published.find_similar_items, asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, find, item_id, count + SPARE)
            hidden = self._shop.list_hidden()
            return [item for item in found if not any(item.item_id in ids for ids in hidden)][:count]
        finally:
            self._waiting -= 1

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
