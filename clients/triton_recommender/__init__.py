"""Client of a served recommendation repository: gRPC or HTTP, blocking or asyncio, typed.

    from triton_recommender import Recommender

    with Recommender("localhost:8001") as shop:
        answer = shop.recommend(17850, k=10)

Command line: `python -m triton_recommender --help`. Doubles for tests: triton_recommender.testing.
"""

from triton_recommender.async_recommender import AsyncRecommender
from triton_recommender.cache import Cache, Counts, MemoryCache, RedisCache
from triton_recommender.catalogue import Catalogue
from triton_recommender.errors import (
    AccessDenied,
    CacheUnavailable,
    CatalogueError,
    CatalogueMissing,
    CircuitOpen,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    NoAnswer,
    Overloaded,
    RecommenderError,
    ServerFault,
    StageDied,
    Unavailable,
    UnknownId,
)
from triton_recommender.ids import session_id, stable_id
from triton_recommender.models import (
    DescribedItem,
    Event,
    EventDetails,
    Health,
    Notice,
    Query,
    Recommendation,
    Recommendations,
    Timeouts,
    Tls,
)
from triton_recommender.recommender import Recommender
from triton_recommender.tensors import Degraded, Sources
from triton_recommender.version import __version__

__all__ = [
    "AccessDenied",
    "AsyncRecommender",
    "Cache",
    "CacheUnavailable",
    "Catalogue",
    "CatalogueError",
    "CatalogueMissing",
    "CircuitOpen",
    "Counts",
    "DeadlineExceeded",
    "Degraded",
    "DescribedItem",
    "Event",
    "EventDetails",
    "Health",
    "InvalidRequest",
    "MemoryCache",
    "ModelNotFound",
    "NoAnswer",
    "Notice",
    "Overloaded",
    "Query",
    "Recommendation",
    "Recommendations",
    "Recommender",
    "RecommenderError",
    "RedisCache",
    "ServerFault",
    "Sources",
    "StageDied",
    "Timeouts",
    "Tls",
    "Unavailable",
    "UnknownId",
    "__version__",
    "session_id",
    "stable_id",
]
