"""Compare the whole pipeline with its networks in fp32, fp16 and int8, on test users of two real logs.

    python -m experiments.precision [--data … --repo …]

The repository is exported from the training part, as `make eval` leaves it under .run/eval. The networks that an export lowers
are replaced by their lowered graphs, and the test users are answered in process, rounded as the graphs' types say
(export/nvidia/precision/faithful.py). Changes of NDCG@10 come with their standard error over users. Latencies are ONNX
Runtime's on a CPU, which has no fp16 arithmetic: they are the cost of the stand-in, not the gain of TensorRT.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import onnx
import onnxruntime as ort
import typer
from rich.console import Console

from experiments.harness import RESULTS, Figure, ResultsFolder, finish, read_machine
from export.build import build_repository
from export.evaluate import find_positions, move_up, refuse_nothing_to_find, score_by_retrieval, split_into_blocks
from export.nvidia.precision.agreement import HALF, find_beyond
from export.nvidia.precision.calibration import NETWORKS, Arrays, find_stage_folders, replace_networks
from export.nvidia.precision.faithful import open_faithful_session
from export.nvidia.precision.graphs import count_weight_bytes
from export.nvidia.precision.lower import PRECISIONS, Lowered, lower_networks
from export.nvidia.precision.trial import LOWERED_STAGES, Trial, join
from export.settings import Settings
from perf.command import run
from serving.contract.tensors import ENSEMBLE
from serving.pipeline import Pipeline
from training.dataset import Dataset, load_dataset, split_log
from training.evaluation.metrics import auc, ndcg_at
from training.evaluation.problem import TEST_SHARE, Problem, make_problem

WORK = Path(".run/eval")
LEAST_AUC_SHARE = 0.999  # of fp32's
MOST_NDCG_CHANGE = 0.001
BATCHES = (1, 8)
RUNS = 60

Networks = dict[str, dict[str, Lowered]]  # precision -> stage -> network


@dataclass(frozen=True)
class Quality:
    """auc, ndcg_at_10: float64 [U], NaN where a user does not count; answers: `item_ids` [U, K] and `scores` [U, K]."""

    auc: np.ndarray
    ndcg_at_10: np.ndarray
    answers: Arrays


def measure_graphs(networks: Networks, feeds: dict[str, list[Arrays]]) -> list[Figure]:
    """Return sizes and latencies of every graph; precisions take turns."""
    figures = []
    for stage in LOWERED_STAGES:
        lowered = {precision: networks[precision][stage] for precision in PRECISIONS}
        sessions = {precision: open_session(network.model) for precision, network in lowered.items()}
        latencies_ms = {batch: measure_ms(sessions, take_first_rows(feeds[stage][0], batch)) for batch in BATCHES}
        for precision, network in lowered.items():
            name = f"{precision}: {NETWORKS[stage]}"
            figures.append(Figure(name=f"{name}, multiply-adds below fp32", values=[network.share]))
            figures.append(Figure(name=f"{name}, weights", values=[count_weight_bytes(network.model) / 1e3], unit="kB"))
            for batch, by_precision in latencies_ms.items():
                figures.append(Figure(name=f"{name}, batch of {batch}", values=[by_precision[precision]], unit="ms"))
    return figures


def open_session(model: onnx.ModelProto) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def take_first_rows(feed: Arrays, rows: int) -> Arrays:
    return {name: values[:rows] for name, values in feed.items()}


def measure_ms(sessions: dict[str, ort.InferenceSession], feed: Arrays) -> dict[str, float]:
    """Return the median of RUNS runs in turns, by session."""
    times: dict[str, list[float]] = {name: [] for name in sessions}
    for _ in range(RUNS):
        for name, session in sessions.items():
            started_s = time.perf_counter()
            session.run(None, feed)
            times[name].append(1e3 * (time.perf_counter() - started_s))
    return {name: float(np.median(values)) for name, values in times.items()}


def measure_pipeline(pipeline: Pipeline, networks: Networks, dataset: Dataset) -> list[Figure]:
    problem = make_problem(dataset)
    refuse_nothing_to_find(dataset, problem)
    qualities = {}
    for precision in PRECISIONS:
        sessions = {stage: open_faithful_session(lowered.model) for stage, lowered in networks[precision].items()}
        qualities[precision] = measure_quality(replace_networks(pipeline, sessions), problem)
    return [f for precision, quality in qualities.items() for f in make_figures(precision, quality, qualities["fp32"])]


def measure_quality(pipeline: Pipeline, problem: Problem) -> Quality:
    """Measure AUC over the whole catalogue (the list first, then the order of the stages before) and NDCG@10 of the list."""
    aucs, ndcgs, answers = [], [], []
    for block in split_into_blocks(problem.test_users):
        tensors = pipeline.trace({"user_id": problem.user_ids[block][:, None]})
        by_rank = np.argsort(-tensors["rank_scores"], axis=1, kind="stable")
        ranked = np.take_along_axis(tensors["candidate_ids"], by_rank, axis=1)
        order = score_by_retrieval(pipeline, tensors, problem)
        for ids in (tensors["candidate_ids"], ranked, tensors["item_ids"]):
            order = move_up(order, find_positions(ids, problem))
        relevant = problem.test.relevant[block]
        aucs.append(auc(order, relevant, problem.test.seen[block]))
        ndcgs.append(ndcg_at(find_positions(tensors["item_ids"], problem), relevant, 10))
        answers.append({name: tensors[name] for name in ("item_ids", "scores")})
    return Quality(np.concatenate(aucs), np.concatenate(ndcgs), join(answers))


def make_figures(precision: str, quality: Quality, exact: Quality) -> list[Figure]:
    """Return the figures of the whole pipeline in one precision. exact: fp32's, of the same users."""
    mean_auc, exact_auc = float(np.nanmean(quality.auc)), float(np.nanmean(exact.auc))
    ndcg, exact_ndcg = float(np.nanmean(quality.ndcg_at_10)), float(np.nanmean(exact.ndcg_at_10))
    changes = quality.ndcg_at_10 - exact.ndcg_at_10
    error = float(np.nanstd(changes) / np.sqrt(np.isfinite(changes).sum()) / exact_ndcg)
    other_lists = (quality.answers["item_ids"] != exact.answers["item_ids"]).any(axis=1).sum()
    score_change = float(np.abs(quality.answers["scores"] - exact.answers["scores"]).max())
    change = abs(ndcg / exact_ndcg - 1.0)
    rows: tuple[tuple[str, float, dict[str, float]], ...] = (
        ("AUC over fp32", mean_auc / exact_auc, {"at_least": LEAST_AUC_SHARE}),
        ("NDCG@10", ndcg, {}),
        ("size of the relative change of NDCG@10", change, {"at_most": MOST_NDCG_CHANGE}),
        ("its standard error over users", error, {}),
        ("largest change of a served score", score_change, {}),
        ("lists with other items or another order", float(other_lists), {}),
        (f"lists beyond what scores within {HALF} explain", float(find_beyond(quality.answers, exact.answers, HALF).sum()), {}),
        ("users", float(len(changes)), {}),
    )
    return [Figure(name=f"{precision}: {name}", values=[value], **bounds) for name, value, bounds in rows]


