"""`python -m clients forget | follow | warm`: a cache in Redis, from the command line."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from clients.cache.events import Followed, Names, follow_log, follow_topic, run_until_interrupted
from clients.cache.redis_cache import RedisCache
from clients.errors import ClientError, InvalidRequest
from clients.models import Timeout
from clients.recommender import DEFAULT_URL, Recommender

err = Console(stderr=True, highlight=False)

CacheUrl = Annotated[str, typer.Option("--cache", help="redis://host:port of the cache")]
Namespace = Annotated[str, typer.Option(help="of the shop, where several share a Redis")]
TtlS = Annotated[float, typer.Option("--ttl", help="seconds an answer may be given again, as the callers have it")]
Repo = Annotated[Path, typer.Option(help="the repository the server serves, for names and for users")]

COMMAND_TIMEOUT_S = 2.0  # nobody waits for an answer behind these commands


def forget(
    user_ids: Annotated[list[str], typer.Argument(help="the shop's ids of the users")],
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    repo: Repo = Path("model_repository"),
) -> None:
    """Forget users, after news of them."""
    names = Names(repo)
    ids = {user_id: names.id_of(user_id) for user_id in user_ids}
    if unknown := [user_id for user_id, found in ids.items() if found is None]:
        raise InvalidRequest(
            f"Nobody is known as {', '.join(unknown)} in {repo}. Expected ids or names of its users; see --repo."
        )
    RedisCache(cache, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S).forget(ids.values())
    typer.echo(f"forgotten: {', '.join(user_ids)}")


def follow(
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    ttl_s: TtlS = 300.0,
    brokers: Annotated[str, typer.Option(help="Kafka: host:port, comma-separated; with --topic")] = "",
    topic: Annotated[str, typer.Option(help="whose messages are JSON objects, one event each")] = "",
    data: Annotated[
        Path | None, typer.Option(help="instead: the folder of a dataset.toml, whose log grows (csv or tsv)")
    ] = None,
    field: Annotated[str, typer.Option(help="what names the user in a message")] = "user_id",
    repo: Repo = Path("model_repository"),
) -> None:
    """Forget users as events of them arrive, until Ctrl-C: messages of a topic, or lines of a log."""
    logging.basicConfig(format="%(message)s")
    store = RedisCache(cache, ttl_s, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S)
    names, followed = Names(repo), Followed()
    if bool(brokers and topic) == bool(data):
        raise InvalidRequest("Nothing says which events to follow; expected --brokers and --topic, or --data, not both.")
    if data:
        path, column = log_of(data)
        run_until_interrupted(lambda stop: follow_log(store, path, column, names, stop, followed))
    else:
        run_until_interrupted(lambda stop: follow_topic(store, brokers, topic, field, names, stop, followed))
    typer.echo(f"{followed.events} events, {followed.users} users forgotten, {followed.unusable} events named nobody")


def log_of(folder: Path) -> tuple[Path, str]:
    """The log of a data set and its column of user ids."""
    from training.dataset.description import read_description  # only this command reads descriptions

    described = read_description(folder).interactions
    return folder / described.path, described.user_id


def warm(
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    ttl_s: TtlS = 300.0,
    users: Annotated[int, typer.Option(min=1, help="how many users to ask for")] = 1_000,
    clusters: Annotated[int, typer.Option(min=1, help="of users with like tastes; the most active of each come first")] = 50,
    context: Annotated[list[str] | None, typer.Option(help="a context column as callers send it, such as store=3")] = None,
    repo: Repo = Path("model_repository"),
    url: Annotated[str, typer.Option("--url", help="host:port of the server's gRPC endpoint")] = DEFAULT_URL,
) -> None:
    """Ask for popular users of every cluster, so that their answers are there when they come."""
    from clients.cache.warm import popular_by_cluster
    from clients.cache.warm import warm as warm_users
    from clients.cli import columns_of

    user_ids = popular_by_cluster(repo, users, clusters)
    store = RedisCache(cache, ttl_s, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S)
    columns = columns_of(context or [])
    with Recommender(url, timeout=Timeout(30.0), cache=store) as shop, Progress(console=err) as bar:
        task = bar.add_task("warming", total=len(user_ids))
        answers = warm_users(shop, user_ids, columns, lambda done: bar.update(task, completed=done))
        fallbacks = sum(bool(answer.degraded) for answer in answers)
    counts = store.counts
    if counts.failures:
        raise ClientError(
            f"Redis at {cache} did not answer, {counts.stored} of {len(user_ids)} answers are kept. Check it, then try again."
        )
    typer.echo(f"{len(user_ids)} users: {counts.stored} asked and kept, {counts.hits} were warm, {fallbacks} got fallbacks")
