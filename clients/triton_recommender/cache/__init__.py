"""Answers kept for a while, beside the client: a question that was answered lately is not asked again.

    from triton_recommender import MemoryCache, Recommender

    cache = MemoryCache(ttl_s=300)          # or RedisCache("redis://localhost:6379", ttl_s=300), shared by many processes
    with Recommender("localhost:8001", cache=cache) as shop:
        shop.recommend(17850, k=5)
        shop.recommend(17850, k=10)         # not asked again
        cache.forget([17850])               # the user bought something
        shop.recommend(17850)               # asked again

base.py        Cache: settings, counts (also for Prometheus), what a cache must do
  memory.py      MemoryCache, of one process
  redis_cache.py RedisCache, shared
entries.py     keys of questions, bytes of answers
generation.py  which generation answers now, and since when that is known
transport.py   between client and wire: look up, ask once for all who wait, keep
events.py      users of a Kafka topic or a log that grows are forgotten
commands.py    `python -m clients forget | follow`; `warm`, which asks for the most active users before they come, is in cli.py

docs/caching.md has the reasons.
"""

from triton_recommender.cache.base import Cache, Counts
from triton_recommender.cache.memory import MemoryCache
from triton_recommender.cache.redis_cache import RedisCache

__all__ = ["Cache", "Counts", "MemoryCache", "RedisCache"]
