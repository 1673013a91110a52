"""`make eval`: measure quality stage by stage and through a real server, beside baselines.

The test set is the last 20 % of the log, as training/dataset/split.py splits it. The pipeline is exported from what came
before, into a repository of its own, and served by a real tritonserver. Items that users already had are neither served nor
counted, unless `[pipeline] filter_seen` is false. All items count as available, as they were when users bought them. AUC is
over the whole catalogue: the items of a stage's list come first, then all others in the order of the stage before it.
"""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpc
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from export.build import build_repository
from export.settings import Settings
from repository.triton.config import CONFIG_FILE
from repository.triton.models import read_config
from server.launcher import TritonServer
from server.status.health import open_local_client
from serving.contract.errors import ConfigError, DataError
from serving.contract.tensors import ENSEMBLE, PAD_ID
from serving.pipeline import Pipeline
from serving.stages.search.search import Blocked
from training.dataset import Dataset, split_log
from training.evaluation.baselines import Baseline, Quality, evaluate, fit_baselines
from training.evaluation.metrics import auc, coverage, has_test_items, ndcg_at, recall_at
from training.evaluation.problem import TEST_SHARE, Problem, make_problem

USERS_PER_CALL = 32
CONCURRENT_CALLS = 4
SERVED = "served (end to end)"


def evaluate_dataset(dataset: Dataset, repository: Path, settings: Settings, console: Console) -> dict[str, Quality]:
    """Export from the training part into `repository`, serve it, print the table and return quality by name.

    The last line printed is the same table as JSON.
    """
    problem = make_problem(dataset, settings.pipeline.filter_seen)
    refuse_nothing_to_find(dataset, problem)
    remove_repository(repository)
    build_repository(take_training_part(dataset), repository, settings, console)
    rows: dict[str, Quality] = {}
    for baseline in fit_baselines(problem.validation, problem.test, console.print):
        quality = rows[name_baseline(baseline)] = evaluate(baseline.scores, problem.test)
        console.print(f"{name_baseline(baseline)}: Recall@20 {quality.recall_at_20:.4f}, NDCG@10 {quality.ndcg_at_10:.4f}")
    rows |= measure_stages(Pipeline.load(repository), problem)
    most_users = min(USERS_PER_CALL, read_config(repository / ENSEMBLE / CONFIG_FILE).max_batch_size)
    with TritonServer(repository) as server:
        # The server returns K items: beyond them, the AUC uses the order of the in-process pipeline.
        rows[SERVED] = measure_quality(ask_server(server.grpc_url, problem, most_users), rows["after rerank"].auc, problem)
    console.print(make_table(dataset, problem, rows))
    console.print_json(json.dumps({name: asdict(quality) for name, quality in rows.items()}), indent=None)
    return rows


def take_training_part(dataset: Dataset) -> Dataset:
    """Return the data set without its test part, and with all items on sale.

    What is sold out today was bought in the test part, and the baselines do not know it either.
    """
    train, _ = split_log(dataset.interactions, TEST_SHARE)
    return replace(dataset, interactions=train, items=dataset.items.assign(available=True))


def remove_repository(folder: Path) -> None:
    """Remove the repository of an earlier evaluation. Raises ConfigError when the folder is something else."""
    if folder.exists() and any(folder.iterdir()) and not (folder / ENSEMBLE).is_dir():
        raise ConfigError(f"{folder} is no model repository, and its contents would be lost. Name another folder with --work.")
    shutil.rmtree(folder, ignore_errors=True)


def refuse_nothing_to_find(dataset: Dataset, problem: Problem) -> None:
    """Raise DataError when no user has a later positive to find, in the test or in the validation part."""
    for part, split in (("test", problem.test), ("validation", problem.validation)):
        if not has_test_items(split.relevant).any():
            raise DataError(
                f"{dataset.description.name}: no user has a positive in the {part} part that they did not have before. "
                "Evaluation needs users with at least 4 different positives; the export does not."
            )


def name_baseline(baseline: Baseline) -> str:
    chosen = ", ".join(f"{key} {value:g}" for key, value in baseline.settings.items())
    return f"{baseline.name} ({chosen})" if chosen else baseline.name


def measure_stages(pipeline: Pipeline, problem: Problem) -> dict[str, Quality]:
    """Return the quality after retrieval, after ranking, and of the whole pipeline."""
    return {
        f"after {stage}": measure_quality(ids, float(np.nanmean(aucs)), problem)
        for stage, (ids, aucs) in ask_stages(pipeline, problem).items()
    }