def export_training_part(dataset: Dataset, repository: Path, console: Console) -> Path:
    """Return a repository exported from the training part; an existing one is kept."""
    if not (repository / ENSEMBLE).is_dir():
        train, _ = split_log(dataset.interactions, TEST_SHARE)
        build_repository(replace(dataset, interactions=train), repository, Settings(), console)
    return repository


def measure(dataset: Dataset, repository: Path, console: Console) -> list[Figure]:
    folders = find_stage_folders(repository)
    networks = {precision: lower_networks(folders, precision, console.print) for precision in PRECISIONS}
    return measure_pipeline(Pipeline.load(repository), networks, dataset) + measure_graphs(networks, Trial(folders).feeds)


def main(
    data: Annotated[str, typer.Option(help="folder with a dataset.toml, or bundled name")] = "online-retail",
    repo: Annotated[Path | None, typer.Option(help="repository exported from the training part of --data")] = None,
    results: ResultsFolder = RESULTS,
) -> None:
    """Measure AUC, NDCG@10, sizes and latencies of fp32, fp16 and int8. Exit code 1 when a bound is missed."""
    machine, console, dataset = read_machine(), Console(stderr=True), load_dataset(data)
    repository = repo or export_training_part(dataset, WORK / dataset.description.name, console)
    figures, name = measure(dataset, repository, console), dataset.description.name
    command = f"python -m experiments.precision --data {data}"
    title, conditions = f"Networks in fp16 and int8 on {name}", f"{data}, test users, in process, one thread"
    finish(f"precision-{name}", title, command, conditions, figures, results, machine)


if __name__ == "__main__":
    run(main, "python -m experiments.precision")
