"""The commands `forget` and `follow`, which invalidate users' answers in a Redis cache."""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from triton_recommender.cache.events import FollowCounts, Names, follow_topic, run_until_interrupted
from triton_recommender.cache.redis_cache import RedisCache
from triton_recommender.errors import InvalidRequest

CacheUrl = Annotated[str, typer.Option("--cache", help="redis://host:port of the cache")]
Namespace = Annotated[str, typer.Option(help="prefix of this shop's keys, where several shops share a Redis")]
TtlS = Annotated[float, typer.Option("--ttl", help="lifetime of an answer in seconds, as the callers set it")]
Source = Annotated[str, typer.Option("--repo", help="names of users: the repository's folder, or a catalogue's file or URL")]

COMMAND_TIMEOUT_S = 2.0  # longer than a client's, because no request waits for these commands


def forget(
    user_ids: Annotated[list[str], typer.Argument(help="the shop's ids of the users")],
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    repo: Source = "model_repository",
) -> None:
    """Invalidate the cached answers of users whose data has changed."""
    names = Names(repo)
    if unknown := [user_id for user_id in user_ids if not names.knows(user_id)]:
        raise InvalidRequest(f"{repo} has no user {', '.join(unknown)}. Expected ids or names of its users; see --repo.")
    RedisCache(cache, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S).forget(
        user_id for user_id in map(names.find_id, user_ids) if user_id is not None
    )
    typer.echo(f"forgotten: {', '.join(user_ids)}")


def follow(
    brokers: Annotated[str, typer.Option(help="Kafka: host:port, comma-separated")],
    topic: Annotated[str, typer.Option(help="topic of events: each message is one JSON object")],
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    ttl_s: TtlS = 300.0,
    field: Annotated[str, typer.Option(help="field of a message that holds the user's id")] = "user_id",
    repo: Source = "model_repository",
) -> None:
    """Invalidate users' cached answers as their events arrive in a topic, until Ctrl-C."""
    logging.basicConfig(format="%(message)s")
    store = RedisCache(cache, ttl_s, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S)
    names, counts = Names(repo), FollowCounts()
    run_until_interrupted(lambda stop: follow_topic(store, brokers, topic, field, names, stop, counts))
    typer.echo(f"{counts.events} events, {counts.users} users forgotten, {counts.unusable} events named no user")
