"""Find similar items, a few requests at a time: each one that is not remembered reads the vectors of the whole catalogue."""

from __future__ import annotations

from gateway.answers.limited_threads import LimitedThreads
from gateway.published import SimilarItem
from gateway.shop import Shop

THREADS = 2  # of their own, so that explanations do not wait for them


class SimilarItems:
    """Belongs to one event loop."""

    def __init__(self, shop: Shop) -> None:
        self._shop, self._threads = shop, LimitedThreads(THREADS, "similar items")

    async def find(self, item_id: int, count: int) -> list[SimilarItem]:
        """Return the items like one that may be shown, at most `count`. Raises Overloaded or ArtifactError."""
        similar_items = await self._threads.run(self._shop.published.find_similar_items, item_id)
        hidden = self._shop.list_hidden()
        return [item for item in similar_items if not any(item.item_id in ids for ids in hidden)][:count]

    def close(self) -> None:
        self._threads.close(wait=False)
