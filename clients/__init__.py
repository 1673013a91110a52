"""gRPC client of a served repository.

    from clients import Recommender

    with Recommender("localhost:8001") as shop:
        answer = shop.recommend(17850, k=10)

Command line: `python -m clients --help`.
"""

from clients.cache import Cache, Counts, MemoryCache, RedisCache
from clients.catalogue import Catalogue
from clients.errors import (
    ClientError,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoAnswer,
    Overloaded,
    ServerFault,
    Unavailable,
)
from clients.fake import FakeTransport
from clients.models import Health, ModelState, Query, Recommendation, Recommendations, Timeout
from clients.recommender import AsyncRecommender, Recommender

__all__ = [
    "AsyncRecommender",
    "Cache",
    "Catalogue",
    "ClientError",
    "Counts",
    "DeadlineExceeded",
    "FakeTransport",
    "Health",
    "InvalidRequest",
    "MemoryCache",
    "ModelNotFound",
    "ModelState",
    "NoAnswer",
    "Overloaded",
    "Query",
    "Recommendation",
    "Recommendations",
    "Recommender",
    "RedisCache",
    "ServerFault",
    "Timeout",
    "Unavailable",
]