def ask_stages(pipeline: Pipeline, problem: Problem) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the test users' item ids, int64 [U, K], and AUC, float64 [U], by stage. K differs between stages."""
    lists: dict[str, list[np.ndarray]] = {"retrieve": [], "rank": [], "rerank": []}
    aucs: dict[str, list[np.ndarray]] = {"retrieve": [], "rank": [], "rerank": []}
    for block in split_into_blocks(problem.test_users):
        tensors = pipeline.trace({"user_id": problem.user_ids[block][:, None]})
        by_rank = np.argsort(-tensors["rank_scores"], axis=1, kind="stable")
        ids_after = {
            "retrieve": tensors["candidate_ids"],
            "rank": np.take_along_axis(tensors["candidate_ids"], by_rank, axis=1),
            "rerank": tensors["item_ids"],
        }
        order = score_by_retrieval(pipeline, tensors, problem)
        for stage, ids in ids_after.items():
            order = move_up(order, find_positions(ids, problem))
            aucs[stage].append(auc(order, problem.test.relevant[block], problem.test.seen[block]))
            lists[stage].append(ids)
    return {stage: (np.concatenate(ids), np.concatenate(aucs[stage])) for stage, ids in lists.items()}


def score_by_retrieval(pipeline: Pipeline, tensors: dict[str, np.ndarray], problem: Problem) -> np.ndarray:
    """Return scores of all items by position, float32 [B, n_items], that order them as retrieval does."""
    retrieve = pipeline.stages["retrieve"]
    history = retrieve.items.find_positions(tensors["history_ids"])
    no_items = Blocked(np.empty(0, np.int64), np.zeros(len(history) + 1, np.int64))
    vectors, n_items = retrieve.compute_user_vectors(tensors, history), len(problem.item_ids)
    positions, _ = retrieve.search.search_exactly(vectors, history, no_items, n_items)
    return move_up(np.zeros((len(history), n_items), np.float32), positions)


def move_up(order: np.ndarray, first: np.ndarray) -> np.ndarray:
    """Return scores, float32 [B, n_items], with the items of `first` [B, K], best first, before all others in their order."""
    n_rows, n_items = order.shape
    new_order = np.pad(order, ((0, 0), (0, 1)))  # a column for padding
    top = order.max() + np.arange(first.shape[1], 0, -1, dtype=np.float32)
    new_order[np.arange(n_rows)[:, None], first] = top
    return new_order[:, :n_items]


def ask_server(url: str, problem: Problem, users_per_call: int) -> np.ndarray:
    """Return the item ids, int64 [U, K], that a running server recommends to the test users."""
    with open_local_client(url) as client, ThreadPoolExecutor(CONCURRENT_CALLS) as pool:

        def call(block: np.ndarray) -> np.ndarray:
            user_id = grpc.InferInput("user_id", [len(block), 1], "INT64")
            user_id.set_data_from_numpy(problem.user_ids[block][:, None])
            return client.infer(ENSEMBLE, [user_id]).as_numpy("item_ids")

        return np.concatenate(list(pool.map(call, split_into_blocks(problem.test_users, users_per_call))))


def split_into_blocks(users: np.ndarray, size: int = USERS_PER_CALL) -> list[np.ndarray]:
    return [users[start : start + size] for start in range(0, len(users), size)]


def find_positions(item_ids: np.ndarray, problem: Problem) -> np.ndarray:
    """Return the positions, int64 [U, K], of item ids, n_items for PAD_ID."""
    return np.where(item_ids == PAD_ID, len(problem.item_ids), np.searchsorted(problem.item_ids, item_ids))


def measure_quality(item_ids: np.ndarray, auc_mean: float, problem: Problem) -> Quality:
    """Return the quality of lists. item_ids: int64 [U, K] of the test users, padded with PAD_ID. Only the first 20 count."""
    positions = find_positions(item_ids[:, :20], problem)  # longer lists would cover more items than those of the baselines
    relevant = problem.test.relevant[problem.test_users]
    recall, ndcg = recall_at(positions, relevant, 20).mean(), ndcg_at(positions, relevant, 10).mean()
    return Quality(float(recall), float(ndcg), coverage(positions, len(problem.item_ids)), auc_mean)


def make_table(dataset: Dataset, problem: Problem, rows: dict[str, Quality]) -> Table:
    table = Table(title=f"{escape(dataset.description.name)}: {len(problem.test_users):,} test users, last 20 % of the events")
    table.caption = "coverage: share of the catalogue in any list; AUC: over the whole catalogue"
    table.add_column("")
    for heading in ("Recall@20", "NDCG@10", "coverage", "AUC"):
        table.add_column(heading, justify="right")
    for name, quality in rows.items():
        numbers = (quality.recall_at_20, quality.ndcg_at_10, quality.coverage, quality.auc)
        if name == "after retrieve":  # the baselines come first
            table.add_section()
        table.add_row(name, *(f"{number:.4f}" for number in numbers), style="bold" if name == SERVED else None)
    return table
