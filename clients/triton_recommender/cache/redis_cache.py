"""A cache in Redis (7.0 or later), shared by the processes of many machines.

    <namespace>:{<user>}:token                      16 random bytes, made by the first reader of the user
    <namespace>:{<user>}:<generation>:<question>    token, question, answer

Reading takes one round trip (`SET token NX GET`, `GET answer`), writing another. Forgetting a user deletes the token. A value
repeats the question, so a reply that belongs to another command counts as a miss and is never served to the wrong user.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from triton_recommender.breaker import Breaker
from triton_recommender.cache.base import Cache, Entry, Lookup
from triton_recommender.cache.entries import DIGEST_BYTES, Key
from triton_recommender.errors import CacheUnavailable, InvalidRequest

TOKEN_BYTES = 16
HEAD_BYTES = TOKEN_BYTES + DIGEST_BYTES

log = logging.getLogger(__name__)


class RedisCache(Cache):
    """A cache in Redis. Connects when first used.

    url: redis://[user:password@]host:port[/database], rediss:// for TLS, or unix://
    ttl_s, generation_age_s: as in Cache
    namespace: prefix of the keys of one shop; use a new one when generations are numbered from 1 again
    timeout_s: longest wait for Redis; while Redis is down, one request per pause of the breaker waits that long
    clock_s: the breaker's clock
    """

    def __init__(
        self,
        url: str,
        ttl_s: float = 300.0,
        *,
        namespace: str = "recommend",
        timeout_s: float = 0.05,
        generation_age_s: float = 1.0,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(ttl_s, generation_age_s)
        self.url, self.namespace = url, namespace
        self.address = strip_secrets(url).removeprefix("redis://")
        self._ttl_ms = max(int(ttl_s * 1e3), 1)
        self._timeout_s = timeout_s
        self._breaker = Breaker(threshold=1, first_pause_s=0.1, clock_s=clock_s)
        self._failures, self._redis, self._make_async_redis = _make_clients(url, timeout_s)
        self._async_clients: WeakKeyDictionary[asyncio.AbstractEventLoop, Any] = WeakKeyDictionary()

    def read(self, keys: Sequence[Key], generation: int) -> Lookup | None:
        if not self._breaker.admit():
            return None
        tokens = _draw_tokens(len(keys))
        try:
            replies = self._queue_reads(self._redis.pipeline(transaction=False), keys, generation, tokens).execute()
        except self._failures as error:
            self._record_failure(error)
            return None
        return self._decode_replies(keys, tokens, replies)

    def write(self, entries: Sequence[Entry]) -> None:
        if not (entries and self._breaker.closed):
            return
        try:
            self._queue_writes(self._redis.pipeline(transaction=False), entries).execute()
        except self._failures as error:
            self._record_failure(error)
        else:
            self._record_written(entries)

    def forget(self, user_ids: Iterable[int]) -> None:
        users = set(user_ids)
        try:
            self._queue_deletions(self._redis.pipeline(transaction=False), users).execute()
        except self._failures as error:
            raise self._make_forget_error(users, error) from error
        self.counts.add(forgotten=len(users))

    async def read_async(self, keys: Sequence[Key], generation: int) -> Lookup | None:
        if not self._breaker.admit():
            return None
        tokens = _draw_tokens(len(keys))
        try:
            replies = await self._queue_reads(self._async_redis.pipeline(transaction=False), keys, generation, tokens).execute()
        except self._failures as error:
            self._record_failure(error)
            return None
        return self._decode_replies(keys, tokens, replies)

    async def write_async(self, entries: Sequence[Entry]) -> None:
        if not (entries and self._breaker.closed):
            return
        try:
            await self._queue_writes(self._async_redis.pipeline(transaction=False), entries).execute()
        except self._failures as error:
            self._record_failure(error)
        else:
            self._record_written(entries)

    async def forget_async(self, user_ids: Iterable[int]) -> None:
        users = set(user_ids)
        try:
            await self._queue_deletions(self._async_redis.pipeline(transaction=False), users).execute()
        except self._failures as error:
            raise self._make_forget_error(users, error) from error
        self.counts.add(forgotten=len(users))

    def close(self) -> None:
        self._redis.close()

    async def close_async(self) -> None:
        """Close the connections of this event loop."""
        await self._async_redis.aclose()

    @property
    def _async_redis(self):
        """The asyncio client of the running event loop: connections belong to the loop in which they were opened."""
        loop = asyncio.get_running_loop()
        if (client := self._async_clients.get(loop)) is None:
            client = self._async_clients[loop] = self._make_async_redis()
        return client

    def _queue_reads(self, pipeline, keys: Sequence[Key], generation: int, tokens: list[bytes]):
        for key, token in zip(keys, tokens, strict=True):
            pipeline.set(self._name_token(key.user_id), token, nx=True, get=True, px=2 * self._ttl_ms)
            pipeline.get(self._name_answer(key, generation))
        return pipeline

    def _queue_writes(self, pipeline, entries: Sequence[Entry]):
        for key, token, generation, value in entries:
            pipeline.set(self._name_answer(key, generation), token + key.question + value, px=self._ttl_ms)
            pipeline.pexpire(self._name_token(key.user_id), 2 * self._ttl_ms)  # a token outlives its answers
        return pipeline

    def _queue_deletions(self, pipeline, users: set[int]):
        for user_id in users:
            pipeline.unlink(self._name_token(user_id))
        return pipeline

    def _decode_replies(self, keys: Sequence[Key], tokens: list[bytes], replies: list[Any]) -> Lookup:
        """Return each key's current token, and its answer or None where Redis holds no valid one.

        tokens: those drawn for this read, which Redis took where it had none; replies: two per key, as `_queue_reads` asks
        """
        self._breaker.record_success()
        tokens = [stored or new for stored, new in zip(replies[::2], tokens, strict=True)]
        values = []
        for key, token, value in zip(keys, tokens, replies[1::2], strict=True):
            is_valid = value is not None and value.startswith(token + key.question)
            values.append(value[HEAD_BYTES:] if is_valid else None)
        return Lookup(tokens, values)

    def _record_written(self, entries: Sequence[Entry]) -> None:
        self._breaker.record_success()
        self.counts.add(stored=len(entries))

    def _record_failure(self, error: Exception) -> None:
        if self._breaker.closed:
            log.warning("going on without the cache: Redis at %s did not answer (%s)", self.address, _describe(error))
        self._breaker.record_failure()
        self.counts.add(failures=1)

    def _make_forget_error(self, users: set[int], error: Exception) -> CacheUnavailable:
        self._breaker.record_failure()
        self.counts.add(failures=1)
        forgotten = "1 user was" if len(users) == 1 else f"{len(users)} users were"
        return CacheUnavailable(
            f"{forgotten} not forgotten: Redis at {self.address} did not answer ({_describe(error)}). Expected "
            f"an answer within {self._timeout_s:g} s. "
            "Forget them again when it is back; until then they get old answers, unless these have expired."
        )

    def _name_token(self, user_id: int) -> str:
        return f"{self.namespace}:{{{user_id}}}:token"

    def _name_answer(self, key: Key, generation: int) -> str:
        return f"{self.namespace}:{{{key.user_id}}}:{generation}:{key.question.hex()}"


def _describe(error: Exception) -> str:
    """Return the reason of an error of redis-py: its `repr` has none, and its text may hold the command, with ids of users."""
    return str(error).rpartition(" of pipeline caused error: ")[2] or type(error).__name__


def _make_clients(url: str, timeout_s: float) -> tuple:
    """Return (exception types of a failure, a blocking client, a function that makes asyncio clients). None connects yet."""
    from redis import Redis, RedisError  # imported late: it takes most of a second, and only this cache needs it
    from redis.asyncio import Redis as AsyncRedis
    from redis.asyncio.retry import Retry as AsyncRetry
    from redis.backoff import NoBackoff
    from redis.retry import Retry

    settings: dict[str, Any] = {"socket_timeout": timeout_s, "socket_connect_timeout": timeout_s}
    try:
        blocking = Redis.from_url(url, retry=Retry(NoBackoff(), 0), **settings)
    except ValueError as error:
        raise InvalidRequest(
            f"cache is {strip_secrets(url)!r}: {error}. Expected redis://host:port, such as redis://localhost:6379."
        ) from error

    def make_async_client() -> AsyncRedis:
        return AsyncRedis.from_url(url, retry=AsyncRetry(NoBackoff(), 0), **settings)

    return (RedisError, OSError, TimeoutError), blocking, make_async_client


def strip_secrets(url: str) -> str:
    """Return a URL without user, password and query, for messages."""
    scheme, separator, rest = url.rpartition("://")
    return scheme + separator + rest.rpartition("@")[2].partition("?")[0]


def _draw_tokens(count: int) -> list[bytes]:
    random = secrets.token_bytes(TOKEN_BYTES * count)
    return [random[start : start + TOKEN_BYTES] for start in range(0, len(random), TOKEN_BYTES)]
