"""The client. `Recommender` blocks, `AsyncRecommender` awaits; everything but the waiting is shared.

with Recommender("localhost:8001", timeout=Timeout(0.5)) as shop:
    for item_id, score in shop.recommend(17850, exclude=[22423], k=10):
        ...
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Self

from clients.cache.base import Cache
from clients.cache.transport import AsyncCachedTransport, CachedTransport
from clients.catalogue import Catalogue
from clients.errors import InvalidRequest, ModelNotFound
from clients.models import DEFAULT_TIMEOUT, Call, Health, Query, Recommendations, Timeout
from clients.wire import Signature, check_k, decode, encode

DEFAULT_URL = "localhost:8001"


class _Client:
    """What both clients share: the settings, and the way from queries to a call and from outputs to answers."""

    def __init__(self, timeout: Timeout | float, priority: int, catalogue: Catalogue | None) -> None:
        self.timeout = timeout if isinstance(timeout, Timeout) else Timeout(timeout)
        if isinstance(priority, bool) or not isinstance(priority, int) or priority < 0:
            raise InvalidRequest(
                f"priority is {priority!r}; expected 1 (the highest) or a larger whole number, 0 for the default."
            )
        self.priority = priority
        self.catalogue = catalogue
        self._signature: Signature | None = None  # learned in the first call, forgotten when the server changes its mind

    def _queries(self, queries: Sequence[Query | int | str]) -> list[Query]:
        asked = [query if isinstance(query, Query) else Query(query) for query in queries]
        return [self.catalogue.with_ids(query) for query in asked] if self.catalogue else asked

    def _call(self, queries: list[Query], signature: Signature, k: int | None, request_id: str) -> Call:
        check_k(k, signature)
        inputs = encode(queries, signature)
        return Call(inputs, self.timeout.total, self.timeout.queue_us, self.priority, request_id)


class Recommender(_Client):
    """Blocking client of one server. Safe to share between threads; close it, or use it as a context manager.

    url:       host:port of the server's gRPC endpoint
    timeout:   a Timeout, or seconds for a whole call
    priority:  1 is served first, in a repository exported with priority levels (off by default); 0 leaves it to the server
    retries:   further attempts when the server is unavailable, inside the timeout
    catalogue: names to ids and back, for shops whose ids are text
    cache:     a MemoryCache or RedisCache; it may serve several clients, and is closed by whoever made it
    transport: another way to reach a server; FakeTransport needs none
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout: Timeout | float = DEFAULT_TIMEOUT,
        priority: int = 0,
        retries: int = 2,
        catalogue: Catalogue | None = None,
        cache: Cache | None = None,
        transport=None,
    ) -> None:
        super().__init__(timeout, priority, catalogue)
        if transport is None:
            from clients.transport import GrpcTransport  # gRPC is slow to import, and tests with a fake need none

            transport = GrpcTransport(url, retries)
        self._transport = CachedTransport(transport, cache) if cache is not None else transport

    def recommend(
        self,
        user_id: int | str | None,
        *,
        history: Sequence[int | str] | None = None,
        exclude: Sequence[int | str] = (),
        context: Mapping[str, int | float | str | bytes | None] | None = None,
        k: int | None = None,
        request_id: str = "",
    ) -> Recommendations:
        """One user's recommendations; see Query for the arguments. k: how many at most, None for all the server returns.

        Raises ClientError.
        """
        return self.recommend_many([Query(user_id, history, exclude, context or {})], k=k, request_id=request_id)[0]

    def recommend_many(
        self, queries: Sequence[Query | int | str], *, k: int | None = None, request_id: str = ""
    ) -> list[Recommendations]:
        """One answer per query, in their order, from a single call. A bare id stands for Query(id). Raises ClientError."""
        queries = self._queries(queries)
        signature = self.signature()
        call = self._call(queries, signature, k, request_id)
        try:
            outputs = self._transport.infer(call)
        except (InvalidRequest, ModelNotFound):
            self._signature = None  # another export may have other sizes: look again next time
            raise
        return decode(outputs, queries, k)

    def signature(self) -> Signature:
        """Sizes and context columns of the served model; asked once, then remembered."""
        if self._signature is None:
            self._signature = self._transport.signature(self.timeout.connect)
        return self._signature

    def health(self) -> Health:
        return self._transport.health(self.timeout.connect)

    def close(self) -> None:
        self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncRecommender(_Client):
    """asyncio client of one server: the same arguments, answers and errors as Recommender."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        *,
        timeout: Timeout | float = DEFAULT_TIMEOUT,
        priority: int = 0,
        retries: int = 2,
        catalogue: Catalogue | None = None,
        cache: Cache | None = None,
        transport=None,
    ) -> None:
        super().__init__(timeout, priority, catalogue)
        if transport is None:
            from clients.transport import AsyncGrpcTransport  # as above

            transport = AsyncGrpcTransport(url, retries)
        self._transport = AsyncCachedTransport(transport, cache) if cache is not None else transport

    async def recommend(
        self,
        user_id: int | str | None,
        *,
        history: Sequence[int | str] | None = None,
        exclude: Sequence[int | str] = (),
        context: Mapping[str, int | float | str | bytes | None] | None = None,
        k: int | None = None,
        request_id: str = "",
    ) -> Recommendations:
        """See Recommender.recommend."""
        return (await self.recommend_many([Query(user_id, history, exclude, context or {})], k=k, request_id=request_id))[0]

    async def recommend_many(
        self, queries: Sequence[Query | int | str], *, k: int | None = None, request_id: str = ""
    ) -> list[Recommendations]:
        """See Recommender.recommend_many."""
        queries = self._queries(queries)
        signature = await self.signature()
        call = self._call(queries, signature, k, request_id)
        try:
            outputs = await self._transport.infer_async(call)
        except (InvalidRequest, ModelNotFound):
            self._signature = None
            raise
        return decode(outputs, queries, k)

    async def signature(self) -> Signature:
        if self._signature is None:
            self._signature = await self._transport.signature_async(self.timeout.connect)
        return self._signature

    async def health(self) -> Health:
        return await self._transport.health_async(self.timeout.connect)

    async def close(self) -> None:
        await self._transport.close_async()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
