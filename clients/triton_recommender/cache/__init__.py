"""Cache the answers of `recommend` in the client, so that a request that was answered lately does not reach the server.

    from triton_recommender import MemoryCache, Recommender

    cache = MemoryCache(ttl_s=300)          # or RedisCache("redis://localhost:6379", ttl_s=300), shared by many processes
    with Recommender("localhost:8001", cache=cache) as shop:
        shop.recommend(17850, k=5)
        shop.recommend(17850, k=10)         # a hit: the server returns K items, and k is applied here
        cache.forget([17850])               # the user bought something
        shop.recommend(17850)               # a miss

base.py         Cache: the interface, settings, and counts (also for Prometheus)
memory.py       MemoryCache: in one process
redis_cache.py  RedisCache: shared by processes and machines
entries.py      keys of requests, and answers as bytes
generation.py   the generation that the server answers with, as far as the client knows
transport.py    the read-through cache between client and transport; equal concurrent requests are sent once
events.py       forgets users as their events arrive in a Kafka topic
commands.py     `python -m clients forget | follow`; `warm` is in cli.py

docs/caching.md has the reasons.
"""

from triton_recommender.cache.base import Cache, Counts
from triton_recommender.cache.memory import MemoryCache
from triton_recommender.cache.redis_cache import RedisCache

__all__ = ["Cache", "Counts", "MemoryCache", "RedisCache"]
