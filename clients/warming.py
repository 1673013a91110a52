"""Warm a cache before its users come: the most active users of every cluster first, so that every taste is warm early.

    preprocess ─▶ user tower ─▶ vectors ─▶ k-means ─▶ 1st of each cluster, 2nd of each, …

The vectors are those that retrieval searches with, computed by the published stages. This needs a checkout and the
repository's folder, so it is not part of the installable client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress

from triton_recommender import Query, Recommendations, Recommender, RedisCache, Timeouts, Unavailable
from triton_recommender.cache.commands import COMMAND_TIMEOUT_S, CacheUrl, Namespace, TtlS
from triton_recommender.cli import parse_pairs
from triton_recommender.client import DEFAULT_URL
from triton_recommender.folder import read_pinned_generation

err = Console(stderr=True, highlight=False)

POOL = 50_000  # users that are clustered at most: the most active ones
STAGE_BATCH = 256


def pick_by_cluster(repo: Path, n_users: int, n_clusters: int) -> np.ndarray:
    """Return int64 [<= n_users] ids: the most active user of each cluster, then the second of each, …"""
    user_ids, activity, vectors = read_active_users(repo)
    clusters = cluster_vectors(vectors, n_clusters)
    return user_ids[order_by_turns(clusters, activity)[:n_users]]


def read_active_users(repo: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return int64 [U] ids, int64 [U] events, most first, and float32 [U, D] vectors of the served generation; U <= POOL."""
    from serving.contract.artifacts import find_stage_folder
    from serving.stages.preprocess import Preprocess  # Faiss and ONNX Runtime: a client needs neither
    from serving.stages.retrieve import Retrieve

    generation = read_pinned_generation(repo)
    preprocess = Preprocess.load(find_stage_folder(repo, "preprocess", generation))
    retrieve = Retrieve.load(find_stage_folder(repo, "retrieve", generation))
    all_user_ids = preprocess.inputs.embedded.user_ids
    events = preprocess.inputs.embedded.lookup(all_user_ids).event_count
    active = np.argsort(-events, kind="stable")[:POOL]
    user_ids = all_user_ids[active]
    batches = np.split(user_ids, range(STAGE_BATCH, len(user_ids), STAGE_BATCH))
    return user_ids, events[active], np.concatenate([compute_vectors(preprocess, retrieve, batch) for batch in batches])


def compute_vectors(preprocess, retrieve, user_ids: np.ndarray) -> np.ndarray:
    from serving.contract.tensors import make_stage_specs

    spec = make_stage_specs(preprocess.info.axes, preprocess.info.context)["preprocess"]
    features = preprocess(spec.fill_optional(len(user_ids)) | {"user_id": user_ids[:, None]})
    return retrieve.compute_user_vectors(features, retrieve.items.find_positions(features["history_ids"]))


def cluster_vectors(vectors: np.ndarray, n_clusters: int) -> np.ndarray:
    """Return int64 [U]: the cluster of each vector, float32 [U, D], by spherical k-means."""
    import faiss

    directions = np.ascontiguousarray(vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-9), np.float32)
    n_clusters = min(n_clusters, len(directions))
    kmeans = faiss.Kmeans(directions.shape[1], n_clusters, niter=10, seed=0, spherical=True, min_points_per_centroid=1)
    kmeans.train(directions)
    return kmeans.index.search(directions, 1)[1][:, 0]


def order_by_turns(clusters: np.ndarray, activity: np.ndarray) -> np.ndarray:
    """Return positions [U]: the most active user of every cluster, then the second of every cluster, …"""
    order = np.lexsort((-activity, clusters))
    sorted_clusters = clusters[order]
    starts = np.searchsorted(sorted_clusters, sorted_clusters)  # where the cluster of each begins
    turn = np.empty(len(order), np.int64)
    turn[order] = np.arange(len(order)) - starts
    return np.lexsort((-activity, turn))


def warm(
    shop: Recommender,
    user_ids: Sequence[int],
    context: Mapping[str, int | float | str] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[Recommendations]:
    """Ask for users, in their order, through a client that has a cache, and yield their answers.

    context: as callers will send it, because it is part of the cache's key; progress: called with the number of users done
    """
    max_batch = shop.signature().max_batch
    for start in range(0, len(user_ids), max_batch):
        part = [Query(int(user_id), context=context or {}) for user_id in user_ids[start : start + max_batch]]
        yield from shop.recommend_many(part)
        progress(start + len(part))


def warm_cache(
    cache: CacheUrl = "redis://localhost:6379",
    namespace: Namespace = "recommend",
    ttl_s: TtlS = 300.0,
    users: Annotated[int, typer.Option(min=1, help="how many users to ask for")] = 1_000,
    clusters: Annotated[int, typer.Option(min=1, help="groups of users of like tastes; the most active come first")] = 50,
    context: Annotated[list[str] | None, typer.Option(help="a context column as callers send it, such as store=3")] = None,
    repo: Annotated[Path, typer.Option(help="the folder of the repository that the server serves")] = Path("model_repository"),
    url: Annotated[str, typer.Option("--url", help="host:port of the server's gRPC endpoint")] = DEFAULT_URL,
) -> None:
    """Ask for the most active users of every cluster, so that their answers are cached when they come."""
    user_ids = pick_by_cluster(repo, users, clusters)
    store = RedisCache(cache, ttl_s, namespace=namespace, timeout_s=COMMAND_TIMEOUT_S)
    columns = parse_pairs(context or [], "--context")
    with Recommender(url, timeouts=Timeouts(30.0), cache=store) as shop, Progress(console=err) as bar:
        task = bar.add_task("warming", total=len(user_ids))
        answers = warm(shop, user_ids.tolist(), columns, lambda done: bar.update(task, completed=done))
        fallbacks = sum(bool(answer.degraded) for answer in answers)
    counts = store.counts
    if counts.failures:
        raise Unavailable(
            f"Redis at {store.address} did not answer, {counts.stored} of {len(user_ids)} answers are kept. "
            "Check it, then try again."
        )
    typer.echo(f"{len(user_ids)} users: {counts.stored} asked and kept, {counts.hits} were warm, {fallbacks} got fallbacks")
