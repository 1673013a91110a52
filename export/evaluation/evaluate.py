"""`make eval`: how good the recommendations are, stage by stage and through a real server, beside four baselines.

The test is the last 20 % of each user's events in time. The pipeline is exported from the rest alone, into a repository of its
own, and served by a real tritonserver; what users already had is neither served nor counted.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from rich.console import Console
from rich.table import Table

from export.build import build_repository
from export.dataset import Dataset, split_by_time
from export.evaluation.baselines import Baseline, Quality, baselines, evaluate
from export.evaluation.metrics import coverage, ndcg_at, recall_at
from export.evaluation.problem import TEST_SHARE, Problem, problem_of
from export.settings import Settings
from server.launcher import TritonServer
from stages.contract import ENSEMBLE, PAD_ID
from stages.pipeline import Pipeline

USERS_PER_CALL = 32
CONCURRENT_CALLS = 4
UNDEFINED = float("nan")  # an AUC asks for a score of every item; a list of 20 has none


def evaluate_dataset(dataset: Dataset, repository: Path, settings: Settings, console: Console) -> dict[str, Quality]:
    """Export from the training part into `repository`, serve it, and print the table. -> quality by name.

    The last line printed is the same as one line of JSON.
    """
    problem = problem_of(dataset)
    train, _ = split_by_time(dataset.interactions, TEST_SHARE)
    build_repository(replace(dataset, interactions=train), repository, settings, console)
    rows: dict[str, Quality] = {}
    for baseline in baselines(problem.validation, problem.test, console.print):
        rows[named(baseline)] = evaluate(baseline.scores, problem.test)
        console.print(f"{named(baseline)}: {rows[named(baseline)]}")
    rows |= stage_qualities(Pipeline.load(repository), problem)
    with TritonServer(repository) as server:
        rows["served (end to end)"] = quality_of(served_lists(server.grpc_url, problem), problem)
    console.print(table_of(dataset, problem, rows))
    console.print_json(json.dumps({name: asdict(quality) for name, quality in rows.items()}), indent=None)
    return rows


def named(baseline: Baseline) -> str:
    chosen = ", ".join(f"{key} {value:g}" for key, value in baseline.settings.items())
    return f"{baseline.name} ({chosen})" if chosen else baseline.name


def stage_qualities(pipeline: Pipeline, problem: Problem) -> dict[str, Quality]:
    """-> quality of the list as retrieval orders it, as the ranker orders it, and as the whole pipeline returns it."""
    lists: dict[str, list[np.ndarray]] = {"retrieve": [], "rank": [], "rerank": []}
    for block in blocks(problem.test_users):
        tensors = pipeline.trace({"user_id": problem.user_ids[block][:, None]})
        by_rank = np.argsort(-tensors["rank_scores"], axis=1, kind="stable")
        lists["retrieve"].append(tensors["candidate_ids"])
        lists["rank"].append(np.take_along_axis(tensors["candidate_ids"], by_rank, axis=1))
        lists["rerank"].append(tensors["item_ids"])
    return {f"after {stage}": quality_of(np.concatenate(ids)[:, :20], problem) for stage, ids in lists.items()}


def served_lists(url: str, problem: Problem) -> np.ndarray:
    """-> int64 [U, K] item ids that a running server recommends to the test users."""
    with grpc.InferenceServerClient(url) as client, ThreadPoolExecutor(CONCURRENT_CALLS) as pool:

        def call(block: np.ndarray) -> np.ndarray:
            user_id = grpc.InferInput("user_id", [len(block), 1], "INT64")
            user_id.set_data_from_numpy(problem.user_ids[block][:, None])
            return client.infer(ENSEMBLE, [user_id]).as_numpy("item_ids")

        return np.concatenate(list(pool.map(call, blocks(problem.test_users))))


def blocks(users: np.ndarray) -> list[np.ndarray]:
    return [users[start : start + USERS_PER_CALL] for start in range(0, len(users), USERS_PER_CALL)]


def quality_of(item_ids: np.ndarray, problem: Problem) -> Quality:
    """item_ids: int64 [U, K], the lists of the test users, PAD_ID padded."""
    n_items = len(problem.item_ids)
    positions = np.where(item_ids == PAD_ID, n_items, np.searchsorted(problem.item_ids, item_ids))
    relevant = problem.test.relevant[problem.test_users]
    recall, ndcg = recall_at(positions, relevant, 20).mean(), ndcg_at(positions, relevant, 10).mean()
    return Quality(float(recall), float(ndcg), coverage(positions, n_items), UNDEFINED)


def table_of(dataset: Dataset, problem: Problem, rows: dict[str, Quality]) -> Table:
    table = Table(title=f"{dataset.description.name}: {len(problem.test_users):,} test users, last 20 % of their events")
    table.add_column("")
    for heading in ("Recall@20", "NDCG@10", "coverage", "AUC"):
        table.add_column(heading, justify="right")
    for name, quality in rows.items():
        numbers = (quality.recall_at_20, quality.ndcg_at_10, quality.coverage, quality.auc)
        table.add_row(name, *("-" if np.isnan(n) else f"{n:.4f}" for n in numbers))
    return table
